"""Rotary embedding of neighbouring pairs (K2), and a row's key on its way into the cache.

    y[2i] + j y[2i+1] = (x[2i] + j x[2i+1]) * (cos[p, i] + j sin[p, i])

cos, sin [P, D / 2] float32. The query is turned in kernels/gpu/absorb.py.
`mla_inputs`: of a row a = [query latent | key latent | key], cache[slot] = [norm(key latent) | rope(key)] and
out = norm(query latent); a negative slot is written nowhere. One program a row, float32 inside, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import ROOMY, follow, followed
from kernels.gpu.linear import joined
from kernels.gpu.shapes import check, check_rows

BENCH_SHAPES = [(1, 1536, 512, 64), (16, 1536, 512, 64), (64, 1536, 512, 64)]  # (R, Q, C, D)


def reference(x: torch.Tensor, position: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [R, H, D] -> float32."""
    even, odd = x.float()[..., ::2], x.float()[..., 1::2]
    c, s = cos[position.long()].unsqueeze(1), sin[position.long()].unsqueeze(1)
    return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)


@triton.jit
def _mla_inputs(
    a, q_norm, kv_norm, position, cos, sin, slot, cache, out, a_row, a_part, eps, PARTS: tl.constexpr,
    Q: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, QB: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    a += r.to(tl.int64) * a_row
    i, c, e = tl.arange(0, QB), tl.arange(0, LATENT), tl.arange(0, HALF)
    if not EARLY:
        follow(PDL)
    # All loads of a program are under way before the first of them is waited for: their latency is most of its time.
    at, p = tl.load(slot + r).to(tl.int64), tl.load(position + r).to(tl.int64)
    query_weight = tl.load(q_norm + i, mask=i < Q, other=0.0)
    weight = tl.load(kv_norm + c)
    cosine, sine = tl.load(cos + p * HALF + e), tl.load(sin + p * HALF + e)
    if EARLY:
        follow(PDL)
    if tl.program_id(1) == 0:  # the query's latent and the row's keys: nothing of one is needed for the other
        v = joined(a, i, i < Q, PARTS, a_part)
        v = v * tl.rsqrt(tl.sum(v * v, 0) / Q + eps) * query_weight.to(tl.float32)
        tl.store(out + r.to(tl.int64) * Q + i, v.to(out.dtype.element_ty), mask=i < Q)
    else:
        z = joined(a, Q + c, c < LATENT, PARTS, a_part)
        even = joined(a, Q + LATENT + 2 * e, e < HALF, PARTS, a_part)
        odd = joined(a, Q + LATENT + 2 * e + 1, e < HALF, PARTS, a_part)
        z = z * tl.rsqrt(tl.sum(z * z, 0) / LATENT + eps) * weight.to(tl.float32)
        real = at >= 0
        cache += at * (LATENT + 2 * HALF)
        tl.store(cache + c, z.to(cache.dtype.element_ty), mask=real & (c < LATENT))
        cache += LATENT
        tl.store(cache + 2 * e, (even * cosine - odd * sine).to(cache.dtype.element_ty), mask=real & (e < HALF))
        tl.store(cache + 2 * e + 1, (even * sine + odd * cosine).to(cache.dtype.element_ty), mask=real & (e < HALF))


def mla_inputs(
    a: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    slot: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    early: bool = False,
) -> None:
    """a [R, Q + C + D], or in parts [P, R, Q + C + D] as `linear_parts` leaves them.

    Writes cache [S, C + D] at slot [R] int32 (distinct), fills out [R, Q].
    `early`: the launch before this one writes neither weights nor tables, positions or slots (follow.py).
    Slots within the cache, positions within the tables: not checked here. ValueError names what does not fit.
    """
    a = a.unsqueeze(0) if a.dim() == 2 else a
    rows, q, latent, half = a.shape[1], q_norm.shape[0], kv_norm.shape[0], cos.shape[1]
    check_rows("a", a[0], q + latent + 2 * half)
    for name, weight, size in (("q_norm", q_norm, q), ("kv_norm", kv_norm, latent)):
        check(name, weight, (size,))
    check("cache", cache, (None, latent + 2 * half))
    check("out", out, (rows, q))
    for name, index in (("position", position), ("slot", slot)):
        check(name, index, (rows,), torch.int32)
    check("cos", cos, (None, half), torch.float32)
    check("sin", sin, tuple(cos.shape), torch.float32)
    _power_of_two("kv_norm", latent)
    _power_of_two("cos", half)
    _mla_inputs[(rows, 2)](
        a, q_norm, kv_norm, position, cos, sin, slot, cache, out, a.stride(1), a.stride(0), eps, PARTS=a.shape[0],
        Q=q, LATENT=latent, HALF=half, QB=triton.next_power_of_2(q), EARLY=early, num_warps=4,
        **ROOMY, **followed(),
    )  # fmt: skip


def mla_inputs_reference(
    a: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into the cache, and the normed query latent; float32."""
    parts = a.float().split([len(q_norm), len(kv_norm), a.shape[1] - len(q_norm) - len(kv_norm)], 1)
    query, latent = (
        part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) * w.float()
        for part, w in ((parts[0], q_norm), (parts[1], kv_norm))
    )
    key = reference(parts[2].unsqueeze(1), position, cos, sin).squeeze(1)
    return torch.cat([latent, key], 1), query


def _power_of_two(name: str, size: int) -> None:
    if size & (size - 1):
        raise ValueError(f"{name} has a width of {size}, a power of two was expected")
