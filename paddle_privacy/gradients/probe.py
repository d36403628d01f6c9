"""The structure probe: does the model keep the samples of a batch apart, on the axis where the library looks for them?

Per-sample gradients exist only if row i of every activation depends on row i of the input alone. Before the first
backward of a new structure (other layers ran, or the model changed between train and eval mode) the forward is replayed
three times without gradients, on the recorded inputs and the recorded random state:

- with half of the rows replaced by others, then with the other half: no row that was kept may move, in any tapped
  layer's input or the model's output. Catches batch statistics, samples compared with each other, axes mixed up;
- with one row more: every tapped layer must see one row more. Catches an activation whose first axis is as long as the
  batch but is not the batch (time-major sequences, ``[T]`` position ids, positions that are broadcast later).

It also refuses a forward that stores something of the batch in a buffer of the model. What the probe cannot see is what
happens outside the model's forward: the loss, and code between two models. `check_independence` replays those as well.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_privacy.errors import PrivacyError, PrivacyWarning, UnsupportedLayer
from paddle_privacy.gradients.guard import refuse_lost_owners
from paddle_privacy.gradients.hooks import map_tensors, tensors

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture
    from paddle_privacy.gradients.entry import Entry

_MAX_WIDTH = 1 << 18
_LARGEST_STATISTIC = 1 << 16
_FIRST_LOOK = 64
# Batches that may leave a structure undecided before that is said and taken as it is.
_TRIES = 10
_directions: dict[tuple, Tensor] = {}


def batch_axis(layer: nn.Layer) -> int:
    """1 for recurrent layers that were built time-major, else 0."""
    return 1 if getattr(layer, "time_major", False) else 0


def fingerprints(x: Tensor, axis: int = 0) -> Tensor:
    """[rows, 2]: two fixed pseudo-random projections of each row, equal where the rows are equal bit for bit.

    Different rows have different projections up to rounding. Paddle's random state is not used.
    """
    rows = x.shape[axis]
    flat = (x.moveaxis(axis, 0) if axis else x).reshape([rows, -1])
    if flat.dtype in (paddle.complex64, paddle.complex128):
        flat = paddle.as_real(flat).reshape([rows, -1])
    wide = paddle.float32 if flat.dtype in (paddle.float16, paddle.bfloat16, paddle.float32) else paddle.float64
    total = paddle.zeros([2, rows], dtype=wide)
    for chunk, start in enumerate(range(0, flat.shape[1], _MAX_WIDTH)):
        part = flat[:, start : start + _MAX_WIDTH].astype(wide)
        directions = _directions_like(part)[:, : part.shape[1]]
        # With the rows on the right: an order of magnitude faster than on the left.
        total = total + (1.0 + chunk / 7.0) * paddle.matmul(directions, part, transpose_y=True)
    return total.T.astype("float64")


def _directions_like(x: Tensor) -> Tensor:
    key = (x.dtype, str(x.place))
    if key not in _directions:
        _directions[key] = paddle.to_tensor(np.random.RandomState(0).uniform(0.5, 1.5, [2, _MAX_WIDTH]), dtype=x.dtype)
    return _directions[key]


class Seen:
    """What one call of a tapped layer looked like: the fingerprints of its inputs, row by row."""

    def __init__(self, path: str, kind: str, trained: bool, axis: int, inputs: Any, output: Any, rows: int | None):
        self.path, self.kind, self.trained = path, kind, trained
        # The first axis that the gradient rule will take for the batch.
        self.rows = rows
        kept = [x for x in tensors(inputs) if x.ndim > axis and x.shape[axis] == rows]
        self.shapes = [x.shape[:axis] + x.shape[axis + 1 :] for x in kept]
        self.prints = [fingerprints(x, axis) for x in kept]


class Recording:
    """One forward as the probe sees it."""

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.calls: list[Seen] = []
        self.random_state: Any = None
        self.buffers: list[tuple[dict, str, Tensor]] = []
        self.outputs: list[Tensor] = []

    def add(self, seen: Seen) -> None:
        self.calls.append(seen)


class StructureProbe:
    """Verifies each structure of the models of one :class:`Capture` once."""

    def __init__(self, capture: Capture):
        self._capture = capture
        self._verified: dict[tuple, list[frozenset[int]]] = {}
        self._tries: dict[tuple, int] = {}
        self._forwards: dict[tuple, int] = {}
        self._layers: dict[int, list[nn.Layer]] = {}
        self._warned: set[int] = set()

    def begin(self, entry: Entry) -> Recording:
        """What has to be known before the forward runs."""
        key = entry.structure = self._key(entry)
        seen = self._forwards[key] = self._forwards.get(key, 0) + 1
        if seen == self._next_look(seen):
            # A model may mix samples for some data only, for example by sorting them by length.
            self._verified.pop(key, None)
        recording = Recording(wanted=not self._verified.get(key))
        recording.random_state = random_state()
        if recording.wanted:
            recording.buffers = [(place, name, held.clone()) for place, name, held in _state(entry.layer)]
        return recording

    def _key(self, entry: Entry) -> tuple:
        """The model, and which of its layers are in training mode."""
        layers = self._layers.get(id(entry.layer))
        if layers is None:
            layers = self._layers[id(entry.layer)] = entry.layer.sublayers(include_self=True)
        return id(entry.layer), tuple(layer.training for layer in layers)

    @staticmethod
    def _next_look(forwards: int) -> int:
        """The forwards at which a known structure is verified again: the 64th, the 512th, and so on by factors of 8."""
        look = _FIRST_LOOK
        while look < forwards:
            look *= 8
        return look

    def end(self, entry: Entry, output: Any) -> None:
        """After the forward: verifies its structure, unless that is known.

        Raises:
            PrivacyError: the structure does not keep samples apart; the message names the first layer.
        """
        recording, entry.recording = entry.recording, None
        verified = self._verified.setdefault(entry.structure, [])
        called = frozenset(entry.called)
        if recording is None or any(called <= known for known in verified):
            return
        refuse_lost_owners(self._capture, entry.layer, entry.path)
        first = not verified
        with _python_state(), paddle.no_grad():
            if not first:
                # This forward was not watched from its start, because its structure was thought to be known.
                try:
                    with model_buffers_kept(entry.layer):
                        recording = self._replay(entry, recording, lambda x: x, [])
                except PrivacyError:
                    raise
                except Exception as error:
                    self._warn(entry, f"running it a second time raised {type(error).__name__}: {error}")
                    verified.append(called)
                    return
                output = None
            if self._verify(entry, recording, output):
                verified.append(called)

    def _verify(self, entry: Entry, recording: Recording, output: Any) -> bool:
        """Whether the structure could be verified (else it is tried again at the next batch)."""
        rows = {seen.rows for seen in recording.calls if seen.trained}
        if len(rows) != 1 or None in rows:
            # Different sizes in one forward: the end of backward() refuses them, unless nothing of it is trained.
            return False
        batch = rows.pop()
        assert batch is not None
        leaves = [k for k, x in enumerate(_leaves(entry)) if x.ndim and x.shape[0] == batch]
        if not leaves:
            self._warn(entry, "none of its inputs is a tensor with the batch on its first axis")
            return False
        exchanges = _exchanges(entry, leaves, self._forwards[entry.structure])
        if not exchanges:
            return False
        changed = _changed_buffers(recording.buffers)
        with model_buffers_kept(entry.layer):
            for exchange in exchanges:
                try:
                    touched = self._replay(entry, recording, exchange.apply, leaves)
                except PrivacyError:
                    raise
                except Exception as error:
                    self._warn(entry, f"running it a second time raised {type(error).__name__}: {error}")
                    return True
                if _other_shapes(recording, touched):
                    # Padding trimmed to the longest sample, most likely; another batch may show more.
                    tries = self._tries[entry.structure] = self._tries.get(entry.structure, 0) + 1
                    if tries == _TRIES:
                        self._warn(entry, "replacing samples changes the shape of activations (trimmed padding?)")
                    return tries >= _TRIES
                outputs = recording.outputs if output is None else list(tensors(output))
                self._compare(entry, recording, touched, leaves, exchange, outputs)
                self._refuse_batch_buffers(entry, changed)
            try:
                longer = self._replay(entry, recording, lambda x: paddle.concat([x, x[:1]]), leaves)
            except PrivacyError:
                raise
            except Exception as error:
                self._warn(entry, f"running it on one row more raised {type(error).__name__}: {error}")
                return True
            self._compare_rows(entry, longer, batch)
        return True

    def _replay(
        self, entry: Entry, recording: Recording, edit: Callable[[Tensor], Tensor], leaves: list[int]
    ) -> Recording:
        """The forward again, with `edit` applied to the batch's inputs; same random state, buffers as before it."""
        for place, name, before in recording.buffers:
            place[name] = before.clone()
        running = self._capture.running
        replay = Recording()
        replay.random_state, replay.buffers = recording.random_state, recording.buffers
        chosen, position = set(leaves), iter(range(len(_leaves(entry))))
        args, kwargs = map_tensors(
            lambda x: edit(x.detach()) if next(position) in chosen else x, (entry.args, entry.kwargs)
        )
        set_random_state(recording.random_state)
        running.probing = replay
        rows, sizes = entry.rows, entry.sizes
        entry.sizes = frozenset(x.shape[0] for x in _leaves((args, kwargs)) if x.ndim)
        if leaves:
            entry.rows = _leaves((args, kwargs), leaves[:1])[0].shape[0]
        running.entry = entry
        try:
            replay.outputs = list(tensors(entry.layer(*args, **kwargs)))
        finally:
            running.probing, running.entry = None, None
            entry.rows, entry.sizes = rows, sizes
        return replay

    def _compare(
        self,
        entry: Entry,
        base: Recording,
        touched: Recording,
        leaves: list[int],
        exchange: Exchange,
        outputs: list[Tensor],
    ) -> None:
        """Raises where a row that was not touched moved, unless the forward is not reproducible at all."""
        where = _first_difference(base, touched, outputs, exchange.kept)
        if where is None:
            return
        again = self._replay(entry, base, lambda x: x, leaves)
        if _first_difference(base, again, outputs, exchange.kept) is not None:
            self._warn(entry, "it computes something else when it is run again on the same inputs and random state")
            return
        culprit = _culprit(entry, base.random_state, leaves, exchange)
        place = f"layer {culprit} mixes" if culprit else f"{where} depends on other rows: '{entry.path}' mixes"
        raise UnsupportedLayer(
            f"{place} the samples of a batch (replacing some rows of the input moved others in '{entry.path}'), so one "
            "sample's data would reach another sample's gradient; use a layer that works within one sample, batch "
            "first, such as GroupNorm or LayerNorm"
        )

    def _compare_rows(self, entry: Entry, longer: Recording, batch: int) -> None:
        for seen in longer.calls:
            if seen.trained and seen.rows != batch + 1:
                raise UnsupportedLayer(
                    f"layer '{seen.path}' ({seen.kind}) sees {seen.rows} rows on its first axis when '{entry.path}' "
                    f"gets {batch + 1} samples, so that axis is not the batch (it had the batch's length, {batch}, by "
                    "chance); make activations batch first and give position ids as [B, T]"
                )

    def _refuse_batch_buffers(self, entry: Entry, changed: list[tuple[dict, str, Tensor]]) -> None:
        for place, name, after in changed:
            if not _equal(place[name], after):
                path, layer = next(
                    (p, sub)
                    for p, sub in entry.layer.named_sublayers(include_self=True)
                    if sub._buffers is place or sub._parameters is place
                )
                raise UnsupportedLayer(
                    f"layer '{path or entry.path}' ({type(layer).__name__}) stores statistics of the batch in its "
                    f"buffer '{name}', which is saved with the model and has no noise; freeze the buffer or put the "
                    "layer in eval() mode"
                )

    def _warn(self, entry: Entry, reason: str) -> None:
        if id(entry.layer) not in self._warned:
            self._warned.add(id(entry.layer))
            warnings.warn(
                f"whether '{entry.path}' keeps samples apart could not be verified: {reason}; check it with "
                "paddle_privacy.check_independence(model, loss_fn, *batch)",
                PrivacyWarning,
                stacklevel=6,
            )


