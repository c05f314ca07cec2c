"""The weighted sum of a row's slots, as `down_rows` (moe_down.py) makes it.

    out[r] = base[r] + ((p0 + p2) + (p1 + p3)),  p_i = w[2 i] y[2 i] + w[2 i + 1] y[2 i + 1]

y [R * 8, H], weights [R, 8] float32, base [R, H] or none -> out [R, H], which may be base. Sums in float32, every
product rounded. A slot whose expert is -1 adds nothing, and its y is not read.
"""

import triton
import triton.language as tl

from kernels.gpu.follow import follow


@triton.jit
def _two(y, weights, chosen, r, column, k: tl.constexpr, H: tl.constexpr):
    p = r * 8 + k
    real0 = tl.load(chosen + p) >= 0
    real1 = tl.load(chosen + p + 1) >= 0
    y0 = tl.load(y + p.to(tl.int64) * H + column, mask=(column < H) & real0, other=0.0).to(tl.float32)
    y1 = tl.load(y + (p + 1).to(tl.int64) * H + column, mask=(column < H) & real1, other=0.0).to(tl.float32)
    return y0 * tl.load(weights + p) + y1 * tl.load(weights + p + 1)


@triton.jit
def combine(y, weights, chosen, base, out, H: tl.constexpr, BASE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """grid (R, H / BLOCK), without fused multiply-adds (`enable_fp_fusion`)."""
    follow(PDL)
    r = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p0 = _two(y, weights, chosen, r, column, 0, H)
    p1 = _two(y, weights, chosen, r, column, 2, H)
    p2 = _two(y, weights, chosen, r, column, 4, H)
    p3 = _two(y, weights, chosen, r, column, 6, H)
    sums = (p0 + p2) + (p1 + p3)
    at = r.to(tl.int64) * H + column
    if BASE:
        sums = tl.load(base + at, mask=column < H, other=0.0).to(tl.float32) + sums
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=column < H)
