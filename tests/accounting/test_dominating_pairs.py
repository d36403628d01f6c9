"""The claimed worst cases against small data sets whose output distributions are computed exactly.

Each mechanism is run (on paper) on random neighbouring data sets of scalar rows in [-1, 1]: its output is a mixture of
Gaussians over all batches, so δ(ε) is one numerical integral. None may exceed the δ of the dominating pair.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.special import ndtr

from paddle_privacy.accounting import FixedSize, Gaussian, PLDAccountant, PoissonSampled, ShuffledEpoch
from paddle_privacy.accounting.gaussian import gaussian_epsilon
from paddle_privacy.accounting.mechanism import decompose
from paddle_privacy.accounting.pairs import Branch, Pair, dominating_pairs
from paddle_privacy.accounting.pld import Composition

GRID = np.linspace(-14, 14, 40_001)


def poisson_batches(size, rate):
    for chosen in itertools.product([0, 1], repeat=size):
        yield math.prod(rate if c else 1 - rate for c in chosen), chosen


def fixed_batches(size, batch):
    subsets = list(itertools.combinations(range(size), batch))
    for subset in subsets:
        yield 1 / len(subsets), tuple(int(i in subset) for i in range(size))


def output(rows, batches, sigma):
    density = np.zeros_like(GRID)
    for weight, chosen in batches:
        mean = sum(row for row, c in zip(rows, chosen) if c)
        density += weight * np.exp(-((GRID - mean) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    return density


def hockey_stick(p, q, epsilon):
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (GRID[1] - GRID[0]))


def worst_delta(pairs_of_rows, batches, sigma, epsilon):
    worst = 0.0
    for first, second in pairs_of_rows:
        p, q = output(first, list(batches(len(first))), sigma), output(second, list(batches(len(second))), sigma)
        worst = max(worst, hockey_stick(p, q, epsilon), hockey_stick(q, p, epsilon))
    return worst


def random_rows(rng, size):
    return rng.choice([-1.0, 1.0, 0.0], size=size) if rng.random() < 0.5 else rng.uniform(-1, 1, size)


@pytest.mark.parametrize("sigma, epsilon", [(0.7, 0.0), (0.7, 0.8), (1.5, 0.3)])
def test_no_small_data_set_is_worse_than_the_bound(sigma, epsilon):
    rng = np.random.default_rng(5)
    rate = 0.3
    cases = {
        "add or remove": (PoissonSampled(rate, Gaussian(sigma)), [], lambda n: poisson_batches(n, rate)),
        "replace": (PoissonSampled(rate, Gaussian(sigma, "replace_one")), [], lambda n: poisson_batches(n, rate)),
        "fixed, replace": (FixedSize(4, 2, Gaussian(sigma, "replace_one")), [], lambda n: fixed_batches(n, 2)),
        "fixed, zero out": (FixedSize(4, 2, Gaussian(sigma)), [], lambda n: fixed_batches(n, 2)),
    }
    for _ in range(25):
        rows = random_rows(rng, 4)
        other = np.append(rows[:-1], rng.choice([-1.0, 1.0]))
        cases["add or remove"][1].append((rows, rows[:-1]))
        cases["replace"][1].append((rows, other))
        cases["fixed, replace"][1].append((rows, other))
        cases["fixed, zero out"][1].append((rows, np.append(rows[:-1], 0.0)))
    # The extreme data sets that the proofs name: the bound is attained there, so it is not merely large.
    ones = np.ones(4)
    cases["add or remove"][1].append((np.array([0, 0, 0, 1.0]), np.zeros(3)))
    cases["replace"][1].append((np.array([0, 0, 0, 1.0]), np.array([0, 0, 0, -1.0])))
    cases["fixed, replace"][1].append((np.append(-ones[:3], 1.0), -ones))
    cases["fixed, zero out"][1].extend([(np.append(-ones[:3], 1.0), np.append(-ones[:3], 0.0)), (ones, [1, 1, 1, 0])])
    for name, (event, data_sets, batches) in cases.items():
        bound = PLDAccountant().compose(event).get_delta(epsilon)
        worst = worst_delta(data_sets, batches, sigma, epsilon)
        assert worst <= bound * (1 + 1e-6), name
        assert worst == pytest.approx(bound, rel=1e-5), name


def test_groups_of_rows_may_share_a_batch():
    sigma, rate, epsilon = 1.2, 0.3, 0.5
    rng = np.random.default_rng(6)
    pairs = [(random_rows(rng, 4), None) for _ in range(20)] + [(np.array([0, 0, 1.0, 1.0]), None)]
    worst = worst_delta([(rows, rows[:2]) for rows, _ in pairs], lambda n: poisson_batches(n, rate), sigma, epsilon)
    accountant = PLDAccountant().compose(PoissonSampled(rate, Gaussian(sigma)))
    bound = accountant.get_delta(epsilon, group_size=2)
    assert worst == pytest.approx(bound, rel=1e-5) and worst <= bound * (1 + 1e-6)
    # Adding up two single-row guarantees would be wrong in either direction; at small ε it is far from tight.
    assert bound > 1.5 * accountant.get_delta(epsilon)


def test_a_shuffled_epoch_costs_one_participation_of_a_group_costs_its_square():
    sigma = 3.0
    epoch = PLDAccountant().compose(ShuffledEpoch(Gaussian(sigma)))
    assert epoch.relation == "zero_out"
    assert epoch.get_epsilon(1e-5) == pytest.approx(PLDAccountant().step(sigma, 1.0).get_epsilon(1e-5), rel=1e-12)
    assert epoch.get_epsilon(1e-5, group_size=3) == pytest.approx(
        PLDAccountant().step(sigma / 3, 1.0).get_epsilon(1e-5), rel=1e-12
    )
    replaced = PLDAccountant().compose(ShuffledEpoch(Gaussian(sigma, "replace_one")))
    assert replaced.get_epsilon(1e-5) == pytest.approx(
        PLDAccountant().step(sigma / 2, 1.0).get_epsilon(1e-5), rel=1e-12
    )


EVENTS = [
    PoissonSampled(0.05, Gaussian(0.8)),
    PoissonSampled(0.4, Gaussian(1.5)),
    PoissonSampled(0.05, Gaussian(0.8, "replace_one")),
    FixedSize(50, 3, Gaussian(1.1, "replace_one")),
    FixedSize(50, 3, Gaussian(1.1)),
]


@pytest.mark.parametrize("event", EVENTS, ids=str)
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_two_compositions_match_a_double_integral(event, epsilon):
    """δ₂(ε) = E over the first loss of δ₁(ε - loss): no grid of losses, no Fourier transform, no tilt."""
    ((mechanism, _),), _ = decompose(event)
    exact = 0.0
    for pair in dominating_pairs(mechanism):
        total = pair.atom()[0] * single(pair, np.array([epsilon]))[0]
        for branch in pair.branches:
            low = max(branch.start, -12 * branch.sigma - 2)
            high = min(branch.stop, 12 * branch.sigma + 2)
            nodes, weights = np.polynomial.legendre.leggauss(12)
            edges = np.linspace(low, high, 800)
            half = (edges[1] - edges[0]) / 2
            x = (edges[:-1, None] + half * (1 + nodes)).ravel()
            density = sum(w * np.exp(-((x - m) ** 2) / (2 * branch.sigma**2)) for w, m in branch.p)
            density = density / (branch.sigma * math.sqrt(2 * math.pi)) * np.tile(half * weights, edges.size - 1)
            total += float((density * single(pair, epsilon - branch.loss(x))).sum())
        exact = max(exact, total)
    accountant = PLDAccountant().compose(event, 2)
    bound = accountant.get_delta(epsilon)
    assert exact * (1 - 1e-9) <= bound <= exact * (1 + 1e-3)
    lower, upper = accountant.get_epsilon_bounds(bound)
    assert lower <= upper and lower == pytest.approx(epsilon, abs=2e-3) and upper == pytest.approx(epsilon, abs=2e-3)


def single(pair, losses):
    """δ₁ at every real ε: P[L > ε] - e^ε Q[L > ε], for ε < 0 of a pair in two halves by the complement."""

    def upper_tail(mixture, branch, x):
        return sum(weight * ndtr((mean - x) / branch.sigma) for weight, mean in mixture)

    rising, falling = pair.branches[-1], pair.branches[0]
    x = rising.position(losses)
    out = upper_tail(rising.p, rising, x) - np.exp(losses) * upper_tail(rising.q, rising, x)
    if len(pair.branches) == 2:
        x = falling.position(losses)
        below = 1 - upper_tail(falling.p, falling, x), 1 - upper_tail(falling.q, falling, x)
        out = np.where(losses < 0, (1 - below[0]) - np.exp(losses) * (1 - below[1]), out)
    return out


@pytest.mark.parametrize("mu, count", [(1.0, 2), (0.1, 100), (0.01, 10_000), (1e-3, 1_000_000), (0.3, 2000)])
@pytest.mark.parametrize("delta", [1e-3, 1e-15])
def test_composed_gaussians_meet_the_closed_form_from_both_sides(mu, count, delta):
    # The accountant answers unsampled Gaussians in closed form; here they go through grid, tilt and transform.
    pair = Pair((Branch(((1.0, mu),), ((1.0, 0.0),), 1.0),))
    exact = gaussian_epsilon(mu * math.sqrt(count), delta)
    upper = Composition([(pair, count)]).epsilon(delta)
    lower = Composition([(pair, count)], pessimistic=False).epsilon(delta)
    assert exact * (1 - 1e-9) <= upper <= exact + 4e-4
    assert exact - 8e-4 <= lower <= exact * (1 + 1e-9)
    assert delta <= Composition([(pair, count)]).delta(exact) * (1 + 1e-9)


def test_pairs_of_gaussians_keep_their_own_grids():
    # Different spacings of loss in one sum, one of them wider than the window of the result.
    pairs = [(Pair((Branch(((1.0, mu),), ((1.0, 0.0),), 1.0),)), count) for mu, count in ((2.0, 1), (0.05, 400))]
    exact = gaussian_epsilon(math.sqrt(4 + 1), 1e-6)
    assert exact <= Composition(pairs).epsilon(1e-6) <= exact + 1e-4
    assert exact - 2e-4 <= Composition(pairs, pessimistic=False).epsilon(1e-6) <= exact
