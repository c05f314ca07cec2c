"""Compiles the kernels of trees, draws and cache moves at K2.6's shapes: python -m tests.gpu_compile_trees 90"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from kernels.gpu import block_attention, draw, kv_compact, kv_write, topk_logprobs, tree_accept, tree_build, tree_mask
from kernels.gpu.fed_step import Contexts, Places, Rows, follow_on, pack, pick
from kernels.sample import Law
from tests.gpu_compile import compiled


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def block(heads: int, groups: int, width: int, window: int | None) -> Callable[[], object]:
    """A drafter's attention, one sequence of 8,192 positions."""
    half = torch.bfloat16
    q, own = torch.zeros(8, heads, width, dtype=half), torch.zeros(8, 2, groups, width, dtype=half)
    pool = torch.zeros(64, 2, groups, width, dtype=half)
    return lambda: block_attention.block_attention(
        q, own, pool, ints(1, 128), ints(1), ints(1), ints(1), torch.empty_like(q), window, False
    )


def fed(sequences: int, nodes: int) -> list[Callable[[], object]]:
    """What stands between a draft, its verification and the next draft."""
    one, block, rows = ints(sequences), ints(sequences * 8), ints(sequences * (nodes + 1))
    places, made = Places(*[one] * 5), Rows(rows, rows, rows, one, ints(sequences + 1))
    contexts = Contexts(block, block, one, one, one, one, ints(sequences, 65), block, block, block)
    return [
        lambda: pack(ints(sequences, 3 * nodes + 1), places, one, made, 163840),
        lambda: pack(None, places, one, made, 163840),
        lambda: follow_on(ints(sequences, 66), ints(sequences + 1), places, contexts, ints(sequences, 10)),
        lambda: pick(torch.zeros(64, 43008), block, torch.zeros(sequences * 8, 43008)),
    ]


def calls() -> list[Callable[[], object]]:
    laws = draw.Laws.of([Law(1.0, 50, 0.95, 0.02, 1, 0, 0)] * 8, "cpu")
    rows, starts, masks = ints(128), ints(9), torch.zeros(128, dtype=torch.int64)
    cache = torch.zeros(61, 128, 576, dtype=torch.bfloat16)
    return [
        lambda: topk_logprobs.topk_logprobs(torch.zeros(8, 7, 20480), 63),
        lambda: tree_build.tree_build(torch.zeros(64, 7, 63), ints(64, 7, 63), ints(64), ints(64), 63),
        lambda: tree_mask.tree_mask(rows, starts),
        lambda: tree_accept.tree_accept(torch.zeros(128, 20480), rows, rows, rows, masks, starts, laws, 64),
        lambda: kv_write.kv_write(cache, masks, torch.zeros(128, 576, dtype=torch.bfloat16)),
        lambda: kv_compact.kv_compact(cache, masks, ints(3), ints(2, 16), ints(2)),
        block(6, 2, 64, 256),  # the bundled drafter
        block(8, 1, 128, None),  # K2.6's, a rank of eight
        *fed(32, 16),
    ]


if __name__ == "__main__":
    capability = int(sys.argv[1])
    spilled = 0 if capability == 90 else 128  # bytes, where nothing was tuned: a few values outside of the loops
    built = [kernel for call in calls() for kernel in compiled(call, capability, spilled)]
    for one in built:
        print(
            f"{one.name}: {one.registers} registers, {one.shared} bytes shared, {sum(one.instructions.values())} long"
        )
    print(f"{len(built)} kernels")
