"""PrivacyEngine: what comes back, at which rate, and that split batches change nothing."""

from __future__ import annotations

import warnings

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle import io, nn

from paddle_privacy import NoiseGenerator
from paddle_privacy.accounting import compute_epsilon
from paddle_privacy.engine import PrivacyEngine, adopt_optimizer
from paddle_privacy.errors import PrivacyBudgetExceeded, PrivacyError, PrivacyWarning, UnsupportedLayer
from paddle_privacy.optimizer import DPSGD, DPAdamW, PrivateOptimizer
from paddle_privacy.sampling import PoissonBatchSampler, PoissonDataLoader


class Rows(io.Dataset):
    def __init__(self, size: int) -> None:
        self.x = np.random.RandomState(size).randn(size, 4).astype("float32")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def model_of(seed: int = 0) -> nn.Layer:
    paddle.seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def private(rows: int = 30, size: int = 6, optimizer=paddle.optimizer.SGD, **changed):
    engine, model = PrivacyEngine(), model_of()
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **changed}
    model, made, loader = engine.make_private(
        module=model,
        optimizer=optimizer(learning_rate=0.1, parameters=model.parameters()),
        data_loader=io.DataLoader(Rows(rows), batch_size=size, shuffle=True),
        **arguments,
    )
    return engine, model, made, loader


def epoch(model, optimizer, loader) -> int:
    seen = 0
    for x in loader:
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        seen += 1
    return seen


def test_objects_come_back_as_themselves():
    model = model_of()
    optimizer = paddle.optimizer.AdamW(
        paddle.optimizer.lr.StepDecay(0.1, 3),
        parameters=model.parameters(),
        weight_decay=0.02,
        apply_decay_param_fun=lambda name: "b_" not in name,
    )
    loader = io.DataLoader(Rows(30), batch_size=6, shuffle=True, num_workers=2, timeout=7, collate_fn=list)
    keys, hyper = list(model.state_dict()), dict(optimizer.__dict__)
    m, o, d = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    assert m is model and o is optimizer
    assert list(m.state_dict()) == keys
    assert type(o).__mro__[1] is PrivateOptimizer and isinstance(o, paddle.optimizer.AdamW)
    assert all(o.__dict__[k] is v for k, v in hyper.items())
    assert isinstance(d, PoissonDataLoader) and d is not loader
    kept = ("collate_fn", "num_workers", "timeout", "dataset", "use_shared_memory", "places", "worker_init_fn")
    assert all(getattr(d, name) is getattr(loader, name) for name in kept)
    assert not isinstance(loader.batch_sampler, PoissonBatchSampler)


@pytest.mark.parametrize("rows", [1, 7, 99, 100, 105, 12_345])
@pytest.mark.parametrize("size", [1, 10, 64])
def test_rate_divisor_steps_and_epsilon(rows, size):
    if size > rows:
        with pytest.raises(ValueError, match=r"batch_size must be in \(0, "):
            private(rows, size)
        return
    engine, _, optimizer, loader = private(rows, size)
    steps = -(-rows // size)
    assert loader.batch_sampler.sample_rate == size / rows
    assert optimizer.batch_size == size
    assert len(loader) == steps
    if steps > 20:
        return
    assert epoch(_, optimizer, loader) == steps
    want = compute_epsilon(noise_multiplier=1.0, sample_rate=size / rows, steps=steps, delta=1e-5)
    assert engine.get_epsilon(1e-5) == pytest.approx(want, rel=1e-12)


def test_epsilon_before_the_first_step_is_zero_and_grows():
    engine, model, optimizer, loader = private()
    seen = [engine.get_epsilon(delta=1e-5)]
    for _ in range(3):
        epoch(model, optimizer, loader)
        seen.append(engine.get_epsilon(delta=1e-5))
    assert seen[0] == 0
    assert seen == sorted(set(seen))


def test_a_target_is_kept_and_is_a_hard_end():
    engine, model = PrivacyEngine(), model_of()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()),
        data_loader=io.DataLoader(Rows(105), batch_size=10, shuffle=True),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
    )
    for _ in range(2):
        epoch(model, optimizer, loader)
    assert 2.9 < engine.get_epsilon(1e-5) <= 3.0
    weights = [p.numpy() for p in model.parameters()]
    with pytest.raises(PrivacyBudgetExceeded):
        epoch(model, optimizer, loader)
    assert all((p.numpy() == w).all() for p, w in zip(model.parameters(), weights))
    assert engine.get_epsilon(1e-5) <= 3.0


