"""Scheduled σ and C: their values, what each step is noised with, and what it is charged for."""

from __future__ import annotations

import math
import re

import paddle
import pytest
from paddle import nn

from paddle_privacy import DPSGD, PoissonBatchSampler, PrivacyBudgetExceeded
from paddle_privacy.accounting import RDPAccountant
from paddle_privacy.accounting.events import Gaussian, PoissonSampled, ShuffledEpoch
from paddle_privacy.schedules import ExponentialSchedule, LambdaSchedule, StepSchedule


def exactly(message):
    return "^" + re.escape(message) + "$"


def test_values():
    exponential = ExponentialSchedule(2.0, 0.5)
    assert [exponential(k) for k in range(4)] == [2.0, 1.0, 0.5, 0.25]
    step = StepSchedule(2.0, 0.5, every=3)
    assert [step(k) for k in range(7)] == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.5]
    assert ExponentialSchedule(2.0, 0.5, every=3)(7) == step(7)
    assert LambdaSchedule(lambda k: 1.0 + k)(4) == 5.0
    # Any order, any number of times.
    assert [exponential(k) for k in (3, 0, 3)] == [0.25, 2.0, 0.25]


@pytest.mark.parametrize("make, error, message", [
    (lambda: ExponentialSchedule(0.0, 0.5), ValueError, "initial must be finite and > 0, found 0.0"),
    (lambda: ExponentialSchedule(1.0, math.inf), ValueError, "factor must be finite and > 0, found inf"),
    (lambda: ExponentialSchedule("1", 0.5), TypeError, "initial must be a number > 0, found '1'"),
    (lambda: StepSchedule(1.0, 0.5, every=0), ValueError, "every must be at least 1 step, found 0"),
    (lambda: StepSchedule(1.0, 0.5, every=1.5), TypeError, "every must be an integer number of steps, found 1.5"),
    (lambda: LambdaSchedule(3.0), TypeError, "function must be callable with a step number, found 3.0"),
    (lambda: LambdaSchedule(max)(0), TypeError, None),
    (lambda: LambdaSchedule(lambda k: -1.0)(2), ValueError,
     "LambdaSchedule(<lambda>) gives -1.0 at step 2; it must be finite and >= 0"),
    (lambda: LambdaSchedule(lambda k: None)(2), TypeError,
     "LambdaSchedule(<lambda>) gives None at step 2; it must give a number"),
])  # fmt: skip
def test_refused(make, error, message):
    with pytest.raises(error, match=message and exactly(message)):
        make()


def test_rule_that_changes_its_mind_is_refused():
    answers = iter([1.0, 2.0])
    schedule = LambdaSchedule(lambda k: next(answers))
    schedule(0)
    with pytest.raises(ValueError, match=exactly("LambdaSchedule(<lambda>) gave 1.0 and now gives 2.0 for step 0")):
        schedule(0)


def build(monkeypatch, **kwargs):
    """An optimizer, and the list of standard deviations that its steps draw noise with."""
    monkeypatch.setattr("paddle_privacy.optimizer.fused_update", lambda *args: False)
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    kwargs.setdefault("clip_norm", 1.0)
    optimizer = DPSGD(parameters=model.parameters(), learning_rate=0.01, batch_size=10, **kwargs)
    stds = []
    add_noise = optimizer.noise.add_noise
    monkeypatch.setattr(optimizer.noise, "add_noise", lambda sums, std: (stds.append(std), add_noise(sums, std)))
    return model, optimizer, stds


def train(model, optimizer, steps, rows=10):
    for _ in range(steps):
        (model(paddle.randn([rows, 3])) ** 2).sum(1).mean().backward()
        optimizer.step()
        optimizer.clear_grad()


def test_each_poisson_step_is_noised_and_charged_with_its_own_values(monkeypatch):
    model, optimizer, stds = build(
        monkeypatch,
        noise_multiplier=ExponentialSchedule(2.0, 0.9),
        clip_norm=StepSchedule(1.0, 0.5, every=2),
        dataset_size=100,
        sampling="poisson",
    )
    assert (optimizer.noise_multiplier, optimizer.clip_norm) == (2.0, 1.0)
    train(model, optimizer, 5)
    sigmas = [2.0 * 0.9**k for k in range(5)]
    assert stds == pytest.approx([s * c for s, c in zip(sigmas, [1.0, 1.0, 0.5, 0.5, 0.25])])
    assert optimizer.accountant.history == [(PoissonSampled(0.1, Gaussian(s)), 1) for s in sigmas]
    assert (optimizer.noise_multiplier, optimizer.clip_norm) == (pytest.approx(2.0 * 0.9**5), 0.25)
    expected = RDPAccountant()
    for s in sigmas:
        expected.step(s, 0.1)
    assert optimizer.get_privacy_spent(1e-5).epsilon == expected.get_epsilon(1e-5)


def test_the_whole_sum_is_clipped_with_the_bound_that_noise_is_scaled_by(monkeypatch):
    """The trap: noise follows a clip-norm schedule, and clipping does not."""
    model, optimizer, stds = build(
        monkeypatch, noise_multiplier=LambdaSchedule(lambda k: 1e-9), clip_norm=ExponentialSchedule(10.0, 0.1),
        sampling="none", loss_reduction="sum",
    )  # fmt: skip
    for bound in (10.0, 1.0, 0.1, 0.01):
        (1e4 * model(paddle.ones([1, 3])).sum()).backward()
        optimizer.step()
        released = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
        assert released == pytest.approx(bound, rel=1e-5)
        assert stds[-1] == pytest.approx(1e-9 * bound)
        optimizer.clear_grad()


