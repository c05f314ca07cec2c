"""Every launcher of a GPU op refuses a tensor whose rows are not whole, by its name, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu import (
    absorb,
    add_rmsnorm,
    block_attention,
    draft_block,
    draw,
    fed_step,
    grouped_convolution,
    int4_moe,
    kv_compact,
    kv_write,
    linear,
    moe_many_tiles,
    moe_tiles,
    pair_scores,
    plain_moe,
    rank_norm,
    rope,
    route_silu,
    router,
    row_attention,
    row_layout,
    shared_combine,
    silu_mul,
    topk_logprobs,
    tree_accept,
    tree_build,
    tree_mask,
    tree_pairs,
)
from kernels.gpu.int4_moe_gemm import OrderedExperts, Workspace, products
from kernels.gpu.moe_pack import Ordered
from kernels.sample import Law
from tests.gpu_compile import launches

R, H, E, K = 4, 64, 8, 2
HALF = torch.bfloat16
LAWS = draw.Laws.of([Law(1.0, 0, 1.0, 0.0, 0, 0, 0)], "cpu")


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def floats(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=of)


def attention() -> dict[str, Any]:
    return {
        "q": floats(8, 2, 32, of=HALF), "own": floats(8, 2, 1, 32, of=HALF), "pool": floats(128, 2, 1, 32, of=HALF),
        "pages": ints(1, 2), "start": ints(1), "end": ints(1), "anchor": ints(1), "out": floats(8, 2, 32, of=HALF),
        "window": None, "causal": False,
    }  # fmt: skip


def experts(of: torch.dtype) -> dict[str, Any]:
    return {
        "x": floats(R, 128, of=of), "weights": floats(R, K), "pairs": ints(E, R), "counts": ints(E),
        "hidden": floats(R * K, 128, of=of), "partials": floats(R, K, 128),
    }  # fmt: skip


# An op, its arguments, and those whose rows may lie apart.
CASES: dict[str, tuple[Callable[..., object], dict[str, Any], set[str]]] = {
    "absorb": (absorb.absorb, {
        "query": floats(R, 2, 48, of=HALF), "w": floats(2, 64, 32, of=HALF), "position": ints(R), "cos": floats(9, 8),
        "sin": floats(9, 8), "out": floats(R, 2, 80, of=HALF), "scale": 1.0,
    }, set()),
    "add_rmsnorm": (add_rmsnorm.add_rmsnorm, {
        "x": floats(R, H), "w": floats(H), "out": floats(R, H), "eps": 1e-6, "delta": floats(R, H),
        "partials": floats(R, K, H), "tap": floats(R, H), "tokens": ints(R), "table": floats(9, H),
    }, set()),
    "block_attention": (block_attention.block_attention, attention(), set()),
    "draft_attention": (draft_block.draft_attention, attention(), set()),
    "draft_rows": (draft_block.draft_rows, {
        "a": floats(R, 128), "norms": floats(3, 32), "eps": 1e-6, "position": ints(R), "slot": ints(R),
        "cos": floats(9, 16), "sin": floats(9, 16), "q": floats(R, 2, 32), "kv": floats(64, 2, 1, 32),
    }, set()),
    "draw": (draw.draw, {
        "logits": floats(R, H), "depth": ints(R), "row_start": ints(2), "laws": LAWS,
    }, set()),
    "pick": (fed_step.pick, {"features": floats(R, H), "source": ints(R), "out": floats(R, H)}, set()),
    "grouped_convolution": (grouped_convolution.grouped_convolution, {
        "x": floats(8, H), "base": floats(2, 2, H), "dynamic": floats(1, 8, 16), "out": floats(8, H),
        "block": 8, "side": 0,
    }, set()),
    "kv_compact": (kv_compact.kv_compact, {
        "cache": floats(2, 64, 32), "slots": ints(R), "row_start": ints(2), "path": ints(1, 4), "length": ints(1),
    }, {"length"}),
    "kv_write": (kv_write.kv_write, {"cache": floats(64, 32), "slots": ints(R).long(), "values": floats(R, 32)}, set()),
    "linear": (linear.linear, {"x": floats(R, 1, H), "w": floats(1, 32, H), "out": floats(R, 1, 32)}, set()),
    "linear_parts": (linear.linear_parts, {"x": floats(R, H), "w": floats(32, H), "room": floats(R * 32)}, set()),
    "mla_inputs": (rope.mla_inputs, {
        "a": floats(R, 112), "q_norm": floats(32), "kv_norm": floats(64), "eps": 1e-6, "position": ints(R),
        "slot": ints(R), "cos": floats(9, 8), "sin": floats(9, 8), "cache": floats(64, 80), "out": floats(R, 32),
    }, set()),
    "pair_scores": (pair_scores.pair_scores, {
        "logprobs": floats(2, 3, 4), "tokens": ints(2, 3, 4), "state": floats(2, 3, 16), "anchors": ints(2),
        "caps": ints(2), "predecessor": floats(9, 16), "successor": floats(9, 16),
    }, {"anchors"}),
    "plain_moe": (plain_moe.plain_moe, experts(HALF) | {
        "gate_up": (floats(E, 256, 128, of=HALF), None), "down": (floats(E, 128, 128, of=HALF), None),
    }, set()),
    "int4_moe": (int4_moe.int4_moe, experts(HALF) | {
        "gate_up": (ints(E, 256, 16), floats(E, 256, 4)), "down": (ints(E, 128, 16), floats(E, 128, 4)),
    }, set()),
    "rank_norm": (rank_norm.rank_norm, {
        "x": floats(R, H), "parts": floats(2, R, H), "w": floats(H), "out": floats(R, H), "eps": 1e-6,
        "tap": floats(R, H),
    }, set()),
    "rank_part": (rank_norm.rank_part, {
        "delta": floats(R, H), "partials": floats(R, K, H), "out": floats(R, H),
    }, set()),
    "route": (router.route, {
        "logits": floats(R, E), "bias": floats(E), "slot": ints(R), "chosen": ints(R, K), "weights": floats(R, K),
        "normalise": True, "scale": 1.0,
    }, set()),
    "route_silu": (route_silu.route_silu, {
        "logits": floats(R, E), "bias": floats(E), "slot": ints(R), "chosen": ints(R, K), "weights": floats(R, K),
        "normalise": True, "scale": 1.0, "a": floats(R, 2 * H), "out": floats(R, H),
    }, set()),
    "shared_combine": (shared_combine.combine_with_shared, {
        "act": floats(R, 256, of=HALF), "w": floats(128, 256, of=HALF), "y": floats(8 * R, 128, of=HALF),
        "weights": floats(R, 8), "chosen": ints(R, 8), "out": floats(R, 128),
    }, set()),
    "expert_lists": (router.expert_lists, {"chosen": ints(R, K), "pairs": ints(E, R), "counts": ints(E)}, set()),
    "expert_tiles": (moe_tiles.expert_tiles, {
        "chosen": ints(R, K), "experts": E, "capacity": 4, "tiles": moe_tiles.Tiles(ints(8), ints(8, 16), ints(1)),
    }, set()),
    "many_tiles": (moe_many_tiles.many_tiles, {
        "chosen": ints(R, K), "experts": E, "counts": ints(2, 16),
        "tiles": moe_tiles.Tiles(ints(R * K), ints(R * K, 64), ints(1)),
    }, set()),
    "silu_mul": (silu_mul.silu_mul, {"a": floats(R, 2 * H), "out": floats(R, H)}, set()),
    "topk_logprobs": (topk_logprobs.topk_logprobs, {"logits": floats(2, 3, H), "k": 4}, set()),
    "tree_accept": (tree_accept.tree_accept, {
        "logits": floats(R, H), "parents": ints(R), "tokens": ints(R), "depth": ints(R), "mask": ints(R).long(),
        "row_start": ints(2), "laws": LAWS, "deepest": 4,
    }, set()),
    "tree_build": (tree_build.tree_build, {
        "logprobs": floats(2, 3, 8), "tokens": ints(2, 3, 8), "budgets": ints(2), "caps": ints(2), "nodes": 8,
    }, set()),
    "tree_mask": (tree_mask.tree_mask, {"parents": ints(R), "row_start": ints(2)}, set()),
    "tree_pairs": (tree_pairs.tree_pairs, {
        "logprobs": floats(2, 3, 4, 4), "choice": ints(2, 3, 4, 4), "tokens": ints(2, 3, 4), "budgets": ints(2),
        "nodes": 8,
    }, set()),
    "row_attention": (row_attention.row_attention, {
        "q": floats(R, 2, 80), "cache": floats(64, 80), "position": ints(R), "shared": ints(R), "seq": ints(R),
        "pages": ints(1, 2), "path": ints(R, 64), "out": floats(R, 2, 64), "scale": 1.0,
    }, set()),
    "row_layout": (row_layout.row_layout, {
        "parents": ints(R), "seq": ints(R), "first": ints(2), "prefix": ints(2), "chain": ints(2), "pages": ints(2, 2),
        "position": ints(R), "slot": ints(R), "shared": ints(R), "path": ints(R, 64),
    }, set()),
}  # fmt: skip


def strided() -> Iterator[Any]:
    for op, (_, arguments, apart) in CASES.items():
        for name, value in arguments.items():
            parts = value if isinstance(value, tuple) else (value,)
            for at, part in enumerate(parts):
                if isinstance(part, torch.Tensor) and part.numel() > 1 and name not in apart:
                    yield pytest.param(op, name, at, id=f"{op}-{name}-{at}")


@pytest.mark.parametrize("op", CASES)
def test_what_is_whole_is_launched(op: str) -> None:
    run, arguments, _ = CASES[op]
    assert launches(lambda: run(**arguments))


@pytest.mark.parametrize(("op", "name", "at"), [*strided()])
def test_a_strided_tensor_is_refused_by_name(op: str, name: str, at: int) -> None:
    run, arguments, _ = CASES[op]
    given = arguments[name]
    part = given[at] if isinstance(given, tuple) else given
    apart: Any = torch.stack([part, part], -1)[..., 0]
    if isinstance(given, tuple):
        parts = [apart if i == at else one for i, one in enumerate(given)]
        apart = type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
    told = given._fields[at] if hasattr(given, "_fields") else name
    with pytest.raises(ValueError, match=told):
        launches(lambda: run(**arguments | {name: apart}))


@pytest.mark.parametrize(("rows", "more"), [(4, False), (48, False), (16, True)])
def test_a_shared_product_that_has_no_launch_is_refused(rows: int, more: bool) -> None:
    """It was left out without a word for rows whose pairs are their own tiles."""
    kind: Any = {"device": "meta", "dtype": torch.bfloat16}
    words, scales = (
        torch.empty(384, 8, 28, 2048, device="meta").int(),
        torch.empty(384, 8, 28, 256, device="meta").int(),
    )
    down = torch.empty(384, 112, 1, 2048, device="meta").int(), torch.empty(384, 112, 1, 256, device="meta").int()
    experts = OrderedExperts(Ordered(words, scales), Ordered(*down))
    space = Workspace(64, 384, "meta")
    x, out = torch.empty(rows, 7168, **kind), torch.empty(rows, 7168, **kind)
    chosen, weights = torch.zeros(rows, 8, device="meta").int(), torch.empty(rows, 8, device="meta")
    tiles = moe_tiles.Tiles(chosen.view(-1), chosen, chosen[:1, 0])
    shared = torch.empty(rows, 256, **kind), torch.empty(7168, 256, **kind)
    with pytest.raises(ValueError, match=f"^shared is given with {rows} rows and base {more}"):
        products(x, chosen, weights, experts, tiles, space, out, out if more else None, shared=shared)