def test_without_poisson_sampling_the_loader_stays_and_nothing_is_amplified():
    given = io.DataLoader(Rows(30), batch_size=7, shuffle=True)
    engine, model = PrivacyEngine(accountant="zcdp"), model_of()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()),
        data_loader=given,
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    assert loader is given
    for _ in range(3):
        assert epoch(model, optimizer, loader) == 5
    # One participation of each row a pass: three plain Gaussian mechanisms.
    want = compute_epsilon(noise_multiplier=2.0, sample_rate=1.0, steps=3, delta=1e-5, accountant="zcdp")
    assert engine.get_epsilon(1e-5) == pytest.approx(want, rel=1e-9)


def test_several_optimizers_of_an_engine_add_up():
    engine = PrivacyEngine()
    parts = []
    for seed in range(2):
        model = model_of(seed)
        parts.append(
            engine.make_private(
                module=model,
                optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()),
                data_loader=io.DataLoader(Rows(30), batch_size=6),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
        )
    for part in parts:
        epoch(*part)
    want = compute_epsilon(noise_multiplier=1.0, sample_rate=0.2, steps=10, delta=1e-5)
    assert engine.get_epsilon(1e-5) == pytest.approx(want, rel=1e-9)


class Weighted(io.BatchSampler):
    def __iter__(self):
        yield [0, 1]


@pytest.mark.parametrize(
    ("loader", "error", "says"),
    [
        ([1, 2], TypeError, "data_loader"),
        (io.DataLoader(Rows(9), batch_sampler=Weighted(Rows(9), batch_size=2)), PrivacyError, "custom batch sampler"),
        (
            io.DataLoader(
                Rows(9), batch_sampler=io.BatchSampler(sampler=io.WeightedRandomSampler([1.0] * 9, 9), batch_size=3)
            ),
            PrivacyError,
            "WeightedRandomSampler",
        ),
        (
            io.DataLoader(Rows(9), batch_sampler=io.BatchSampler(sampler=io.SubsetRandomSampler([1, 2]), batch_size=2)),
            PrivacyError,
            "2 of the 9 rows",
        ),
        (io.DataLoader(Rows(9), batch_size=None), PrivacyError, "batch_size=None"),
    ],
)
def test_loaders_that_cannot_be_poisson_sampled_are_refused_and_nothing_changes(loader, error, says):
    model = model_of()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with pytest.raises(error, match=says):
        PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
    assert type(optimizer) is paddle.optimizer.SGD
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"max_grad_norm": 0.0}, ValueError, "clip_norm"),
        ({"max_physical_batch_size": 0}, ValueError, "max_physical_batch_size"),
        ({"max_physical_batch_size": 2, "poisson_sampling": False}, ValueError, "max_physical_batch_size"),
        ({"grad_sample_mode": "ghost"}, TypeError, "grad_sample_mode"),
        ({"clipping": "flatt"}, ValueError, "clipping"),
    ],
)
def test_bad_arguments_are_named(changed, error, says):
    with pytest.raises(error, match=says):
        private(**changed)