def test_bound_moves_only_between_updates(monkeypatch):
    model, optimizer, stds = build(
        monkeypatch, noise_multiplier=1.0, clip_norm=ExponentialSchedule(1.0, 0.5), sampling="none"
    )
    for _ in range(2):
        for _ in range(3):
            (model(paddle.randn([3, 3])) ** 2).mean().backward()
            bound = optimizer.clip_norm
        optimizer.step()
        assert stds[-1] == bound
        optimizer.clear_grad()
    assert stds == [1.0, 0.5]


def test_steps_that_see_every_row_are_charged_one_by_one(monkeypatch):
    model, optimizer, _ = build(monkeypatch, noise_multiplier=ExponentialSchedule(4.0, 0.5), sampling="none")
    train(model, optimizer, 3)
    assert optimizer.accountant.history == [(Gaussian(4.0), 1), (Gaussian(2.0), 1), (Gaussian(1.0), 1)]


@pytest.mark.parametrize("factor, charged", [(0.9, [2.0 * 0.9**4, 2.0 * 0.9**9]), (1.1, [2.0, 2.0 * 1.1**5])])
def test_a_shuffled_pass_is_charged_for_its_smallest_noise(monkeypatch, factor, charged):
    """50 rows, 10 a batch: steps 0-4 are one pass, 5-9 the next, and a row may be in any step of each."""
    model, optimizer, stds = build(
        monkeypatch, noise_multiplier=ExponentialSchedule(2.0, factor), dataset_size=50, sampling="shuffle"
    )
    train(model, optimizer, 10)
    assert len(stds) == 10
    assert [type(event) for event, _ in optimizer.accountant.history] == [ShuffledEpoch, ShuffledEpoch]
    assert [event.event.noise_multiplier for event, _ in optimizer.accountant.history] == pytest.approx(charged)


def test_a_shuffled_loaders_pass_is_charged_for_its_smallest_noise(monkeypatch):
    class Rows(paddle.io.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return paddle.full([3], float(index))

    loader = paddle.io.DataLoader(Rows(), batch_size=10, shuffle=True)
    model, optimizer, stds = build(monkeypatch, noise_multiplier=ExponentialSchedule(2.0, 0.5), data_loader=loader)
    for _ in range(2):
        for batch in loader:
            (model(batch[0] if isinstance(batch, (list, tuple)) else batch) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
    sigmas = [event.event.noise_multiplier for event, _ in optimizer.accountant.history]
    assert sigmas == [pytest.approx(2.0 * 0.5**3), pytest.approx(2.0 * 0.5**7)]
    assert min(stds[:4]) >= sigmas[0] and min(stds[4:]) >= sigmas[1]


def test_poisson_loader_with_schedules(monkeypatch):
    sampler = PoissonBatchSampler(num_rows=100, batch_size=10, steps=5)
    model, optimizer, _ = build(monkeypatch, noise_multiplier=StepSchedule(1.0, 2.0, every=2), data_loader=sampler)
    for indices in sampler:
        (model(paddle.randn([max(1, len(indices)), 3])) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    assert [(e.event.noise_multiplier, n) for e, n in optimizer.accountant.history] == [(1.0, 2), (2.0, 2), (4.0, 1)]


def test_budget_sees_the_coming_steps_noise(monkeypatch):
    model, optimizer, stds = build(
        monkeypatch, noise_multiplier=LambdaSchedule(lambda k: 5.0 if k < 2 else 0.1), sampling="none",
        max_epsilon=5.0, target_delta=1e-5,
    )  # fmt: skip
    train(model, optimizer, 2)
    with pytest.raises(PrivacyBudgetExceeded, match="^step 3 would bring ε to"):
        train(model, optimizer, 1)
    assert len(stds) == 2 and optimizer.get_privacy_spent().epsilon < 5.0


def test_resumed_run_continues_both_schedules(monkeypatch):
    settings = {
        "noise_multiplier": ExponentialSchedule(2.0, 0.9),
        "clip_norm": ExponentialSchedule(1.0, 0.5),
        "sampling": "none",
    }
    model, optimizer, _ = build(monkeypatch, **settings)
    train(model, optimizer, 3)
    state = optimizer.state_dict()
    model, resumed, stds = build(monkeypatch, **settings)
    resumed.set_state_dict(state)
    assert (resumed.noise_multiplier, resumed.clip_norm) == (pytest.approx(2.0 * 0.9**3), 0.125)
    train(model, resumed, 1)
    assert stds == [pytest.approx(2.0 * 0.9**3 * 0.125)]
    assert len(resumed.accountant.history) == 4


def test_statement_names_the_schedules(monkeypatch):
    _, optimizer, _ = build(
        monkeypatch, noise_multiplier=ExponentialSchedule(2.0, 0.9), clip_norm=StepSchedule(1.0, 0.5, every=7)
    )
    statement = optimizer.privacy_statement()
    assert statement["noise_schedule"] == "ExponentialSchedule(2, 0.9, every=1)"
    assert statement["clip_schedule"] == "StepSchedule(1, 0.5, every=7)"
    _, optimizer, _ = build(monkeypatch, noise_multiplier=1.0)
    assert optimizer.privacy_statement()["noise_schedule"] is None


def test_adaptive_clipping_takes_no_schedule(monkeypatch):
    with pytest.raises(ValueError, match=exactly(
        "clip_norm of adaptive clipping moves by itself; give the number to start from, not a schedule"
    )):  # fmt: skip
        build(monkeypatch, noise_multiplier=1.0, clip_norm=StepSchedule(1.0, 0.5, every=7), clipping="adaptive")
