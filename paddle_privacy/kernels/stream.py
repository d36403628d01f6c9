"""The noise stream: which bits of ChaCha20 become which normal. Every backend reproduces this file bit for bit.

*Uniform bits.* ChaCha20 (D. J. Bernstein, "ChaCha, a variant of Salsa20", 2008) with a 256-bit key, a 64-bit block
counter in state words 12 and 13 and a 64-bit nonce in words 14 and 15; the nonce is the index of the draw when one
value is the sum of several (see ``docs/noise.md``), else 0.

*Layout.* 16 consecutive blocks form a row of ``NORMALS_PER_ROW`` = 256 normals. Element ``i`` of a tensor lies in row
``i // 256``; within it, word ``w = (i % 256) // 16`` of block ``i % 16``. A tensor starts on a row of its own. The
layout depends on nothing but the element's index, so threads, vector width and device cannot change it.

*Transform.* Box-Muller on the word pair ``(w, w + 8)`` for ``w < 8``; the cosine goes to ``w``, the sine to ``w + 8``.
The radius takes 40 bits (32 of one word, the low 8 of the other), the angle 24, so the largest value is
``sqrt(2 ln 2^41) = 7.54``. All arithmetic is float32 with one rounding an operation and no fused multiply-add: numpy,
SSE2, AVX2, AVX-512 and CUDA agree in the last bit.
"""

from __future__ import annotations

import numpy as np

BLOCKS_PER_ROW = 16
NORMALS_PER_ROW = 16 * BLOCKS_PER_ROW

# Rows computed at a time: the ChaCha20 state of 512 rows is 512 KiB, which stays in L2.
_CHUNK_ROWS = 512

_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4").astype(np.uint32)

_f = np.float32


