"""Client-level privacy for federated averaging: a round's updates, clipped, added, noised and accounted for.

DP-FedAvg (McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", Algorithm 1, with the fixed
denominator f_c): the unit that ε protects is *one client with all its rows*, whatever it computes on its device.

What this does not do: it runs where all updates are seen in the clear, so the server is trusted (no secure
aggregation); clients are drawn here, by :func:`draw_clients`, and one that drops out of its round must count as an
update that is not there. ``docs/distributed.md`` has the argument.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_privacy.accounting.events import Event, Gaussian, PoissonSampled
from paddle_privacy.arguments import noise_generator
from paddle_privacy.clipping import positive
from paddle_privacy.noise import NoiseGenerator
from paddle_privacy.sampling.poisson import poisson_rows


def draw_clients(num_clients: int, sample_rate: float) -> list[int]:
    """The clients of one round: each joins independently with probability `sample_rate`; may be none.

    Args:
        num_clients: how many there are; they are numbered from 0.
        sample_rate: q in (0, 1].

    The randomness is the operating system's: whoever can predict who takes part undoes the amplification by sampling.
    """
    if isinstance(num_clients, bool) or not isinstance(num_clients, int) or num_clients < 1:
        raise ValueError(f"num_clients must be a positive integer, found {num_clients!r}")
    rate = _rate(sample_rate)
    return poisson_rows(num_clients, rate, lambda n: np.frombuffer(os.urandom(8 * n), dtype=np.uint64)).tolist()


def aggregate(
    updates: Iterable[Any],
    clip_norm: float,
    noise_multiplier: float,
    *,
    expected_clients: float | None = None,
    like: Any = None,
    accountant: Any = None,
    sample_rate: float | None = None,
    generator: NoiseGenerator | None = None,
    secure: bool = True,
) -> Any:
    """The private average of one round's updates: (Σᵢ min(1, C/‖uᵢ‖)·uᵢ + N(0, σ²C²)) / expected_clients.

    Adding or removing one client moves the sum by at most C in L2 norm, so the round is the Gaussian mechanism with
    noise multiplier σ, over a Poisson sample of the clients where :func:`draw_clients` drew them.

    Args:
        updates: one a client: the change of the weights since the round began. A tensor or array, a list of them, or a
            dict of them by name (floating point, the same shapes for every client). An iterator is consumed one client
            at a time, so memory does not grow with the clients.
        clip_norm: C, the bound on the L2 norm of a client's whole update.
        noise_multiplier: σ ≥ 0.
        expected_clients: the public divisor, q·(number of clients); never the number that came, which is private. With
            None the noisy *sum* is returned.
        like: one update's structure (the weights themselves, say). Needed where no client may come: a round without
            clients releases noise all the same, or its absence would tell. Given, it decides shapes and dtypes.
        accountant: an RDP, zCDP or PLD accountant (``paddle_privacy.accounting.get_accountant("rdp")``): the round is
            composed before the result exists. With None the caller accounts for :func:`round_event`.
        sample_rate: q of :func:`draw_clients`, for the accountant; None where every client is in every round.
        generator, secure: as in :class:`paddle_privacy.DPSGD`.

    Returns:
        Tensors in the structure of an update, in its dtypes.

    Raises:
        ValueError, TypeError: an argument is refused, or an update has another structure or shape than the others.
            Nothing has been composed then.

    ==================================  ===========================================================================
    what a client sends                 what happens
    ==================================  ===========================================================================
    an update of any norm               scaled to norm ≤ C
    NaN or infinity anywhere            left out, as if the client had not come (its share of the divisor stays)
    two updates                         not told apart from two clients: send one a client
    ==================================  ===========================================================================
    """
    bound, sigma = positive("clip_norm", clip_norm), _noise_multiplier(noise_multiplier)
    if sigma and not math.isfinite(bound):
        raise ValueError("clip_norm must be finite where there is noise: an unbounded update cannot be hidden")
    divisor = 1.0 if expected_clients is None else positive("expected_clients", expected_clients)
    if not math.isfinite(divisor):
        raise ValueError(f"expected_clients must be finite, found {expected_clients!r}")
    noise = noise_generator(generator, secure)
    event = round_event(sigma, sample_rate)

    template = None if like is None else _leaves(like, "like")
    sums: dict[Any, Tensor] = {}
    # _leaves detaches; no no_grad() here, because an iterator may train its clients while it is consumed.
    for number, update in enumerate(updates):
        leaves = _leaves(update, f"updates[{number}]")
        like = update if like is None else like
        template = leaves if template is None else template
        _check_alike(leaves, template, number)
        norm = math.sqrt(sum(float((leaf.astype("float64") ** 2).sum()) for leaf in leaves.values()))
        if not math.isfinite(norm):
            continue
        factor = 1.0 if math.isinf(bound) else min(1.0, bound / max(norm, 1e-300))
        for key, leaf in leaves.items():
            part = leaf.astype("float64") * factor
            sums[key] = part if key not in sums else sums[key].add_(part)
    if template is None:
        raise ValueError("updates is empty and like is missing, so the shapes of the noise are unknown; pass like=")
    if accountant is not None:
        accountant.compose(event)
    totals = [sums[key] if key in sums else paddle.zeros(leaf.shape, "float64") for key, leaf in template.items()]
    noise.add_noise(totals, sigma * bound if sigma else 0.0)
    noisy = {key: (t / divisor).astype(template[key].dtype) for key, t in zip(template, totals)}
    return _rebuilt(like, noisy)


def round_event(noise_multiplier: float, sample_rate: float | None = None) -> Event:
    """What one :func:`aggregate` costs each client, under adding or removing one client."""
    mechanism = Gaussian(_noise_multiplier(noise_multiplier))
    return mechanism if sample_rate is None else PoissonSampled(_rate(sample_rate), mechanism)


def _leaves(update: Any, name: str) -> dict[Any, Tensor]:
    """The tensors of an update by name or number."""
    if isinstance(update, Mapping):
        found = {key: _tensor(value, f"{name}[{key!r}]") for key, value in update.items()}
    elif isinstance(update, (list, tuple)):
        found = {key: _tensor(value, f"{name}[{key}]") for key, value in enumerate(update)}
    else:
        found = {None: _tensor(update, name)}
    if not found:
        raise ValueError(f"{name} holds no tensor")
    return found


def _tensor(value: Any, name: str) -> Tensor:
    if not isinstance(value, (Tensor, np.ndarray)):
        raise TypeError(f"{name} must be a tensor or an array, found {type(value).__name__}")
    tensor = value.detach() if isinstance(value, Tensor) else paddle.to_tensor(value)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be of a floating-point type, found {tensor.dtype}")
    return tensor


def _check_alike(leaves: dict[Any, Tensor], template: dict[Any, Tensor], number: int) -> None:
    if leaves.keys() != template.keys():
        odd = sorted(map(str, leaves.keys() ^ template.keys()))
        raise ValueError(f"updates[{number}] has other tensors than expected: {odd} are in one of them only")
    for key, leaf in leaves.items():
        if leaf.shape != template[key].shape:
            raise ValueError(
                f"updates[{number}]{'' if key is None else f'[{key!r}]'} has shape {leaf.shape}, expected "
                f"{template[key].shape}"
            )


def _rebuilt(like: Any, values: dict[Any, Tensor]) -> Any:
    if isinstance(like, Mapping):
        return values
    if isinstance(like, (list, tuple)):
        return [values[number] for number in range(len(values))]
    return values[None]


def _noise_multiplier(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"noise_multiplier must be a number >= 0, found {value!r}")
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"noise_multiplier must be a finite number >= 0, found {value!r}")
    return float(value)


def _rate(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], found {value!r}")
    return float(value)
