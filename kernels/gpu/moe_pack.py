"""The experts' INT4 weights in the order in which the MMA takes them: 16 bytes are one thread's part of a slab.

    words  [E, M / 64, K / 256, 4 j, 4 slab, 8 g, 4 t, 4 ks] int32     ks = group * 2 + m
    scales [E, M / 64, K / 256, 4 j, 4 slab, 8 g, 2 group] int32       two bfloat16: rows g and g + 8 of the slab

A word holds K columns chunk * 256 + j * 64 + group * 32 + t * 8 + m * 4 + c * 2 + w of rows slab * 16 + r * 8 + g of a
tile of 64, nibble w * 4 + c * 2 + r, the code as stored (value + 8), and is then rotated left by 3. As many bytes as
the source has (compressed-tensors' `pack-quantized`, as kernels/int4.py reads it), and in their place. Made once, when
weights are loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

TILE, CHUNK, TOGETHER = 64, 256, 8  # rows of a tile; columns of a chunk; experts that are packed at a time


class Ordered(NamedTuple):
    """One matrix [M, K] of every expert."""

    words: torch.Tensor  # [E, M / 64, K / 256, 2048] int32
    scales: torch.Tensor  # [E, M / 64, K / 256, 256] int32


def pack_gate_up(words: torch.Tensor, scales: torch.Tensor) -> Ordered:
    """words [E, 2 I, H / 8], scales [E, 2 I, H / 32] bfloat16, gate's rows first: a slab is 8 of gate and 8 of up."""
    rows = torch.arange(words.shape[1], device=words.device)
    half = words.shape[1] // 2
    return pack(words, scales, rows // 8 % 2 * half + rows // 16 * 8 + rows % 8)


def pack_down(words: torch.Tensor, scales: torch.Tensor) -> Ordered:
    """words [E, H, I / 8], scales [E, H, I / 32] bfloat16: a thread has rows 2 g and 2 g + 1, neighbours."""
    rows = torch.arange(words.shape[1], device=words.device)
    return pack(words, scales, rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2)


def pack(words: torch.Tensor, scales: torch.Tensor, source: torch.Tensor) -> Ordered:
    """`source` [M]: which row stands at a place. In place: the memory holds the new order afterwards.

    ValueError names what does not fit.
    """
    experts, m, k = words.shape[0], words.shape[1], words.shape[2] * 8
    if m % TILE or k % CHUNK:
        raise ValueError(f"words are of {m} rows of {k} weights, multiples of {TILE} and {CHUNK} were expected")
    if tuple(scales.shape) != (experts, m, k // 32) or scales.dtype != torch.bfloat16 or words.dtype != torch.int32:
        raise ValueError(
            f"words {list(words.shape)} of {words.dtype} and scales {list(scales.shape)} of {scales.dtype}: int32 and "
            f"[{experts}, {m}, {k // 32}] of bfloat16 were expected"
        )
    shape = experts, m // TILE, k // CHUNK
    out = Ordered(words.view(*shape, 2048), scales.view(torch.int32).view(*shape, 256))
    for e in range(0, experts, TOGETHER):
        some = slice(e, e + TOGETHER)
        out.words[some] = _ordered_words(words[some, source]).flatten(3)
        out.scales[some] = _ordered_scales(scales[some, source]).flatten(3)
    return out


def _ordered_words(words: torch.Tensor) -> torch.Tensor:
    e, m, k = words.shape[0], words.shape[1] // TILE, words.shape[2] * 8 // CHUNK
    codes = (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)) & 15
    codes = codes.view(e, m, 4, 2, 8, k, 4, 2, 4, 2, 2, 2)  # e, tile, slab, r, g, chunk, j, group, t, m, c, w
    out = words.new_zeros(e, m, k, 4, 4, 8, 4, 2, 2)  # e, tile, chunk, j, slab, g, t, group, m
    for w in range(2):
        for c in range(2):
            for r in range(2):
                part = codes[:, :, :, r, :, :, :, :, :, :, c, w].permute(0, 1, 4, 5, 2, 3, 7, 6, 8)
                out |= part << 4 * (w * 4 + c * 2 + r)
    return (out << 3) | ((out >> 29) & 7)


def _ordered_scales(scales: torch.Tensor) -> torch.Tensor:
    e, m, k = scales.shape[0], scales.shape[1] // TILE, scales.shape[2] * 32 // CHUNK
    parts = scales.view(torch.int16).view(e, m, 4, 2, 8, k, 4, 2)  # e, tile, slab, r, g, chunk, j, group
    return parts.permute(0, 1, 5, 6, 2, 4, 7, 3).contiguous().view(torch.int32)
