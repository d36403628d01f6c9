"""The ε of real loops, against closed forms and the accountant called by hand."""

from __future__ import annotations

import warnings

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.io import DataLoader, Dataset

import paddle_privacy as pp
from paddle_privacy.accounting import compute_epsilon
from paddle_privacy.sampling import PoissonBatchSampler

DELTA = 1e-5


class Rows(Dataset):
    def __init__(self, n: int, features: int = 4, classes: int = 3):
        rng = np.random.default_rng(n)
        self.x = rng.normal(size=(n, features)).astype("float32")
        self.y = rng.integers(0, classes, n)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return self.x[i], self.y[i]


def unamplified(sigma: float, steps: int) -> float:
    return compute_epsilon(noise_multiplier=sigma, sample_rate=1.0, steps=steps, delta=DELTA)


def amplified(sigma: float, rate: float, steps: int) -> float:
    return compute_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=DELTA)


def private(net: nn.Layer, kind=pp.DPSGD, **changes):
    defaults = {"learning_rate": 0.1, "clip_norm": 1.0, "noise_multiplier": 2.0, "batch_size": 4}
    return kind(**{"parameters": net.parameters(), **defaults, **changes})


def one_step(net: nn.Layer, optimizer) -> None:
    nn.functional.cross_entropy(net(paddle.ones([4, 4])), paddle.zeros([4], "int64")).backward()
    optimizer.step()


def run(loader, optimizer, net, epochs: int = 1) -> None:
    for _ in range(epochs):
        for x, y in loader:
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_the_loop_of_the_readme_knows_its_loader():
    """Verbatim but for the data: nothing in the arguments tells N, the live iterator does."""
    dataloader = DataLoader(Rows(1024, 784, 10), batch_size=256, shuffle=True)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = pp.DPSGD(
        parameters=model.parameters(),
        learning_rate=0.01,
        clip_norm=1.0,
        noise_multiplier=1.2,
        batch_size=256,
        epochs=100,
    )
    with pytest.warns(
        pp.PrivacyWarning, match=r"N=1024 was read from .*without amplification.*would give ε="
    ) as caught:
        for epoch in range(3):
            for x, y in dataloader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            epsilon, delta = optimizer.get_privacy_spent(target_delta=1e-5)
            assert (epsilon, delta) == (pytest.approx(unamplified(1.2, epoch + 1), rel=1e-9), 1e-5)
    assert len([w for w in caught if w.category is pp.PrivacyWarning]) == 1
    assert optimizer.privacy_statement()["relation"] == "zero_out"


def test_with_nothing_known_every_row_is_in_every_step():
    net = nn.Linear(4, 3)
    optimizer = private(net, batch_size=8)
    data = Rows(64)
    batches = [(paddle.to_tensor(data.x[i : i + 8]), paddle.to_tensor(data.y[i : i + 8])) for i in range(0, 64, 8)]
    with pytest.warns(pp.PrivacyWarning, match="every row takes part in every step; pass data_loader") as caught:
        run(batches, optimizer, net)
    assert len([w for w in caught if w.category is pp.PrivacyWarning]) == 1
    assert optimizer.get_privacy_spent(DELTA).epsilon == pytest.approx(unamplified(2.0, 8), rel=1e-9)


