"""The weighted sum of a row's slots, as `down_rows` (moe_down.py) makes it.

    out[r] = base[r] + ((p0 + p2) + (p1 + p3)),  p_i = w[2 i] y[2 i] + w[2 i + 1] y[2 i + 1]

y [R * 8, H], weights [R, 8] float32, base [R, H] or none -> out [R, H], which may be base. Sums in float32, every
product rounded. A slot whose expert is -1 adds nothing, and its y is not read.
"""

import triton
import triton.language as tl

from kernels.gpu.follow import follow


@triton.jit
def _slot(weights, chosen, p):
    return tl.load(chosen + p) >= 0, tl.load(weights + p)


@triton.jit
def _two(y, p, column, of0, of1, H: tl.constexpr):
    y0 = tl.load(y + p.to(tl.int64) * H + column, mask=(column < H) & of0[0], other=0.0).to(tl.float32)
    y1 = tl.load(y + (p + 1).to(tl.int64) * H + column, mask=(column < H) & of1[0], other=0.0).to(tl.float32)
    return y0 * of0[1] + y1 * of1[1]


@triton.jit
def combine(y, weights, chosen, base, out, H: tl.constexpr, BASE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """grid (R, H / BLOCK), without fused multiply-adds (`enable_fp_fusion`). All but y is read before the wait."""
    r = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = r * 8
    s0, s1 = _slot(weights, chosen, p), _slot(weights, chosen, p + 1)
    s2, s3 = _slot(weights, chosen, p + 2), _slot(weights, chosen, p + 3)
    s4, s5 = _slot(weights, chosen, p + 4), _slot(weights, chosen, p + 5)
    s6, s7 = _slot(weights, chosen, p + 6), _slot(weights, chosen, p + 7)
    at = r.to(tl.int64) * H + column
    first = tl.zeros((BLOCK,), tl.float32)
    if BASE:
        first = tl.load(base + at, mask=column < H, other=0.0).to(tl.float32)
    follow(PDL)
    p0 = _two(y, p, column, s0, s1, H)
    p1 = _two(y, p + 2, column, s2, s3, H)
    p2 = _two(y, p + 4, column, s4, s5, H)
    p3 = _two(y, p + 6, column, s6, s7, H)
    sums = (p0 + p2) + (p1 + p3)
    if BASE:
        sums = first + sums
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=column < H)