def rows_needed(count: int) -> int:
    """Rows of 256 normals that ``count`` elements take."""
    return -(-count // NORMALS_PER_ROW)


def chacha20_blocks(key: np.ndarray, first_block: int, count: int, nonce: int = 0) -> np.ndarray:
    """``count`` consecutive ChaCha20 blocks as ``uint32 [16, count]``: word by block.

    ``key``: ``uint32 [8]``, little-endian words. ``first_block``: block counter of the first one, below 2^64.
    """
    counters = np.uint64(first_block) + np.arange(count, dtype=np.uint64)
    initial = np.empty((16, count), dtype=np.uint32)
    initial[0:4] = _CONSTANTS[:, None]
    initial[4:12] = np.asarray(key, dtype=np.uint32)[:, None]
    initial[12] = (counters & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    initial[13] = (counters >> np.uint64(32)).astype(np.uint32)
    initial[14] = nonce & 0xFFFFFFFF
    initial[15] = nonce >> 32
    state = initial.copy()
    spare = np.empty((4, count), dtype=np.uint32)
    # The four columns are adjacent rows of the array, so one call does the four quarter-rounds; the diagonals are
    # the columns after rotating the last three quarters of the state.
    a, b, c, d = state[0:4], state[4:8], state[8:12], state[12:16]
    for _ in range(10):
        _quarter_rounds(a, b, c, d, spare)
        b, c, d = b[[1, 2, 3, 0]], c[[2, 3, 0, 1]], d[[3, 0, 1, 2]]
        _quarter_rounds(a, b, c, d, spare)
        b, c, d = b[[3, 0, 1, 2]], c[[2, 3, 0, 1]], d[[1, 2, 3, 0]]
    return np.concatenate([a, b, c, d]) + initial


def _quarter_rounds(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, spare: np.ndarray) -> None:
    for left, right, bits in ((a, d, 16), (c, b, 12), (a, d, 8), (c, b, 7)):
        left += b if left is a else d
        right ^= left
        np.right_shift(right, 32 - bits, out=spare)
        np.left_shift(right, bits, out=right)
        right |= spare


def box_muller(radius_words: np.ndarray, angle_words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two independent standard normals (float32) from two uniform 32-bit words, elementwise."""
    # A uniform u in (0, 1) of 32 bits, refined by 8 more and a half. Read as signed it is u itself below 1/2 and u - 1
    # above: both ends are exact, the far tail (u near 0) and the neighbourhood of 0 (u near 1), and neither is reached.
    signed = radius_words.view(np.int32).astype(np.float32) * _f(2.0**-32)
    signed += ((angle_words & np.uint32(0xFF)).astype(np.float32) + _f(0.5)) * _f(2.0**-40)
    radius = np.sqrt(_f(-2.0) * _log(signed))

    angle = angle_words >> np.uint32(8)
    quadrant = angle >> np.uint32(22)
    # The middle of one of 2^22 equal arcs of a quarter circle centred on 0: an odd integer, exact in float32.
    odd = ((angle & np.uint32(0x3FFFFF)) << np.uint32(1)).astype(np.int32) - np.int32(0x3FFFFF)
    cosine, sine = _cos_sin(odd.astype(np.float32) * _f(np.pi / 2.0 / 2.0**23))
    swap = (quadrant & np.uint32(1)).astype(bool)
    first = radius * np.where(swap, sine, cosine)
    second = radius * np.where(swap, cosine, sine)
    # Rotation by quadrant * 90 degrees: (c, s), (-s, c), (-c, -s), (s, -c).
    first.view(np.uint32)[...] ^= ((quadrant ^ (quadrant >> np.uint32(1))) & np.uint32(1)) << np.uint32(31)
    second.view(np.uint32)[...] ^= (quadrant >> np.uint32(1)) << np.uint32(31)
    return first, second


def _log(signed: np.ndarray) -> np.ndarray:
    """Natural logarithm of u, given as u or u - 1 in [-1/2, 1/2) (coefficients of Cephes' ``logf``)."""
    bits = (signed + (signed < 0).astype(np.float32)).view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    # Exponent 0 is u >= sqrt(1/2), where u - 1 is at hand without cancellation.
    f = np.where(exponent == 0, signed, (bits - (exponent << np.int32(23))).view(np.float32) - _f(1.0))
    e = exponent.astype(np.float32)
    z = f * f
    y = _f(7.0376836292e-2) * f
    y += _f(-1.1514610310e-1)
    for coefficient in (
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        y *= f
        y += _f(coefficient)
    y *= f
    y *= z
    y += e * _f(-2.12194440e-4)
    y += _f(-0.5) * z
    y += f
    y += e * _f(0.693359375)
    return y


def _cos_sin(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of float32 in [-pi/4, pi/4] (coefficients of Cephes' ``cosf`` and ``sinf``)."""
    z = x * x
    s = _f(-1.9515295891e-4) * z
    s += _f(8.3321608736e-3)
    s *= z
    s += _f(-1.6666654611e-1)
    s *= z
    s *= x
    s += x
    c = _f(2.443315711809948e-5) * z
    c += _f(-1.388731625493765e-3)
    c *= z
    c += _f(4.166664568298827e-2)
    c *= z
    c *= z
    c += _f(-0.5) * z
    c += _f(1.0)
    return c, s


def standard_normals(key: np.ndarray, first_block: int, count: int, draws: int = 1) -> np.ndarray:
    """``float32 [count]`` standard normals of the stream that starts at ``first_block``.

    With ``draws`` in {1, 4} each value is the sum of that many independent normals over ``sqrt(draws)``.
    """
    rows = rows_needed(count)
    out = np.empty((rows, NORMALS_PER_ROW), dtype=np.float32)
    for start in range(0, rows, _CHUNK_ROWS):
        chunk = min(_CHUNK_ROWS, rows - start)
        block = first_block + start * BLOCKS_PER_ROW
        if draws == 1:
            out[start : start + chunk] = _normal_rows(key, block, chunk, 0)
        else:
            first, second, third, fourth = (_normal_rows(key, block, chunk, nonce) for nonce in range(4))
            out[start : start + chunk] = ((first + second) + (third + fourth)) * _f(0.5)
    return out.reshape(-1)[:count]


def _normal_rows(key: np.ndarray, first_block: int, rows: int, nonce: int) -> np.ndarray:
    words = chacha20_blocks(key, first_block, rows * BLOCKS_PER_ROW, nonce)
    first, second = box_muller(words[:8], words[8:])
    normals = np.concatenate([first, second]).reshape(16, rows, BLOCKS_PER_ROW)
    return normals.transpose(1, 0, 2).reshape(rows, NORMALS_PER_ROW)
