"""A DFlash drafter's attention on the GPU: rows turned, contexts kept in pages, a block over its context and itself.

`draft_rows`: of a row a = [query heads | key heads | value heads], each D wide: queries and keys are normed per head
and turned by halves (y[i] + j y[i + D/2] = (x[i] + j x[i + D/2]) * (cos[p, i] + j sin[p, i])), values kept. Queries go
to q[r], keys and values side by side to kv[slot[r]]; a negative slot is written nowhere.

`draft_attention`: o[i] = softmax_j(q[i] . k_j / sqrt(D)) v_j for the rows i of a block with its anchor at P. They see
the context positions start .. end - 1 that are less than `window` before their row, and the block itself; with `causal`
of that what is not behind them. Position p of sequence s lies in page p // 64 - start // 64 of pages[s].

A drafter's bits are nobody's business; they follow from shapes alone all the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.shapes import check, check_rows

TEST_SHAPES = [(1, 2, 1, 16, 8), (3, 6, 2, 64, 8), (2, 4, 2, 32, 5)]  # (S, heads, KV heads, D, block)
PAGE = 64


def rows_reference(
    a: torch.Tensor,
    norms: torch.Tensor,
    heads: int,
    position: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [R, heads, D] and kv [R, 2, G, D], float32."""
    width, groups = norms.shape[1], norms.shape[0] - heads
    x = a.float().view(len(a), heads + 2 * groups, width)
    turned = x[:, : heads + groups]
    turned = turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + eps) * norms.float()
    low, high = turned.chunk(2, -1)
    c, s = cos[position.long()].unsqueeze(1), sin[position.long()].unsqueeze(1)
    turned = torch.cat([low * c - high * s, high * c + low * s], -1)
    return turned[:, :heads], torch.stack([turned[:, heads:], x[:, heads + groups :]], 1)


