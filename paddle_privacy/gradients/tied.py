"""Parameters that a model reads outside the layer that owns them: ``matmul(h, self.embed.weight, transpose_y=True)``.

The first forward of each structure is searched: a managed parameter that its autograd graph reaches was used outside
the tapped layers, since inside them nothing wants its gradient. Such a parameter gets a stand-in for the whole forward
of the model, which the owner's tap swaps for the real one while the owner itself runs. Both uses then reach the same
sum of factors, cross term included.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor, nn

from paddle_privacy.errors import PrivacyWarning
from paddle_privacy.gradients.hooks import tensors
from paddle_privacy.gradients.probe import Recording, random_state, set_random_state
from paddle_privacy.gradients.replay import RowByRow
from paddle_privacy.gradients.stand_in import StandIn, expanded, stand_in
from paddle_privacy.gradients.trial import Strategy, close, find_strategies, used

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture
    from paddle_privacy.gradients.entry import Entry


class TiedUses:
    """What each model of one :class:`Capture` reads outside the owners, found once for each structure."""

    def __init__(self, capture: Capture):
        self._capture = weakref.ref(capture)
        self._searched: dict[tuple[int, bool], list[frozenset[int]]] = {}
        self._strategies: dict[tuple[int, bool], dict[int, Strategy]] = {}
        self._expanding: dict[tuple[int, bool], set[int]] = {}
        self._row_by_row = RowByRow()

    @property
    def capture(self) -> Capture:
        capture = self._capture()
        assert capture is not None
        return capture

    def begin(self, entry: Entry) -> None:
        """A forward with gradients begins: stand-ins for what it is known to read."""
        rows = entry.rows or 1
        for key, strategy in self._strategies.get(_key(entry), {}).items():
            if self.capture.trainable(self.capture.parameters[key]):
                self._install(entry, key, self._stand_in(entry, key, strategy, rows))

    def expands(self, layer: nn.Layer) -> bool:
        """Whether what `layer` looks up for all samples is expanded to the batch in the running forward."""
        entry = self.capture.running.entry
        return entry is not None and id(layer) in self._expanding.get(_key(entry), ())

    def end(self, entry: Entry, output: Any) -> Any:
        """The forward is over; may return a replaced output, or that of a repetition in which everything was captured.

        Raises:
            UnsupportedLayer: a parameter is used outside its owner in a way that cannot be captured.
        """
        self._put_back(entry)
        if output is None or not paddle.is_grad_enabled():
            return None
        searched = self._searched.setdefault(_key(entry), [])
        called = frozenset(entry.called)
        if any(called <= known for known in searched):
            return self._watch(entry, output)
        result, found = output, self._found(entry, output)
        if found:
            result = self._expand_lookups(entry, output)
            found = self._found(entry, result)
        if found:
            result = self._again(entry, found)
        searched.append(called)
        watched = self._watch(entry, result)
        return watched if watched is not None else None if result is output else result

    def _found(self, entry: Entry, output: Any) -> list[int]:
        """The trained parameters that something outside the taps has read."""
        trained = {key: p for key, p in self.capture.parameters.items() if self.capture.trainable(p)}
        return [
            key
            for key, hit in zip(trained, used(list(tensors(output)), list(trained.values()), entry.layer.parameters()))
            if hit
        ]

    def _expand_lookups(self, entry: Entry, output: Any) -> Any:
        """Positions looked up as [T] are looked up as [B, T], where the model computes the same from that."""
        if not entry.passed:
            return output
        self._expanding[_key(entry)] = set(entry.passed)
        try:
            repeated = self._forward(entry, keep=True)
            same = _same(list(tensors(output)), list(tensors(repeated)))
        except Exception:
            # The model did something with the positions that the batch axis is in the way of.
            same = False
        if same:
            return repeated
        del self._expanding[_key(entry)]
        return output

    def _again(self, entry: Entry, found: list[int]) -> Any:
        capture, rows = self.capture, entry.rows or 1
        known = self._strategies.setdefault(_key(entry), {})
        keys = [*known, *(key for key in found if key not in known)]

        def run(values: Any) -> list[Tensor]:
            for key, value in zip(keys, values):
                self._install(entry, key, value)
            return list(tensors(self._forward(entry, keep=False)))

        strategies = find_strategies(run, [capture.parameters[key] for key in keys], rows, entry.layer.parameters())
        for key, strategy in zip(keys, strategies):
            known[key] = strategy or Strategy("rows")
        slow = [capture.located.names[key] for key, strategy in known.items() if strategy.kind == "rows"]
        if slow and rows > 1:
            warnings.warn(
                f"parameters {slow} are used in '{entry.path}' outside the layers that own them, in a way that has to "
                "be differentiated sample by sample: each step costs as many backward passes as there are samples; use "
                "them there in a product such as paddle.matmul(h, weight, transpose_y=True), or through their layers "
                "with the batch on the first axis",
                PrivacyWarning,
                stacklevel=5,
            )
        self.begin(entry)
        return self._forward(entry, keep=True)

    def _watch(self, entry: Entry, output: Any) -> Any:
        """Asks the outputs for what has to be differentiated row by row."""
        if not entry.by_rows:
            return None
        tap = self.capture.tap_of(next(iter(entry.by_rows)))
        what = f"'{entry.path}'"
        leaves, entry.by_rows = entry.by_rows, {}
        others = [*entry.layer.parameters(), *self.capture.running.shadows]
        return self._row_by_row.ask(tap, output, leaves, others, entry.rows or 1, self.capture.batch_inputs(), what)

    def _forward(self, entry: Entry, keep: bool) -> Any:
        """The entry's forward again, from the same random state, with the taps of its layers at work."""
        running, recording = self.capture.running, entry.recording
        after = random_state()
        if recording is not None:
            set_random_state(recording.random_state)
            entry.recording = Recording(recording.wanted) if keep else None
            if entry.recording is not None:
                entry.recording.random_state, entry.recording.buffers = recording.random_state, recording.buffers
        running.depth += 1
        try:
            with paddle.enable_grad():
                return entry.layer(*entry.args, **entry.kwargs)
        finally:
            running.depth -= 1
            if not keep:
                entry.recording = recording
                set_random_state(after)
            self._put_back(entry)

    def _stand_in(self, entry: Entry, key: int, strategy: Strategy, rows: int) -> StandIn:
        capture = self.capture
        parameter = capture.parameters[key]
        tap = capture.tap_of(key)
        if strategy.kind == "expanded":
            made = expanded(parameter, rows, strategy.axes)
            tap.keep_own_gradient(capture, made, parameter, rows)
            return made
        if strategy.kind == "rows":
            entry.by_rows[key] = made = stand_in(parameter)
            return made
        return tap.product_stand_in(capture, parameter)

    def _install(self, entry: Entry, key: int, value: Tensor) -> None:
        self.capture.uses.elsewhere.add(key)
        for owner in self.capture.located.owners:
            for name, parameter in owner.parameters.items():
                if id(parameter) == key:
                    self.capture.replace(owner.layer, name, value)
                    entry.stood_in.append((owner.layer, name))

    def _put_back(self, entry: Entry) -> None:
        while entry.stood_in:
            self.capture.put_back(*entry.stood_in.pop())


def _same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(close(a, b) for a, b in zip(mine, theirs))


def _key(entry: Entry) -> tuple[int, bool]:
    return id(entry.layer), entry.layer.training
