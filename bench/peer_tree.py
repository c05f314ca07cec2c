"""What a peer without trees needs for one: a prefix kernel that also gives its log-sum-exp, then this tail and merge.

One program a row scores the row's own step under its bitmask and merges with the prefix's result; tail and merge in one
launch, which is kind to the peer.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _tail_merge(
    Q, KV, TABLE, LENS, ANCESTORS, PREFIX, LSE, OUT, scale, pages, rows, lse_batch, lse_head, lse_row,
    H: tl.constexpr, C: tl.constexpr, P: tl.constexpr, HB: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    b, j = r // rows, r % rows
    h, c, e, t = tl.arange(0, HB), tl.arange(0, C), tl.arange(0, P), tl.arange(0, KEYS)
    heads, own = h < H, t < rows
    place = tl.load(LENS + b) + t
    page = tl.load(TABLE + b * pages + place // 64, mask=own, other=0)
    slot = (page.to(tl.int64) * 64 + place % 64) * (C + P)
    at = Q + (r * H + h)[:, None] * (C + P)
    q = tl.load(at + c[None, :], mask=heads[:, None], other=0.0)
    qe = tl.load(at + C + e[None, :], mask=heads[:, None], other=0.0)
    k = tl.load(KV + slot[:, None] + c[None, :], mask=own[:, None], other=0.0)
    ke = tl.load(KV + slot[:, None] + C + e[None, :], mask=own[:, None], other=0.0)
    sees = (((tl.load(ANCESTORS + r) >> t.to(tl.int64)) & 1) != 0) & own
    s = (tl.dot(q, tl.trans(k)) + tl.dot(qe, tl.trans(ke))) * scale
    s = tl.where(sees[None, :], s, -1e30)
    top = tl.max(s, 1)
    p = tl.exp(s - top[:, None])
    total = tl.sum(p, 1)
    tail = tl.dot(p.to(k.dtype), k) / total[:, None]
    lse = top + tl.log(total)
    before = tl.load(LSE + b * lse_batch + h * lse_head + j * lse_row, mask=heads, other=0.0)
    most = tl.maximum(lse, before)
    ours, theirs = tl.exp(lse - most), tl.exp(before - most)
    to = (r * H + h)[:, None] * C + c[None, :]
    prefix = tl.load(PREFIX + to, mask=heads[:, None], other=0.0).to(tl.float32)
    merged = (prefix * theirs[:, None] + tail * ours[:, None]) / (ours + theirs)[:, None]
    tl.store(OUT + to, merged.to(OUT.dtype.element_ty), mask=heads[:, None])


def tail_merge(
    q: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    ancestors: torch.Tensor,
    prefix: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """q [B, T, H, C+P], pool [pages, 64, C+P], table [B, n], lens [B] (the prefix), ancestors [B * T], prefix and out
    [B, T, H, C], lse [B, H, T] float32 (natural; any strides: FlashMLA's has heads innermost), T <= 64: fills out.
    """
    batch, rows, heads, width = q.shape
    latent = out.shape[-1]
    _tail_merge[(batch * rows,)](
        q, pool, table, lens, ancestors, prefix, lse, out, scale, table.stride(0), rows, *lse.stride(),
        H=heads, C=latent, P=width - latent, HB=max(16, triton.next_power_of_2(heads)),
        KEYS=max(16, triton.next_power_of_2(rows)), num_warps=4,
    )  # fmt: skip