def attention_reference(
    q: torch.Tensor, own: torch.Tensor, context: torch.Tensor, first: int, anchor: int, window: int, causal: bool
) -> torch.Tensor:
    """One sequence: q [block, heads, D], own [block, 2, G, D], context [n, 2, G, D] of positions first .. -> as q."""
    block, heads, width = q.shape
    keys = torch.cat([context, own]).float()
    at = torch.cat([torch.arange(first, first + len(context)), torch.arange(anchor, anchor + block)])
    row = torch.arange(block).unsqueeze(1)
    hidden = at > row + anchor if causal else torch.zeros(block, len(at), dtype=torch.bool)
    if window:
        hidden = hidden | ((row + anchor - at).abs() >= window)
    k, v = (part.repeat_interleave(heads // own.shape[2], 1) for part in keys.unbind(1))
    scores = torch.einsum("ihd,jhd->hij", q.float(), k) * width**-0.5
    p = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", p, v)


@triton.jit
def _draft_rows(
    a, norms, position, slot, cos, sin, q, kv, a_row, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, HB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    h, i = tl.arange(0, HB)[:, None], tl.arange(0, HALF)[None, :]
    live = h < HEADS + 2 * GROUPS
    a += r * a_row + h * (2 * HALF) + i
    low = tl.load(a, mask=live, other=0.0).to(tl.float32)
    high = tl.load(a + HALF, mask=live, other=0.0).to(tl.float32)
    normed = h < HEADS + GROUPS
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
    left = low * scale * tl.load(norms + h * (2 * HALF) + i, mask=normed, other=0.0).to(tl.float32)
    right = high * scale * tl.load(norms + h * (2 * HALF) + HALF + i, mask=normed, other=0.0).to(tl.float32)
    p = tl.load(position + r).to(tl.int64) * HALF + i
    c, s = tl.load(cos + p), tl.load(sin + p)
    low = tl.where(normed, left * c - right * s, low)
    high = tl.where(normed, right * c + left * s, high)
    if HEADS:
        into = q + (r * HEADS + h) * (2 * HALF) + i
        tl.store(into, low.to(q.dtype.element_ty), mask=h < HEADS)
        tl.store(into + HALF, high.to(q.dtype.element_ty), mask=h < HEADS)
    at = tl.load(slot + r).to(tl.int64)
    keep = live & (h >= HEADS) & (at >= 0)
    into = kv + (at * (2 * GROUPS) + (h - HEADS)) * (2 * HALF) + i
    tl.store(into, low.to(kv.dtype.element_ty), mask=keep)
    tl.store(into + HALF, high.to(kv.dtype.element_ty), mask=keep)


def draft_rows(
    a: torch.Tensor,
    norms: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    slot: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q: torch.Tensor | None,
    kv: torch.Tensor,
) -> None:
    """a [R, (H + 2 G) D], a part of wider rows; norms [H + G, D]; fills q [R, H, D] (None: H is 0) and kv [S, 2, G, D].

    Slots within kv, positions within the tables: not checked here. ValueError names what does not fit.
    """
    rows, groups, width = a.shape[0], kv.shape[2], kv.shape[3]
    heads = 0 if q is None else q.shape[1]
    check_rows("a", a, (heads + 2 * groups) * width)
    check("norms", norms, (heads + groups, width))
    check("kv", kv, (None, 2, groups, width))
    if q is not None:
        check("q", q, (rows, heads, width))
    for name, index in (("position", position), ("slot", slot)):
        check(name, index, (rows,), torch.int32)
    for name, table in (("cos", cos), ("sin", sin)):
        check(name, table, (None, width // 2), torch.float32)
    _power_of_two(width)
    _draft_rows[(rows,)](
        a, norms, position, slot, cos, sin, kv if q is None else q, kv, a.stride(0), eps, HEADS=heads, GROUPS=groups,
        HALF=width // 2, HB=triton.next_power_of_2(heads + 2 * groups), num_warps=4,
        **followed(),
    )  # fmt: skip


@triton.jit
def attend(q, k, v, seen, peak, total, acc):
    """One block of keys into the running softmax, to the base 2. Unseen keys are -1e30, and the peak is above that."""
    score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), -1e30)
    above = tl.maximum(peak, tl.max(score, 1))
    p = tl.exp2(score - above[:, None])
    fade = tl.exp2(peak - above)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return above, total * fade + tl.sum(p, 1), acc


@triton.jit
def _draft_attention(
    q, own, pool, pages, start, end, anchor, out, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr, PAGES: tl.constexpr, MB: tl.constexpr, JB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    s, g = tl.program_id(0), tl.program_id(1)
    m, d, j = tl.arange(0, MB), tl.arange(0, D), tl.arange(0, 64)
    row, head = m % BLOCK, g * (HEADS // GROUPS) + m // BLOCK
    live = (m < HEADS // GROUPS * BLOCK)[:, None]
    at = ((s * BLOCK + row).to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    query = tl.load(q + at, mask=live, other=0.0)
    query = (query.to(tl.float32) * scale).to(query.dtype)
    peak, total = tl.full((MB,), -1e20, tl.float32), tl.zeros((MB,), tl.float32)
    acc = tl.zeros((MB, D), tl.float32)
    begin, stop, place = tl.load(start + s), tl.load(end + s), tl.load(anchor + s)
    page = begin // 64
    if WINDOW:
        page = tl.maximum(page, (place - WINDOW + 1) // 64)
    while page * 64 < stop:
        p = page * 64 + j
        here = (p >= begin) & (p < stop)
        slot = tl.load(pages + s * PAGES + page - begin // 64).to(tl.int64) * 64 + j
        k_at = pool + (slot * (2 * GROUPS) + g)[:, None] * D + d[None, :]
        k = tl.load(k_at, mask=here[:, None], other=0.0)
        v = tl.load(k_at + GROUPS * D, mask=here[:, None], other=0.0)
        seen = here[None, :]
        if WINDOW:
            seen = seen & (place + row[:, None] - p[None, :] < WINDOW)
        peak, total, acc = attend(query, k, v, seen, peak, total, acc)
        page += 1
    i = tl.arange(0, JB)
    k_at = own + ((s * BLOCK + i).to(tl.int64) * (2 * GROUPS) + g)[:, None] * D + d[None, :]
    k = tl.load(k_at, mask=(i < BLOCK)[:, None], other=0.0)
    v = tl.load(k_at + GROUPS * D, mask=(i < BLOCK)[:, None], other=0.0)
    seen = (i < BLOCK)[None, :] & (row[:, None] >= 0)
    if CAUSAL:
        seen = seen & (i[None, :] <= row[:, None])
    if WINDOW:
        seen = seen & (row[:, None] - i[None, :] < WINDOW) & (i[None, :] - row[:, None] < WINDOW)
    peak, total, acc = attend(query, k, v, seen, peak, total, acc)
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=live)


def draft_attention(
    q: torch.Tensor,
    own: torch.Tensor,
    pool: torch.Tensor,
    pages: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    anchor: torch.Tensor,
    out: torch.Tensor,
    window: int | None,
    causal: bool,
) -> None:
    """Fills out as q [S * block, heads, D] from own [S * block, 2, G, D] and pool [slots, 2, G, D].

    start, end, anchor [S] and pages [S, P], int32; start <= end <= anchor: not checked here. ValueError names what does
    not fit.
    """
    rows, heads, width = q.shape
    sequences, groups = pages.shape[0], own.shape[2]
    check("q", q, (rows, heads, width), pool.dtype)
    check("out", out, (rows, heads, width), pool.dtype)
    check("own", own, (rows, 2, groups, width), pool.dtype)
    check("pool", pool, (None, 2, groups, width))
    check("pages", pages, (sequences, None), torch.int32)
    for name, tensor in (("start", start), ("end", end), ("anchor", anchor)):
        check(name, tensor, (sequences,), torch.int32)
    if not sequences or rows % sequences or heads % groups:
        raise ValueError(f"q has {rows} rows and {heads} heads, multiples of {sequences} and {groups} were expected")
    _power_of_two(width)
    block = rows // sequences
    _draft_attention[(sequences, groups)](
        q, own, pool, pages, start, end, anchor, out, width**-0.5 * 1.4426950408889634, HEADS=heads, GROUPS=groups,
        D=width, BLOCK=block, WINDOW=window or 0, CAUSAL=causal, PAGES=pages.shape[1],
        MB=max(16, triton.next_power_of_2(heads // groups * block)), JB=max(16, triton.next_power_of_2(block)),
        num_warps=4, num_stages=2, **followed(),
    )  # fmt: skip


def _power_of_two(width: int) -> None:
    if width < 16 or width & (width - 1):
        raise ValueError(f"a head is {width} wide, a power of two from 16 on was expected")