@pytest.mark.parametrize("n", [7, 99, 100, 105])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_poisson_batches_are_amplified_at_rate_batch_over_n(n, batch_size):
    rows = Rows(n)
    loader = DataLoader(rows, batch_sampler=PoissonBatchSampler(rows, batch_size=batch_size))
    net = nn.Linear(4, 3)
    optimizer = private(net, noise_multiplier=1.0, batch_size=batch_size, data_loader=loader)
    run(loader, optimizer, net, epochs=2)
    steps = 2 * -(-n // batch_size)
    assert optimizer.spending.steps == steps
    expected = amplified(1.0, batch_size / n, steps)
    assert optimizer.get_privacy_spent(DELTA).epsilon == pytest.approx(expected, rel=1e-9)


def test_a_poisson_loader_nobody_mentioned_is_found_behind_dataset_size():
    """dataset_size alone means one participation an epoch, which Poisson batches do not keep to."""
    rows = Rows(60)
    loader = DataLoader(rows, batch_sampler=PoissonBatchSampler(rows, batch_size=6))
    net = nn.Linear(4, 3)
    optimizer = private(net, noise_multiplier=1.0, batch_size=6, dataset_size=60)
    run(loader, optimizer, net)
    assert optimizer.get_privacy_spent(DELTA).epsilon == pytest.approx(amplified(1.0, 0.1, 10), rel=1e-9)


def test_empty_poisson_batches_are_noise_only_steps():
    """Rate 0.02 on 5 rows: nine of ten batches are empty, and the first is too with near certainty over the runs."""
    rows = Rows(5)
    sampler = PoissonBatchSampler(rows, batch_size=0.1, steps=40)
    loader = DataLoader(rows, batch_sampler=sampler)
    net = nn.Linear(4, 3)
    optimizer = private(
        net, learning_rate=1.0, clip_norm=1e-12, noise_multiplier=1e9, batch_size=0.1, data_loader=loader
    )
    seen = []
    for x, y in loader:
        before = net.weight.numpy()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(int(optimizer.last_norms.shape[0]))
        assert not np.array_equal(net.weight.numpy(), before)
    assert len(seen) == 40 == optimizer.spending.steps
    # P(no empty batch in 40) = (1 - 0.98^5)^40 < 1e-39.
    assert 0 in seen


def test_an_empty_batch_contributes_exactly_nothing():
    rows = Rows(5)
    sampler = PoissonBatchSampler(rows, batch_size=0.05, steps=20)
    loader = DataLoader(rows, batch_sampler=sampler)
    net = nn.Linear(4, 3)
    optimizer = private(net, learning_rate=1.0, noise_multiplier=0.0, batch_size=0.05, data_loader=loader)
    for x, y in loader:
        before = net.weight.numpy()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        if optimizer.last_norms.shape[0] == 0:
            np.testing.assert_array_equal(net.weight.numpy(), before)


def test_shuffled_loader_charges_one_participation_a_pass_also_when_broken_off():
    loader = DataLoader(Rows(40), batch_size=10, shuffle=True, drop_last=True)
    net = nn.Linear(4, 3)
    optimizer = private(net, noise_multiplier=3.0, batch_size=10, data_loader=loader)
    for _ in range(3):
        for x, y in loader:
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            break
    assert optimizer.get_privacy_spent(DELTA).epsilon == pytest.approx(unamplified(3.0, 3), rel=1e-9)


def test_declared_poisson_over_a_shuffled_loader_is_said_in_every_report():
    loader = DataLoader(Rows(40), batch_size=10, shuffle=True)
    net = nn.Linear(4, 3)
    with pytest.warns(pp.PrivacyWarning, match="sampling='poisson' was declared, but the data loader samples"):
        optimizer = private(net, noise_multiplier=1.0, batch_size=10, data_loader=loader, sampling="poisson")
    run(loader, optimizer, net)
    assert optimizer.privacy_statement()["sampling_declared_by_user"] is True
    assert optimizer.get_privacy_spent(DELTA).epsilon == pytest.approx(amplified(1.0, 0.25, 4), rel=1e-9)


def test_contradictions_about_the_data_are_refused():
    rows = Rows(40)
    net = nn.Linear(4, 3)
    common = {"parameters": net.parameters(), "learning_rate": 0.1, "clip_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(ValueError, match="dataset_size=50 but the data loader has 40 rows"):
        pp.DPSGD(batch_size=10, dataset_size=50, data_loader=DataLoader(rows, batch_size=10), **common)
    with pytest.raises(ValueError, match="batch_size=10 but the Poisson sampler expects 5 rows"):
        pp.DPSGD(
            batch_size=10, data_loader=DataLoader(rows, batch_sampler=PoissonBatchSampler(rows, batch_size=5)), **common
        )
    with pytest.raises(pp.PrivacyError, match="sampling='poisson' needs the number of rows"):
        optimizer = pp.DPSGD(batch_size=10, sampling="poisson", **common)
        nn.functional.cross_entropy(net(paddle.ones([10, 4])), paddle.zeros([10], "int64")).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["poisson", "shuffle"])
def test_target_epsilon_is_met_and_not_passed(kind):
    rows = Rows(100)
    loader = (
        DataLoader(rows, batch_sampler=PoissonBatchSampler(rows, batch_size=20))
        if kind == "poisson"
        else DataLoader(rows, batch_size=20, shuffle=True)
    )
    net = nn.Linear(4, 3)
    optimizer = private(
        net,
        noise_multiplier=None,
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=4,
        batch_size=20,
        data_loader=loader,
        kind=pp.DPAdam,
    )
    run(loader, optimizer, net, epochs=4)
    assert 1.99 < optimizer.get_privacy_spent().epsilon <= 2.0
    before = net.weight.numpy()
    with pytest.raises(pp.PrivacyBudgetExceeded, match=r"above the budget of 2; the weights were not touched"):
        run(loader, optimizer, net)
    np.testing.assert_array_equal(net.weight.numpy(), before)
    assert optimizer.get_privacy_spent().epsilon <= 2.0


def test_budget_stops_before_the_step_that_would_pass_it():
    net = nn.Linear(4, 3)
    optimizer = private(net, sampling="none", max_epsilon=unamplified(2.0, 3) * 1.0001, target_delta=DELTA)
    done = 0
    with pytest.raises(pp.PrivacyBudgetExceeded):
        while True:
            one_step(net, optimizer)
            done += 1
    assert done == 3


def test_state_dict_carries_the_spend_and_refuses_a_plain_one(tmp_path):
    net = nn.Linear(4, 3)
    arguments = {"learning_rate": 0.1, "clip_norm": 1.0, "noise_multiplier": 2.0, "batch_size": 4, "sampling": "none"}
    optimizer = pp.DPSGD(parameters=net.parameters(), **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run([(paddle.ones([4, 4]), paddle.zeros([4], "int64"))] * 5, optimizer, net)
    paddle.save(optimizer.state_dict(), str(tmp_path / "o.pdopt"))
    resumed = pp.DPSGD(parameters=net.parameters(), **{**arguments, "noise_multiplier": 1.0})
    plain = paddle.optimizer.SGD(parameters=net.parameters())
    with pytest.raises(ValueError, match="no 'paddle_privacy' entry"):
        resumed.set_state_dict(plain.state_dict())
    resumed.set_state_dict(paddle.load(str(tmp_path / "o.pdopt")))
    assert resumed.noise_multiplier == 2.0
    assert resumed.get_privacy_spent(DELTA) == optimizer.get_privacy_spent(DELTA)
    run([(paddle.ones([4, 4]), paddle.zeros([4], "int64"))], resumed, net)
    assert resumed.get_privacy_spent(DELTA).epsilon == pytest.approx(unamplified(2.0, 6), rel=1e-9)


def test_ledger_is_written_before_the_weights_move(tmp_path):
    import json

    net = nn.Linear(4, 3)
    path = tmp_path / "ledger.jsonl"
    optimizer = private(net, sampling="none", target_delta=DELTA, ledger=path)
    for k in range(3):
        one_step(net, optimizer)
        steps = [r for r in map(json.loads, path.read_text().splitlines()) if r["kind"] == "step"]
        assert len(steps) == k + 1
        assert steps[-1]["epsilon"] == pytest.approx(unamplified(2.0, k + 1), rel=1e-9)


def test_accumulation_across_a_pass_border_does_not_count_a_row_twice():
    """One row per unit vector: a row that were in the update twice would move its weight by 2C."""
    data = paddle.io.TensorDataset([np.eye(4, dtype="float32")])
    loader = DataLoader(data, batch_size=2)
    net = nn.Linear(4, 1, bias_attr=False)
    optimizer = pp.DPSGD(
        1.0,
        parameters=net,
        clip_norm=1.0,
        noise_multiplier=0.0,
        batch_size=1,
        loss_reduction="sum",
        data_loader=loader,
    )
    before = net.weight.numpy().ravel()
    with pytest.warns(pp.PrivacyWarning, match="a new pass inside one update.*dropped"):
        for _ in range(2):
            for (x,) in loader:
                (net(x) * 100).sum().backward()
        optimizer.step()
    np.testing.assert_allclose(before - net.weight.numpy().ravel(), [1, 1, 1, 1], rtol=1e-6)
    assert [count for _, count in optimizer.accountant.history] == [2]


def test_a_new_run_on_an_old_ledger_starts_from_what_was_spent(tmp_path):
    def on_ledger(net):
        return private(net, sampling="none", target_delta=DELTA, ledger=ledger)

    net = nn.Linear(4, 3)
    with pp.Ledger(tmp_path / "ledger.jsonl") as ledger:
        first = on_ledger(net)
        for _ in range(3):
            one_step(net, first)
    ledger = tmp_path / "ledger.jsonl"
    assert on_ledger(nn.Linear(4, 3)).get_privacy_spent().epsilon == pytest.approx(unamplified(2.0, 3), rel=1e-9)


def test_state_restored_beside_a_ledger_counts_the_steps_taken_after_it_was_saved(tmp_path):
    def on_ledger(net):
        return private(net, sampling="none", target_delta=DELTA, ledger=ledger)

    net = nn.Linear(4, 3)
    with pp.Ledger(tmp_path / "ledger.jsonl") as ledger:
        first = on_ledger(net)
        for k in range(5):
            if k == 3:
                state = first.state_dict()
            one_step(net, first)
    ledger = tmp_path / "ledger.jsonl"
    resumed = on_ledger(net)
    resumed.set_state_dict(state)
    assert resumed.get_privacy_spent().epsilon == pytest.approx(unamplified(2.0, 5), rel=1e-9)
    ledger = None
    with pytest.raises(pp.PrivacyError, match="kept a privacy ledger"):
        on_ledger(net).set_state_dict(state)


def test_a_model_in_training_can_be_saved_for_inference(tmp_path):
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    optimizer = private(net, sampling="none")
    paddle.jit.save(net, str(tmp_path / "net"), input_spec=[paddle.static.InputSpec([None, 4], "float32")])
    x = paddle.randn([2, 4])
    np.testing.assert_allclose(paddle.jit.load(str(tmp_path / "net"))(x).numpy(), net(x).numpy(), rtol=1e-6)
    net(x).sum(axis=1).mean().backward()
    optimizer.step()


def test_another_poisson_loader_in_use_says_nothing_about_unknown_rows():
    rows = Rows(60)
    iterator = iter(DataLoader(rows, batch_sampler=PoissonBatchSampler(rows, batch_size=20)))
    next(iterator)
    net = nn.Linear(4, 3)
    optimizer = private(net)
    with pytest.warns(pp.PrivacyWarning, match="every row takes part in every step"):
        for _ in range(2):
            one_step(net, optimizer)
    assert optimizer.get_privacy_spent(DELTA).epsilon == pytest.approx(unamplified(2.0, 2), rel=1e-9)
    with pytest.raises(pp.PrivacyError, match="batch_size=4 but the Poisson sampler expects 20 rows"):
        one_step(net, private(net, dataset_size=60))
    del iterator
