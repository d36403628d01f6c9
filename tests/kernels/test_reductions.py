"""Sums and norms against float64 numpy, one sample at a time."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_privacy import kernels

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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=30, deadline=None)
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