def test_refused_optimizers_are_as_before():
    model, other = model_of(), model_of()
    loader = io.DataLoader(Rows(9), batch_size=3)

    def attempt(optimizer):
        before = type(optimizer), dict(optimizer.__dict__)
        with pytest.raises((PrivacyError, ValueError, TypeError)) as caught:
            PrivacyEngine().make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
            )
        assert (type(optimizer), optimizer.__dict__) == before
        return str(caught.value)

    sgd = paddle.optimizer.SGD
    assert "not in module" in attempt(sgd(0.1, parameters=other.parameters()))
    clip = nn.ClipGradByGlobalNorm(1.0)
    assert "grad_clip" in attempt(sgd(0.1, parameters=model.parameters(), grad_clip=clip))
    assert "LBFGS" in attempt(paddle.optimizer.LBFGS(0.1, parameters=model.parameters()))
    adam = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    (model(paddle.ones([2, 4])) ** 2).mean().backward()
    adam.step()
    adam.clear_grad()
    assert "has taken steps already" in attempt(adam)
    private_one = DPSGD(0.1, parameters=model.parameters(), clip_norm=1.0, noise_multiplier=1.0, batch_size=3)
    assert "private already" in attempt(private_one)


def test_models_with_problems_are_refused_with_all_of_them():
    model = nn.Sequential(nn.Conv2D(3, 4, 3), nn.BatchNorm2D(4), nn.Sequential(nn.BatchNorm2D(4)))
    with pytest.raises(UnsupportedLayer, match=r"(?s)'1'.*'2\.0'"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()),
            data_loader=io.DataLoader(Rows(9), batch_size=3),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_trainable_parameters_outside_the_optimizer_are_said():
    model = model_of()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model[2].parameters())
    with pytest.warns(PrivacyWarning, match="0.weight"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=io.DataLoader(Rows(9), batch_size=3),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_an_adopted_optimizer_steps_like_one_that_was_built_private():
    """Parameter groups, decay and schedule survive the adoption; compared under the same noise."""
    x = paddle.randn([6, 4])
    weights = []
    for adopted in (True, False):
        model = model_of()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "learning_rate": 0.3}]
        plain = {"learning_rate": paddle.optimizer.lr.StepDecay(0.1, 2), "parameters": groups, "weight_decay": 0.1}
        privacy = {
            "clip_norm": 0.5,
            "noise_multiplier": 1.0,
            "batch_size": 6,
            "sampling": "none",
            "generator": NoiseGenerator.seeded(4),
            "secure": False,
        }
        if adopted:
            optimizer = adopt_optimizer(paddle.optimizer.AdamW(**plain), model, **privacy)
        else:
            optimizer = DPAdamW(**plain, **privacy)
        for _ in range(4):
            (model(x) ** 2).mean().backward()
            optimizer.step()
            plain["learning_rate"].step()
            optimizer.clear_grad()
        weights.append([p.numpy() for p in model.parameters()])
    for a, b in zip(*weights):
        np.testing.assert_array_equal(a, b)


def updates(rows: int, size: int, steps: int, seed: int, **split) -> tuple[list[np.ndarray], int]:
    """Weights after some noiseless logical batches drawn with `seed`, and the steps that were counted."""
    model = model_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        sampler = PoissonBatchSampler(num_rows=rows, batch_size=size, steps=steps, seed=seed, **split)
        loader = io.DataLoader(Rows(rows), batch_sampler=sampler)
        optimizer = DPSGD(
            0.1, parameters=model, clip_norm=0.7, noise_multiplier=0.0, batch_size=size, data_loader=loader
        )
        epoch(model, optimizer, loader)
    return [p.numpy() for p in model.parameters()], optimizer.spending.steps


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 8), st.integers(0, 2**20), st.booleans())
def test_any_split_of_a_logical_batch_gives_the_same_update(rows, size, piece, seed, micro):
    size = min(rows, size)
    whole, steps = updates(rows, size, 4, seed)
    parts, counted = updates(rows, size, 4, seed, **{"micro_batches" if micro else "max_physical_batch_size": piece})
    assert steps == counted == 4
    for a, b in zip(whole, parts):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_leftovers_of_a_broken_loop_never_join_another_batch():
    """After a break in the middle of a logical batch, the next one's update is what it is alone."""

    def run(broken: bool) -> list[np.ndarray]:
        model = model_of()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            sampler = PoissonBatchSampler(num_rows=40, batch_size=20, steps=1, seed=5, max_physical_batch_size=3)
            optimizer = DPSGD(
                0.1,
                parameters=model,
                clip_norm=0.7,
                noise_multiplier=0.0,
                batch_size=20,
                data_loader=io.DataLoader(Rows(40), batch_sampler=sampler),
            )
            loader = io.DataLoader(Rows(40), batch_sampler=sampler)
            if broken:
                for i, x in enumerate(loader):
                    (model(x) ** 2).mean().backward()
                    optimizer.step()
                    optimizer.clear_grad()
                    if i == 1:
                        break
            else:
                iter(sampler)  # the same second generation
            epoch(model, optimizer, loader)
        assert optimizer.spending.steps == 1
        return [p.numpy() for p in model.parameters()]

    for a, b in zip(run(True), run(False)):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_an_exception_in_a_split_batch_is_told_at_the_next():
    _, model, optimizer, loader = private(40, 20, max_physical_batch_size=3)
    with pytest.raises(KeyError):
        for x in loader:
            (model(x) ** 2).mean().backward()
            optimizer.step()
            raise KeyError
    with pytest.warns(PrivacyWarning, match="unfinished"):
        assert epoch(model, optimizer, loader) > 0
    assert optimizer.spending.steps == len(loader)