def _leaves(entry: Any, only: list[int] | None = None) -> list[Tensor]:
    tree = entry if isinstance(entry, tuple) else (entry.args, entry.kwargs)
    found = list(tensors(tree))
    return found if only is None else [found[k] for k in only]


class Exchange:
    """Some rows of the batch replaced by others of its rows; the rest is kept."""

    def __init__(self, source: np.ndarray, touched: np.ndarray):
        self.kept = paddle.to_tensor(np.flatnonzero(~touched))
        self.touched = [int(i) for i in np.flatnonzero(touched)]
        self._rows = paddle.to_tensor(np.where(touched, source, np.arange(len(source))))

    def apply(self, x: Tensor) -> Tensor:
        return x.index_select(self._rows)


def _exchanges(entry: Entry, leaves: list[int], seed: int) -> list[Exchange]:
    """Two that touch complementary halves, drawn by `seed`, so that what one sample does to all others shows.

    Rows are exchanged from the ends inwards where that changes most: where samples come sorted by length, that is what
    a model that sorts reacts to. Empty where all rows are equal.
    """
    inputs = _leaves(entry, leaves)
    rows = np.arange(inputs[0].shape[0])

    def changed(source: np.ndarray) -> np.ndarray:
        to = paddle.to_tensor(source)
        moved = [(x != x.index_select(to)).reshape([len(rows), -1]).any(axis=1).astype("int64") for x in inputs]
        return paddle.stack(moved).sum(axis=0).numpy()

    sources = [rows[::-1].copy(), np.roll(rows, 1), np.roll(rows, len(rows) // 2)]
    moved = [changed(source) for source in sources]
    best = max(range(3), key=lambda k: (int(moved[k].sum()), -k))
    source, able = sources[best], np.flatnonzero(moved[best])
    if not len(able) or len(rows) < 2:
        return []
    touched = np.random.RandomState(seed).rand(len(rows)) < 0.5
    # Both halves hold a row that changes, if two do.
    touched[able[0]], touched[able[-1]] = True, len(able) == 1
    halves = [touched, ~touched] if len(able) > 1 else [touched]
    return [Exchange(source, half) for half in halves]


def _other_shapes(base: Recording, replay: Recording) -> bool:
    """Whether the same layers ran in both, on activations of other lengths."""
    if [s.path for s in base.calls] != [s.path for s in replay.calls]:
        return False
    return any(mine.shapes != theirs.shapes for mine, theirs in zip(base.calls, replay.calls))


def _first_difference(base: Recording, replay: Recording, outputs: list[Tensor], kept: Tensor) -> str | None:
    """Where one of the rows `kept` moved first."""
    if [s.path for s in base.calls] != [s.path for s in replay.calls]:
        return "which layers run"
    for mine, theirs in zip(base.calls, replay.calls):
        for a, b in zip(mine.prints, theirs.prints):
            if a.shape != b.shape or not _equal(a.index_select(kept), b.index_select(kept)):
                return f"an activation at layer '{mine.path}' ({mine.kind})"
    rows = base.calls[0].rows if base.calls else None
    for a, b in zip(outputs, replay.outputs):
        if not a.ndim or a.shape[0] != rows or a.shape != b.shape:
            continue
        if not _equal(fingerprints(a).index_select(kept), fingerprints(b).index_select(kept)):
            return "the output"
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool((a == b).all())
    return bool(((a == b) | (paddle.isnan(a) & paddle.isnan(b))).all())


def _state(model: nn.Layer) -> list[tuple[dict, str, Tensor]]:
    """What a forward may write: buffers, and frozen parameters no larger than a buffer (batch norm's statistics)."""
    found: list[tuple[dict, str, Tensor]] = []
    for layer in model.sublayers(include_self=True):
        for name, buffer in layer._buffers.items():
            # A workspace that no kernel has filled yet has no memory to copy.
            if buffer is not None and buffer.size and buffer._is_initialized():
                found.append((layer._buffers, name, buffer))
        for name, parameter in layer._parameters.items():
            if parameter is not None and parameter.stop_gradient and parameter.size <= _LARGEST_STATISTIC:
                found.append((layer._parameters, name, parameter))
    return found


def _changed_buffers(before: list[tuple[dict, str, Tensor]]) -> list[tuple[dict, str, Tensor]]:
    return [(place, name, place[name].clone()) for place, name, old in before if not _equal(old, place[name])]


@contextmanager
def model_buffers_kept(model: nn.Layer) -> Iterator[None]:
    """What runs inside writes to copies of the model's buffers: not a version number of the originals moves."""
    held = _state(model)
    try:
        for place, name, value in held:
            place[name] = value.detach().clone()
        yield
    finally:
        for place, name, value in held:
            place[name] = value


def random_state() -> tuple:
    """Paddle's, NumPy's and Python's random states: what dropout and stochastic depth draw from."""
    return paddle.get_rng_state(), np.random.get_state(), random.getstate()


def set_random_state(state: tuple) -> None:
    paddle.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


@contextmanager
def _python_state() -> Iterator[None]:
    """Everything random is as before, whatever happens inside."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _culprit(entry: Entry, state: tuple, leaves: list[int], exchange: Exchange) -> str | None:
    from paddle_privacy.gradients.independence import first_mixing_layer

    chosen, position = set(leaves), iter(range(len(_leaves(entry))))
    edited = map_tensors(
        lambda x: exchange.apply(x.detach()) if next(position) in chosen else x, (entry.args, entry.kwargs)
    )
    rows = _leaves(entry, leaves[:1])[0].shape[0]
    return first_mixing_layer(entry.layer, (entry.args, entry.kwargs), edited, rows, exchange.touched, state)
