"""Attention of single rows over the paged latent cache, absorbed MLA (arXiv 2405.04434 §2.1.2): one law for all rows.

    s[h, j] = scale * q[h] . key_j,   p = softmax over positions 0 .. position[r],   o[h] = sum_j p[h, j] latent_j

q [R, H, C + D], cache [S, C + D] (latent | turned key) -> o [R, H, C]; the rest as in `row_layout`.

A row's keys are taken in blocks of 64 at absolute positions, its own path from `shared` on, in order of position; the
softmax is rescaled at the blocks' borders. That is what plain decoding computes, and one program computes one row: its
bits depend on neither the tree, nor the batch, nor the chunk, nor the pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.row_layout import DEEPEST
from kernels.gpu.shapes import check

TEST_SHAPES = [(4, 32, 16), (8, 128, 32)]  # (H, C, D)
LOG2_E = 1.4426950408889634


def reference(q: torch.Tensor, keys: torch.Tensor, latent: int, scale: float) -> torch.Tensor:
    """One row: q [H, W], keys [positions, W] along its path -> [H, C] float32."""
    scores = (q.float() @ keys.float().T) * scale
    return scores.softmax(-1) @ keys[:, :latent].float()


@triton.jit
def _row_attention(
    q, cache, position, shared, seq, pages, path, out, scale,
    HEADS: tl.constexpr, C: tl.constexpr, D: tl.constexpr, HB: tl.constexpr, PAGES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    of = tl.load(seq + r)
    h, c, d, j = tl.arange(0, HB), tl.arange(0, C), tl.arange(0, D), tl.arange(0, 64)
    heads = (h < HEADS)[:, None]
    into = out + (r.to(tl.int64) * HEADS + h[:, None]) * C + c[None, :]
    if of == -1:
        tl.store(into, tl.zeros((HB, C), out.dtype.element_ty), mask=heads)
    elif of >= 0:
        last, cut = tl.load(position + r), tl.load(shared + r)
        query = q + (r.to(tl.int64) * HEADS + h[:, None]) * (C + D)
        q_latent = tl.load(query + c[None, :], mask=heads, other=0.0)
        q_turned = tl.load(query + C + d[None, :], mask=heads, other=0.0)
        peak = tl.full((HB,), -1e20, tl.float32)
        total = tl.zeros((HB,), tl.float32)
        acc = tl.zeros((HB, C), tl.float32)
        block = 0
        while block * 64 <= last:  # of a `range` over a value the interpreter knows nothing
            at = block * 64 + j
            live = at <= last
            own = tl.load(path + r * DEPTH + (at - cut), mask=live & (at >= cut), other=0)
            slot = tl.where(at >= cut, own, tl.load(pages + of * PAGES + block) * 64 + j).to(tl.int64)
            key = cache + slot[:, None] * (C + D)
            latent = tl.load(key + c[None, :], mask=live[:, None], other=0.0)
            turned = tl.load(key + C + d[None, :], mask=live[:, None], other=0.0)
            score = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            score = tl.dot(q_turned, tl.trans(turned), score, input_precision="ieee")
            score = tl.where(live[None, :], score * scale, -1e30)
            above = tl.maximum(peak, tl.max(score, 1))
            p = tl.exp2(score - above[:, None])
            fade = tl.exp2(peak - above)
            total = total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(latent.dtype), latent, acc * fade[:, None], input_precision="ieee")
            peak = above
            block += 1
        tl.store(into, (acc / total[:, None]).to(out.dtype.element_ty), mask=heads)


def row_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    position: torch.Tensor,
    shared: torch.Tensor,
    seq: torch.Tensor,
    pages: torch.Tensor,
    path: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Fills out [R, H, C]; rows of padding (seq -1) with zeros, rows of another form (seq -2) not at all.

    ValueError names what does not fit.
    """
    rows, heads, width = q.shape
    latent = out.shape[2]
    turned = width - latent
    check("q", q, (rows, heads, width), cache.dtype)
    check("cache", cache, (None, width))
    check("out", out, (rows, heads, latent), cache.dtype)
    for name, tensor in (("position", position), ("shared", shared), ("seq", seq)):
        check(name, tensor, (rows,), torch.int32)
    check("pages", pages, (None, None), torch.int32)
    check("path", path, (rows, DEEPEST), torch.int32)
    for name, size in (("latent", latent), ("turned key", turned)):
        if size < 16 or size & (size - 1):
            raise ValueError(f"the {name} is {size} wide, a power of two from 16 on was expected")
    _row_attention[(rows,)](
        q, cache, position, shared, seq, pages, path, out, scale * LOG2_E, HEADS=heads, C=latent, D=turned,
        HB=max(16, triton.next_power_of_2(heads)), PAGES=pages.shape[1], DEPTH=DEEPEST, num_warps=4, num_stages=2,
    )  # fmt: skip