def test_early_steps_do_nothing_until_the_logical_batch_is_complete():
    _, model, optimizer, loader = private(40, 20, max_physical_batch_size=3)
    before = [p.numpy() for p in model.parameters()]
    for i, x in enumerate(loader):
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.step()
        optimizer.step()
        if i == 2:
            break
    assert optimizer.spending.steps == 0
    assert all((p.numpy() == w).all() for p, w in zip(model.parameters(), before))


def test_a_skipped_batch_and_a_batch_used_twice():
    _, model, optimizer, loader = private(30, 6)
    for i, x in enumerate(loader):
        if i == 1:
            continue
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    assert optimizer.spending.steps == len(loader) - 1
    for x in loader:
        (model(x) ** 2).mean().backward()
        (model(x) ** 2).mean().backward()
        with pytest.raises(PrivacyError, match="second time on the same batch"):
            optimizer.step()
        break


def test_two_independent_draws_never_share_an_update():
    """A row could be in both, with twice the bound; the first is dropped, and said."""
    _, model, optimizer, loader = private(30, 6)
    with pytest.warns(PrivacyWarning, match="dropped"):
        for i, x in enumerate(loader):
            (model(x) ** 2).mean().backward()
            if i % 2:
                optimizer.step()
                optimizer.clear_grad()
    assert optimizer.spending.steps == len(loader) // 2


@pytest.mark.parametrize("first_is_empty", [True, False])
def test_an_empty_batch_is_a_step_of_pure_noise(first_is_empty, monkeypatch):
    import paddle_privacy.sampling.poisson as poisson

    _, model, optimizer, loader = private(30, 6)
    draws = iter([[], [1, 2], [], [3]] if first_is_empty else [[1, 2], [], [3], []])
    monkeypatch.setattr(poisson, "poisson_rows", lambda *_: np.array(next(draws, [4]), dtype=np.int64))
    before = [p.numpy() for p in model.parameters()]
    for x in loader:
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        after = [p.numpy() for p in model.parameters()]
        # Noisy values lie on a grid, so one in a few thousand is zero.
        changed = np.concatenate([(a != b).ravel() for a, b in zip(after, before)])
        assert changed.mean() > 0.8
        before = after
    assert optimizer.spending.steps == len(loader)


def test_row_zero_of_a_placeholder_has_no_weight(monkeypatch):
    """With σ=0 an empty batch changes nothing, whatever row 0 is."""
    import paddle_privacy.sampling.poisson as poisson

    _, model, optimizer, loader = private(30, 6, noise_multiplier=0.0)
    monkeypatch.setattr(poisson, "poisson_rows", lambda *_: np.array([], dtype=np.int64))
    before = [p.numpy() for p in model.parameters()]
    epoch(model, optimizer, loader)
    assert all((p.numpy() == w).all() for p, w in zip(model.parameters(), before))
    assert optimizer.spending.steps == len(loader)
