"""ε̂ must stay below ε as often as it says, and must find leaks that are there.

False-alarm rates of these tests themselves: each statistical assertion allows the nominal rate plus 3.3 binomial
standard errors (chance below 5e-4 under the hypothesis, and far below for bounds that are conservative);
seeds are fixed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from paddle_privacy.audit import one_run_bound, score_bound
from paddle_privacy.audit.intervals import auc_interval, binomial_tail, lower_limit, upper_limit
from paddle_privacy.audit.one_run import (
    dp_p_value,
    gaussian_epsilon,
    gaussian_tradeoff,
    tradeoff_p_value_exceeds,
)

REPETITIONS = 2000
LEVEL = 0.05
ALLOWED = LEVEL + 3.3 * math.sqrt(LEVEL * (1 - LEVEL) / REPETITIONS)


def best_of_all_thresholds(scores, coins):
    """What to avoid: the smallest p-value over every number of guesses, as if it had been chosen beforehand."""
    ranked = coins[np.argsort(-scores)]
    from_top, from_bottom = np.cumsum(ranked), np.cumsum(~ranked[::-1])
    smallest = 1.0
    for k in range(1, len(scores) // 2 + 1):
        for guesses, right in (
            (k, from_top[k - 1]),
            (k, from_bottom[k - 1]),
            (2 * k, from_top[k - 1] + from_bottom[k - 1]),
        ):
            smallest = min(smallest, binomial_tail(int(right), guesses, 0.5))
    return smallest


class TestNullScores:
    """500 + 500 scores with no leak at all, 2,000 repetitions at level 0.05."""

    def draw(self, seed, ties=False):
        generator = np.random.default_rng(seed)
        for _ in range(REPETITIONS):
            values = generator.normal(size=1000)
            yield np.round(values) if ties else values

    @pytest.mark.parametrize("ties", [False, True])
    def test_ranks(self, ties):
        alarms = sum(score_bound(v[:500], v[500:], 0.0).epsilon > 0 for v in self.draw(1, ties))
        assert alarms / REPETITIONS <= ALLOWED

    def test_split(self):
        alarms = sum(
            score_bound(v[:500], v[500:], 0.0, selection="split", seed=i).epsilon > 0
            for i, v in enumerate(self.draw(2))
            if i < 300
        )
        assert alarms / 300 <= LEVEL + 3.3 * math.sqrt(LEVEL * (1 - LEVEL) / 300)

    @pytest.mark.parametrize("curve", ["dp", "gaussian"])
    def test_one_run(self, curve):
        coins = np.random.default_rng(3).random((REPETITIONS, 1000)) < 0.5
        alarms = sum(one_run_bound(v, coins[i], 0.0, curve=curve).epsilon > 0 for i, v in enumerate(self.draw(4)))
        assert alarms / REPETITIONS <= ALLOWED

    def test_this_test_can_fail(self):
        coins = np.random.default_rng(13).random((100, 1000)) < 0.5
        alarms = sum(best_of_all_thresholds(v, c) <= LEVEL for v, c in zip(self.draw(5), coins))
        assert alarms / 100 > 0.4, "uncorrected selection must show its false alarms, or the null test is blind"


class TestKnownLeaks:
    def test_randomized_response_is_the_tight_case_of_one_run(self):
        """ε-randomized response on every coin: coverage holds, and ε̂ comes close."""
        epsilon, canaries, runs = 1.0, 2000, 300
        generator = np.random.default_rng(6)
        bounds = []
        for _ in range(runs):
            coins = generator.random(canaries) < 0.5
            truthful = generator.random(canaries) < 1 / (1 + math.exp(-epsilon))
            scores = np.where(coins == truthful, 1.0, 0.0) + 1e-9 * generator.random(canaries)
            bounds.append(one_run_bound(scores, coins, 0.0, choices=[(1000, 1000)]).epsilon)
        over = np.mean(np.array(bounds) > epsilon)
        assert over <= LEVEL + 3.3 * math.sqrt(LEVEL * 0.95 / runs)
        assert np.median(bounds) > 0.8

    def test_independent_gaussian_canaries(self):
        """Canary i answered by N(coin, 1/μ²): exactly μ-GDP. The f-DP audit is sharper than the (ε, δ) one."""
        mu, delta, canaries, runs = 1.5, 1e-5, 1000, 60
        generator = np.random.default_rng(7)
        true_epsilon = gaussian_epsilon(mu, delta)
        dp, gaussian = [], []
        for _ in range(runs):
            coins = generator.random(canaries) < 0.5
            scores = coins + generator.normal(size=canaries) / mu
            dp.append(one_run_bound(scores, coins, delta).epsilon)
            gaussian.append(one_run_bound(scores, coins, delta, curve="gaussian").epsilon)
        allowed = LEVEL + 3.3 * math.sqrt(LEVEL * 0.95 / runs)
        assert np.mean(np.array(dp) > true_epsilon) <= allowed
        assert np.mean(np.array(gaussian) > true_epsilon) <= allowed
        assert np.median(gaussian) > 1.3 * np.median(dp) > 0

    @pytest.mark.parametrize("selection", ["ranks", "split"])
    def test_many_independent_runs(self, selection):
        """Scores N(μ, 1) and N(0, 1): the bound must not pass the exact ε(δ) of μ-GDP, and must see the leak."""
        mu, delta, runs = 1.5, 1e-5, 100
        generator = np.random.default_rng(8)
        bounds = [
            score_bound(
                generator.normal(size=500) + mu, generator.normal(size=500), delta, selection=selection, seed=i
            ).epsilon
            for i in range(runs)
        ]
        assert np.mean(np.array(bounds) > gaussian_epsilon(mu, delta)) <= LEVEL + 3.3 * math.sqrt(LEVEL * 0.95 / runs)
        assert np.median(bounds) > 1.0

    @pytest.mark.parametrize("curve", ["dp", "gaussian"])
    def test_no_noise_at_all_is_caught(self, curve):
        coins = np.random.default_rng(9).random(1000) < 0.5
        bound = one_run_bound(coins + 0.1 * np.random.default_rng(10).random(1000), coins, 1e-5, curve=curve)
        assert bound.epsilon > 2
        scores = score_bound(np.ones(500), np.zeros(500), 1e-5)
        assert scores.epsilon > 3.5
        assert (scores.true_rate > 0.95) and (scores.false_rate < 0.05)

    def test_a_leak_on_the_low_side_only(self):
        generator = np.random.default_rng(11)
        others = generator.normal(size=500)
        others[:100] -= 50
        bound = score_bound(generator.normal(size=500), others, 0.0)
        assert bound.side == "low" and bound.epsilon > 1


class TestFormulas:
    @pytest.mark.parametrize(
        "m, r, v, epsilon, delta", [(1000, 100, 80, 0.7, 1e-5), (50, 50, 50, 3.0, 0.0), (9, 4, 0, 0, 0.1)]
    )
    def test_p_value_against_its_definition(self, m, r, v, epsilon, delta):
        q = math.exp(epsilon) / (1 + math.exp(epsilon))
        law = stats.binom(r, q)
        alpha = max(((law.cdf(v - 1) - law.cdf(v - i - 1)) / i for i in range(1, v + 1)), default=0.0)
        expected = min(1.0, law.sf(v - 1) + 2 * m * delta * alpha)
        assert dp_p_value(m, r, v, epsilon, delta) == pytest.approx(expected, rel=1e-9)

    def test_the_tradeoff_audit_reproduces_the_binomial_tail_for_randomized_response(self):
        """For f of pure ε-DP and all coins guessed, the extremal law is binomial, so both audits agree."""
        epsilon, m, v = 1.0, 200, 170

        def tradeoff(alpha):
            return max(0.0, 1 - math.exp(epsilon) * alpha, math.exp(-epsilon) * (1 - alpha))

        exact = dp_p_value(m, m, v, epsilon, 0.0)
        assert not tradeoff_p_value_exceeds(exact * 1.5, m, m, v, tradeoff)
        assert tradeoff_p_value_exceeds(exact / 1.5, m, m, v, tradeoff)

    def test_gaussian_curve_and_its_epsilon_describe_the_same_mechanism(self):
        mu, delta = 1.3, 1e-4
        epsilon = gaussian_epsilon(mu, delta)
        alpha = stats.norm.cdf(np.linspace(-8, 8, 20001))
        curve = np.array([gaussian_tradeoff(mu)(a) for a in alpha])
        assert np.max(1 - curve - math.exp(epsilon) * alpha) == pytest.approx(delta, rel=1e-3)

    def test_gaussian_epsilon_is_zero_where_delta_covers_everything(self):
        assert gaussian_epsilon(0.1, 0.5) == 0
        assert gaussian_epsilon(0.0, 0.0) == 0

    def test_clopper_pearson_has_its_coverage(self):
        for trials, probability in ((20, 0.3), (500, 0.01)):
            law = stats.binom(trials, probability)
            misses = sum(law.pmf(k) for k in range(trials + 1) if lower_limit(k, trials, 0.05) > probability)
            assert misses <= 0.05
            misses = sum(law.pmf(k) for k in range(trials + 1) if upper_limit(k, trials, 0.05) < probability)
            assert misses <= 0.05

    def test_binomial_tail(self):
        assert binomial_tail(0, 5, 0.1) == 1
        assert binomial_tail(6, 5, 0.1) == 0
        assert binomial_tail(3, 5, 0.1) == pytest.approx(stats.binom.sf(2, 5, 0.1))

    def test_auc_interval_covers(self):
        generator = np.random.default_rng(12)
        true, misses = stats.norm.cdf(1 / math.sqrt(2)), 0
        for _ in range(300):
            a, b = generator.normal(size=80) + 1, generator.normal(size=120)
            low, high = auc_interval(float((a[:, None] > b).mean()), 80, 120, 0.05)
            misses += not low <= true <= high
        assert misses <= 300 * 0.05


class TestRefusals:
    def test_arguments(self):
        scores, coins = np.zeros(20), np.arange(20) % 2 == 0
        with pytest.raises(TypeError, match="boolean"):
            one_run_bound(scores, coins.astype(int), 0.0)
        with pytest.raises(ValueError, match="NaN"):
            one_run_bound(np.full(20, np.nan), coins, 0.0)
        with pytest.raises(ValueError, match="choices"):
            one_run_bound(scores, coins, 0.0, choices=[(15, 15)])
        with pytest.raises(ValueError, match="confidence"):
            one_run_bound(scores, coins, 0.0, confidence=1.0)
        with pytest.raises(ValueError, match="curve"):
            one_run_bound(scores, coins, 0.0, curve="pure")
        with pytest.raises(ValueError, match="selection"):
            score_bound(scores, scores, 0.0, selection="best")
        with pytest.raises(ValueError, match="at least 4"):
            score_bound([1.0], scores, 0.0)
