"""Sums and norms against float64 numpy, one sample at a time, on the native operators and on the reference path."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddle_privacy import kernels

pytestmark = pytest.mark.usefixtures("path")
properties = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([1e-15, 1e-3, 1.0, 1e3, 1e15])


def _close(actual: paddle.Tensor, expected: np.ndarray, rtol: float, atol: float = 0.0) -> None:
    np.testing.assert_allclose(actual.numpy().astype("float64"), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("value", [1.0, 0.1, 3e-4])
def test_row_norm_is_exact_at_ten_million_elements(value: float) -> None:
    x = paddle.full([2, 5_000_000], value, dtype="float32")
    x = x.reshape([1, -1])
    exact = 1e7 * float(np.float32(value)) ** 2
    assert float(kernels.row_squared_norms(x)[0]) == pytest.approx(exact, rel=1e-6)


@properties
@given(st.integers(0, 5), st.integers(0, 300), SEEDS, SCALES, st.sampled_from(["float32", "float64"]))
def test_row_norms_and_weighted_sums(rows: int, columns: int, seed: int, scale: float, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, columns)) * scale).astype(dtype)
    c = rng.uniform(0.0, 1.0, rows).astype(dtype)
    c[rng.uniform(size=rows) < 0.3] = 0.0
    rtol = 1e-6 if dtype == "float32" else 1e-12
    wide = x.astype("float64")
    _close(kernels.row_squared_norms(paddle.to_tensor(x)), (wide**2).sum(1), rtol, atol=1e-37)
    total = kernels.weighted_row_sum(paddle.to_tensor(x), paddle.to_tensor(c))
    assert total.dtype == getattr(paddle, dtype)
    _close(total, c.astype("float64") @ wide, rtol, atol=rtol * scale * 5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_of_weight_zero_are_not_read(bad: float) -> None:
    x = np.arange(12, dtype="float32").reshape(3, 4)
    x[1, 2] = bad
    norms = kernels.row_squared_norms(paddle.to_tensor(x)).numpy()
    assert np.isfinite(norms[[0, 2]]).all() and not np.isfinite(norms[1])
    c = paddle.to_tensor([2.0, 0.0, 1.0])
    _close(kernels.weighted_row_sum(paddle.to_tensor(x), c), 2 * x[0] + x[2], 1e-6)
    ids = paddle.to_tensor([[0, 1], [1, 2], [1, 1]])
    g = paddle.to_tensor(x.reshape(3, 2, 2))
    expected = np.stack([2 * x[0, :2], 2 * x[0, 2:] + x[2, :2] + x[2, 2:], [0, 0]])
    _close(kernels.embedding_weighted_sum(ids, g, c, 3), expected, 1e-6)
    norms = kernels.embedding_squared_norm(ids, g).numpy()
    assert np.isfinite(norms[[0, 2]]).all() and not np.isfinite(norms[1])
    norms = kernels.ghost_squared_norm(g, g).numpy()
    assert np.isfinite(norms[[0, 2]]).all() and not np.isfinite(norms[1])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("batch", "steps", "d", "p"),
    [(0, 3, 4, 5), (1, 1, 1, 1), (3, 7, 33, 65), (2, 130, 17, 40), (4, 64, 3, 2), (2, 16, 384, 200), (2, 0, 3, 4)],
)
def test_ghost_norm_is_the_norm_of_the_gradient(batch: int, steps: int, d: int, p: int, dtype: str) -> None:
    rng = np.random.default_rng(7)
    a = rng.standard_normal((batch, steps, d)).astype(dtype)
    g = rng.standard_normal((batch, steps, p)).astype(dtype)
    expected = (np.einsum("btd,btp->bdp", a.astype("float64"), g.astype("float64")) ** 2).sum((1, 2))
    actual = kernels.ghost_squared_norm(paddle.to_tensor(a), paddle.to_tensor(g))
    assert actual.dtype == getattr(paddle, dtype)
    _close(actual, expected, 2e-6 if dtype == "float32" else 1e-11)


@properties
@given(st.integers(0, 4), st.integers(1, 40), st.integers(1, 20), st.integers(1, 12), SEEDS)
def test_embedding_norm_and_sum(batch: int, steps: int, width: int, vocabulary: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, (batch, steps))
    g = rng.standard_normal((batch, steps, width))
    tables = np.zeros((batch, vocabulary, width))
    for i in range(batch):
        np.add.at(tables[i], ids[i], g[i])
    c = rng.uniform(size=batch)
    tensors = paddle.to_tensor(ids), paddle.to_tensor(g.astype("float32"))
    _close(kernels.embedding_squared_norm(*tensors), (tables**2).sum((1, 2)), 5e-6, atol=1e-6)
    total = kernels.embedding_weighted_sum(*tensors, paddle.to_tensor(c.astype("float32")), vocabulary)
    _close(total, np.einsum("b,bvd->vd", c, tables), 1e-5, atol=1e-5)


def test_ids_outside_the_table_are_refused() -> None:
    g, c = paddle.ones([1, 2, 3]), paddle.ones([1])
    for ids in ([[0, 5]], [[-1, 0]]):
        with pytest.raises(ValueError, match="ids must lie in"):
            kernels.embedding_weighted_sum(paddle.to_tensor(ids), g, c, 5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_gradients_are_summed_in_float32(dtype: str) -> None:
    x = paddle.full([2, 4096], 3.0, dtype=dtype)
    assert kernels.row_squared_norms(x).numpy().tolist() == [4096 * 9.0] * 2
    total = kernels.weighted_row_sum(x, paddle.to_tensor([1.0, 0.5]))
    assert total.dtype == paddle.float32
    assert (total.numpy() == 4.5).all()


def test_strided_inputs() -> None:
    rng = np.random.default_rng(3)
    base = rng.standard_normal((4, 6, 8)).astype("float32")
    x = paddle.to_tensor(base).transpose([2, 0, 1])
    _close(kernels.row_squared_norms(x), (base.astype("float64") ** 2).sum((0, 1)), 1e-6)
    a, g = paddle.to_tensor(base).transpose([0, 2, 1]), paddle.to_tensor(base[:, :2]).transpose([0, 2, 1])
    expected = (np.einsum("bdt,bpt->bdp", base.astype("float64"), base[:, :2].astype("float64")) ** 2).sum((1, 2))
    _close(kernels.ghost_squared_norm(a, g), expected, 2e-6)


@properties
@given(
    st.integers(0, 6),
    st.lists(st.lists(st.integers(1, 30), max_size=2), min_size=1, max_size=4),
    st.sampled_from([1e-20, 1e-3, 1.0, 1e15]),
    st.booleans(),
    st.sampled_from(["float32", "float64"]),
    SEEDS,
)
def test_clip_and_sum(batch: int, shapes: list[list[int]], scale: float, flat: bool, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = [(rng.standard_normal([batch, *shape]) * scale).astype(dtype) for shape in shapes]
    broken = rng.uniform(size=batch) < 0.2
    for i in np.flatnonzero(broken):
        victim = values[rng.integers(len(values))][i : i + 1].reshape(-1)
        victim[rng.integers(victim.size)] = rng.choice([np.nan, np.inf, -np.inf])
    bounds = rng.uniform(0.5, 6.0, len(shapes)) * scale
    limits = float(bounds[0]) if flat else list(bounds)
    sums, squared, factors = kernels.clip_and_sum([paddle.to_tensor(v) for v in values], limits)
    wide = [v.reshape(batch, int(np.prod(v.shape[1:]))).astype("float64") for v in values]
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.stack([(v**2).sum(1) for v in wide])
        exact = exact.sum(0) if flat else exact
        _close(squared, exact, 1e-12)
        norms = np.sqrt(exact)
    c = bounds[0] if flat else bounds[:, None]
    expected = np.where(norms > c, c / np.where(norms > 0, norms, 1), 1.0) * ~broken
    _close(factors, expected, 1e-6)
    assert (factors.numpy()[..., broken] == 0).all()
    assert (factors.numpy() * np.where(broken, 0, norms) <= c * (1 + 1e-12)).all()
    for i, (total, value) in enumerate(zip(sums, wide)):
        weights = expected if flat else expected[i]
        bound = np.einsum("b,bp->p", weights, np.where(broken[:, None], 0, value))
        assert total.shape == list(shapes[i])
        _close(total.reshape([-1]), bound, 2e-6, atol=2e-6 * scale)


def test_clip_and_sum_in_groups_equals_all_at_once() -> None:
    """Few large and many small samples take different ways through memory."""
    rng = np.random.default_rng(0)
    for rows, columns in ((100, 40_000), (3, 600_000)):
        x = rng.standard_normal((rows, columns)).astype("float32")
        (total,), squared, factors = kernels.clip_and_sum([paddle.to_tensor(x)], 100.0)
        exact = (x.astype("float64") ** 2).sum(1)
        _close(squared, exact, 1e-12)
        _close(total, np.minimum(1, 100 / np.sqrt(exact)) @ x.astype("float64"), 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_clip_and_sum_of_narrow_gradients(dtype: str) -> None:
    x = paddle.to_tensor(np.random.default_rng(1).standard_normal((5, 3000)), dtype=dtype)
    (total,), squared, _ = kernels.clip_and_sum([x], 1.0)
    wide = x.astype("float64").numpy()
    exact = (wide**2).sum(1)
    _close(squared, exact, 1e-6)
    assert total.dtype == paddle.float32
    _close(total, (1 / np.sqrt(exact)) @ wide, 1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("gradients", "bounds", "words"),
    [
        ([], 1.0, "gradients is empty"),
        ([[2, 3]], 0.0, "clip_norms must be > 0"),
        ([[2, 3]], [1.0, 2.0], "2 entries for 1 gradients"),
        ([[2, 3], [3, 3]], 1.0, r"gradients\[1\] has shape"),
    ],
)
def test_clip_and_sum_refuses(gradients: list[list[int]], bounds: float | list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kernels.clip_and_sum([paddle.zeros(shape) for shape in gradients], bounds)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 33), (1, 1, 1), (2, 7, 64), (0, 2, 4)])
def test_norm_layer_sums(shape: tuple[int, int, int], centered: bool, dtype: str) -> None:
    rng = np.random.default_rng(5)
    x = paddle.to_tensor(rng.standard_normal(shape) * 3 + 1, dtype=dtype)
    g = paddle.to_tensor(rng.standard_normal(shape), dtype=dtype)
    weight, bias = kernels.norm_layer_sums(x, g, 1e-5, centered=centered, with_bias=True)
    wide, cotangent = x.astype("float64").numpy(), g.astype("float64").numpy()
    if centered:
        wide = wide - wide.mean(-1, keepdims=True)
    normalised = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    rtol = 1e-12 if dtype == "float64" else 1e-5
    _close(weight, (normalised * cotangent).sum(1), rtol, atol=rtol)
    assert bias is not None
    _close(bias, cotangent.sum(1), rtol, atol=rtol)
    assert kernels.norm_layer_sums(x, g, 1e-5, centered=centered, with_bias=False)[1] is None


def test_ghost_norm_of_a_cancelling_gradient_is_not_negative() -> None:
    a = paddle.ones([2, 6, 40])
    g = paddle.to_tensor(np.tile(np.array([1, -1, 1, -1, 1, -1], dtype="float32")[None, :, None], (2, 1, 50)))
    norms = kernels.ghost_squared_norm(a, g).numpy()
    assert (norms >= 0).all() and (norms < 1e-2).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32"])
def test_other_dtypes_of_the_layer_kernels(dtype: str) -> None:
    rng = np.random.default_rng(5)
    narrow = "float32" if dtype == "int32" else dtype
    ids = paddle.to_tensor(rng.integers(0, 5, (3, 9)), dtype="int32")
    g = paddle.to_tensor(rng.standard_normal((3, 9, 16)), dtype=narrow)
    wide = g.astype("float64").numpy()
    tables = np.zeros((3, 5, 16))
    for i in range(3):
        np.add.at(tables[i], ids.numpy()[i], wide[i])
    _close(kernels.embedding_squared_norm(ids, g), (tables**2).sum((1, 2)), 1e-5)
    c = paddle.to_tensor([0.5, 0.0, 2.0])
    _close(kernels.embedding_weighted_sum(ids, g, c, 5), 0.5 * tables[0] + 2 * tables[2], 1e-5, atol=1e-5)
    _close(kernels.ghost_squared_norm(g, g), (np.einsum("btd,btp->bdp", wide, wide) ** 2).sum((1, 2)), 1e-5)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="equal B and T"):
        kernels.ghost_squared_norm(paddle.zeros([2, 3, 4]), paddle.zeros([2, 4, 4]))
    with pytest.raises(ValueError, match="one weight a sample"):
        kernels.weighted_row_sum(paddle.zeros([2, 3]), paddle.zeros([3]))
    with pytest.raises(ValueError, match="equal B and T"):
        kernels.embedding_squared_norm(paddle.zeros([2, 3], "int64"), paddle.zeros([2, 4, 4]))
    with pytest.raises(ValueError, match="of one shape"):
        kernels.norm_layer_sums(paddle.zeros([2, 3, 4]), paddle.zeros([2, 3, 5]), 1e-5, centered=True, with_bias=True)
