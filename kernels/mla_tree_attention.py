"""Attention of tree rows over a paged latent cache, in MLA's absorbed form (arXiv 2405.04434 §2.1.2).

    s[r, h, j] = q[r, h] . key_j,   p = softmax over the keys that row r sees,   o[r, h] = sum_j p[r, h, j] latent_j

q [R, H, W] (scale and W_UK folded in), cache [S, W] (latent | rotated key) -> o [R, H, C], C <= W.

The keys of a row at position p are split at B = 64 * (p // 64): those before B in order of position, one product that
all rows of a group share; and the 64 positions from B on, along the row's own path, masked past p. Position by position
this is what plain decoding computes, so a row's bits do not depend on where in a tree, a chain or a batch it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.dispatch import op
from kernels.linear import RowLaw, linear, pad_rows

TEST_SHAPES = [(1, 4, 48, 32), (9, 8, 160, 128)]  # (R, H, W, C)
PAGE = 64


class AttentionGroup(NamedTuple):
    """Rows that share everything before B. In a chain they also share the 64 positions from B on."""

    rows: slice | torch.Tensor  # of q
    before: int  # B
    keys: slice | torch.Tensor  # slots of positions 0 .. B-1; of a chain, 0 .. B+63
    tail: torch.Tensor | None  # [rows * 64] slots of positions B .. B+63 along each row's path; None: a chain
    mask: torch.Tensor  # [rows, 1, 64] 0, and -inf past the row's position


@op
def mla_tree_attention(
    q: torch.Tensor, cache: torch.Tensor, groups: Sequence[AttentionGroup], latent: int, law: RowLaw
) -> torch.Tensor:
    heads = q.shape[1]
    q = pad_rows(q, law.padded(heads), 1)
    if len(groups) == 1:
        return _attend(q, cache, groups[0], latent, law)[:, :heads]
    out = q.new_empty(q.shape[0], heads, latent)
    for group in groups:
        out[group.rows] = _attend(q[group.rows], cache, group, latent, law)[:, :heads]
    return out


def _attend(q: torch.Tensor, cache: torch.Tensor, group: AttentionGroup, latent: int, law: RowLaw) -> torch.Tensor:
    rows, heads, width = q.shape
    before, flat = group.before, q.reshape(-1, width)
    keys = cache[group.keys] if isinstance(group.keys, slice) else cache.index_select(0, group.keys)
    if group.tail is None:
        near = keys[before:]
        scores = linear(flat, near.T, law).view(rows, heads, PAGE)
    else:
        near = cache.index_select(0, group.tail).view(rows, PAGE, width)
        scores = torch.bmm(q, near.mT)
    scores += group.mask
    if before:
        far = keys[:before]
        scores = torch.cat([linear(flat, far.T, law).view(rows, heads, before), scores], -1)
    p = scores.softmax(-1)
    p_near = p[..., before:]
    if group.tail is None:
        context = linear(p_near.reshape(-1, PAGE), near[:, :latent], law)
    else:
        context = torch.bmm(p_near, near[..., :latent]).view(-1, latent)
    if before:
        context += linear(p.view(-1, before + PAGE)[:, :before], far[:, :latent], law)
    return context.view(rows, heads, latent)
