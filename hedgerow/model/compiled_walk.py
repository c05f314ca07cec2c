"""Draws and walks on the compiled CPU engine (kernels/cpu/walk.c), in one call a step.

The law is that of kernels/sample.py. Exponentials and logarithms round by code of the engine's own, the same on every
machine, so a token is PyTorch's but where two candidates are nearer to each other than that rounding: it belongs to the
engine's `kernel_law`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int32, sizeof
from struct import Struct

import torch

from kernels.cpu.library import Library, Walk
from kernels.sample import Law
from kernels.tree_accept import Walked, WalkRows

BAD_LOGITS = 31
MOST_TOP_K = 1 << 30  # above any vocabulary, and within C's int
# walk.h's Walk, field by field: a step has little time for ctypes, and finds nothing of Python's in the caches
WALK = Struct("=QdffiIIiii")
assert WALK.size == sizeof(Walk)


class Walker:
    """`walk_trees` for one model's logits. Its room is its own: calls must take turns."""

    def __init__(self, library: Library, vocabulary: int) -> None:
        self._walk, self.vocabulary = library.functions.walk_trees, vocabulary
        self._room = torch.empty(2, vocabulary)
        self._room_at = self._room.data_ptr()

    def __call__(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
        """As `kernels.tree_accept.walk_trees`; ValueError also for rows that are not there."""
        count, vocabulary = logits.shape
        if vocabulary != self.vocabulary or logits.dtype != torch.float32:
            raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype}, {self.vocabulary} float32 were expected")
        if not logits.is_contiguous():
            logits = logits.contiguous()
        walks, words = [], array("i")
        for first, parents, tokens, law in trees:
            rows = len(parents)
            if len(tokens) != rows:
                raise ValueError(f"{rows} parents and {len(tokens)} tokens")
            walks.append(_packed(law, first, rows))
            words.extend(parents)
            words.extend(tokens)
        out, bad = array("i", bytes(2 * len(words) + 8 * len(trees))), c_int32()
        code = self._walk(
            logits.data_ptr(), count, vocabulary, len(trees), b"".join(walks), words.buffer_info()[0],
            self._room_at, out.buffer_info()[0], bad,
        )  # fmt: skip
        if code:
            raise ValueError(
                f"row {bad.value} has no largest finite logit"
                if code == BAD_LOGITS
                else f"tree {bad.value}: no such rows"
            )
        return list(_walked(out, trees))


def _packed(law: Law, first: int, rows: int) -> bytes:
    top_k = min(law.top_k, MOST_TOP_K)
    return WALK.pack(
        law.seed, law.top_p, law.temperature, law.min_p, top_k, law.sample_index, law.position, first, rows, 0
    )


def _walked(out: array[int], trees: Sequence[WalkRows]) -> list[Walked]:
    walked, at = [], 0
    for tree in trees:
        walked.append(Walked(out[at + 2 : at + 2 + out[at]].tolist(), out[at + 1]))
        at += 2 + len(tree.parents)
    return walked
