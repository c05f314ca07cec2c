"""Tree attention as serving stacks run it today, for comparison: one program a head and 32 rows, no split of the keys.

Keys and values are read apart, by a list of slots; which of them a row sees is one byte a row and key. With one session
and eight heads a card of 132 processors runs eight programs.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _attend(Q, KV, SLOTS, SEES, OUT, keys, H, C: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c, e = tl.arange(0, C), tl.arange(0, P)
    at = Q + (row * H + head)[:, None] * (C + P)
    q, qe = tl.load(at + c[None, :]), tl.load(at + C + e[None, :])
    top = tl.full([ROWS], -1e20, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, C], tl.float32)
    for first in range(0, keys, KEYS):
        key = first + tl.arange(0, KEYS)
        live = key < keys
        slot = tl.load(SLOTS + key, mask=live, other=0).to(tl.int64) * (C + P)
        k = tl.load(KV + slot[None, :] + c[:, None], mask=live[None, :], other=0.0)
        ke = tl.load(KV + slot[None, :] + C + e[:, None], mask=live[None, :], other=0.0)
        sees = tl.load(SEES + row[:, None] * keys + key[None, :], mask=live[None, :], other=0)
        s = tl.where(sees != 0, tl.dot(q, k) + tl.dot(qe, ke), -1e30) * 1.4426950408889634
        now = tl.maximum(top, tl.max(s, 1))
        a, p = tl.exp2(top - now), tl.exp2(s - now[:, None])
        total, top = total * a + tl.sum(p, 1), now
        v = tl.load(KV + slot[:, None] + c[None, :], mask=live[:, None], other=0.0)
        acc = acc * a[:, None] + tl.dot(p.to(tl.bfloat16), v)
    tl.store(OUT + (row * H + head)[:, None] * C + c[None, :], (acc / total[:, None]).to(tl.bfloat16))


def per_head(q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, sees: torch.Tensor, out: torch.Tensor) -> None:
    """One session: q [T, H, C+P], T a multiple of 32; slots [keys] int64; sees [T, keys] uint8; out [T, H, C]."""
    rows, heads, width = q.shape
    latent = out.shape[-1]
    _attend[(heads, rows // 32)](
        q, pool, slots, sees, out, len(slots), heads, C=latent, P=width - latent, ROWS=32, KEYS=32, num_warps=8,
        num_stages=1,
    )  # fmt: skip
