"""What bench.rank_step measures is the engine's model: the same bits, with routing that is told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.rank_floor import dense_bytes, distinct, expert_bytes, least, routing
from bench.rank_model import COMMON, GREEDY, Drawn, RankModel, rank_config, rank_sizes
from bench.rank_pair import slower
from bench.rank_profile import Event, classified
from hedgerow.model.batch import SequenceRows
from hedgerow.model.config import K2Config
from hedgerow.model.cuda import CudaK2
from hedgerow.model.cuda_plan import Fields, Shape
from hedgerow.model.cuda_step import CudaStep, Gated
from hedgerow.model.cuda_weights import Reader
from hedgerow.model.loader import Checkpoint
from hedgerow.model.memory import weights
from hedgerow.model.tensors import Share
from kernels.gpu import linear_activated, linear_normed
from kernels.tree_accept import WalkRows
from tests.tiny import TinyDrafter, TinyTarget, write_tiny

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
PARENTS = (-1, 0, 0, 1)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of divisions by a weight of 0
]


class Noted(CudaK2):
    """The engine's model, which keeps what its routers were given."""

    def __init__(self, config: K2Config, reader: Reader, feature_layers: Sequence[int]) -> None:
        self.seen = dict[int, torch.Tensor]()
        super().__init__(config, reader, feature_layers)

    def step(self, shape: Shape, fields: Fields[torch.Tensor]) -> CudaStep:
        seen = self.seen

        class Step(CudaStep):
            def choose(self, number: int, logits: torch.Tensor, bias: torch.Tensor, gated: Gated | None) -> None:
                seen[number] = logits.clone()
                super().choose(number, logits, bias, gated)

        return Step(self.config, self._weights, self.feature_layers, self.latent_eps, self._room, shape, fields)


def asked(tokens: Sequence[int]) -> tuple[list[SequenceRows], list[WalkRows]]:
    rows = [SequenceRows(0, (0,), tokens, PARENTS, range(len(PARENTS)), limit=64)]
    return rows, [WalkRows(0, PARENTS, tokens, GREEDY)]


def test_replayed_routing_gives_the_engines_bits(tmp_path: Path) -> None:
    """What its routers said, told again to the model of the bench: every logit, feature and drawn token is equal.
    Other routing has other bits, so the replayed logits do decide."""
    sizes = TinyTarget(layers=2, experts=4) if INTERPRETED else TinyTarget(layers=3, experts=16, kv_rank=128, rope=32)
    paths = write_tiny(tmp_path, sizes, TinyDrafter(feature_layers=(1, 0)))
    config, reader = K2Config.from_folder(paths.target), Reader(Checkpoint(paths.target), DEVICE, DTYPE)
    engine, bench = Noted(config, reader, (1,)), RankModel(config, reader, (1,), len(PARENTS))
    rows, trees = asked([3, 1, 4, 1])
    found = engine.verify(rows, engine.new_cache(1), trees)
    for number, logits in engine.seen.items():
        bench.told[number, : len(logits)] = logits
    cache = bench.new_cache(1)
    replayed = bench.verify(rows, cache, trees)
    assert len(engine.seen) == config.num_hidden_layers - config.first_k_dense_replace
    assert replayed.walked == found.walked
    assert torch.equal(replayed.features, found.features)
    expected = replayed.features.clone()
    bench.routing.neg_()
    assert not torch.equal(bench.verify(rows, cache, trees).features, expected)


@pytest.mark.skipif(INTERPRETED, reason="at a rank's true widths, which have forms of their own on a card")
def test_a_row_alone_has_the_same_bits_in_fewer_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms within the products behind them, of a layer that is tapped too; the activation within shared down."""
    model = RankModel(rank_config(rank_sizes(4)), Drawn(DEVICE, DTYPE), (1, 2), 1)
    model.routing.normal_()
    cache, found = model.fill(1), []
    rows, trees = [SequenceRows(9, (0,), [5], [-1], [0], limit=64)], [WalkRows(0, (-1,), [5], GREEDY)]
    for normed, activated in ((linear_normed.NORMED, linear_activated.ACTIVATED), ({}, {})):
        monkeypatch.setattr(linear_normed, "NORMED", normed)
        monkeypatch.setattr(linear_activated, "ACTIVATED", activated)
        model._passes.clear()
        found.append((model.verify(rows, cache, trees), model._room.logits[:1].clone()))
    (one, logits), (other, expected) = found
    assert torch.equal(logits, expected)
    assert torch.equal(one.features, other.features)
    assert one.walked == other.walked


def test_drawn_weights_have_every_code_and_products_of_variance_one() -> None:
    true = rank_config(rank_sizes())
    assert (true.num_attention_heads, true.moe_intermediate_size, true.vocab_size) == (8, 256, 20480)
    drawn = Drawn(DEVICE, DTYPE)
    words, scales = drawn.experts([["gate", "up"], ["gate", "up"]], 64, 128, True)
    codes = (words.unsqueeze(-1) >> (torch.arange(8, device=DEVICE) * 4)) & 15
    assert sorted(codes.unique().tolist()) == list(range(16))
    value = (codes.flatten(-2).float() - 8) * scales.float().repeat_interleave(32, -1)
    assert value.shape == (2, 128, 128)
    assert 0.8 < float(value.square().mean() * 128) < 1.3


def test_the_floor_counts_every_byte_once() -> None:
    config = rank_config(rank_sizes())
    dense, sparse = dense_bytes(config), config.num_hidden_layers - 1
    embedding = config.vocab_size * config.hidden_size * 2
    shapes = sparse * 384 * 3 * 16  # weight_shape: two numbers of 64 bits at most, which nobody reads
    assert 0 <= weights(config, 1) - dense - embedding - sparse * 384 * expert_bytes(config) <= shapes
    one = least(config, dense, 8, 1, 1, 8192)
    assert one.experts == sparse * 8 * expert_bytes(config)
    assert one.cache == 8193 * 61 * 1152
    assert one.seconds(1e12, 1e15) == pytest.approx(one.bytes / 1e12)
    assert one.seconds(1e15, 1e9) > one.flops / 1e9  # bound by operations


def test_an_overlap_leaves_fewer_distinct_experts() -> None:
    config, draw = rank_config(rank_sizes(4)), torch.Generator().manual_seed(3)
    found = [distinct(config, routing(config, 1, 16, overlap, draw, COMMON)) for overlap in (0.0, 0.5, 1.0)]
    assert found[0] == pytest.approx(384 * (1 - (1 - 8 / 384) ** 16), rel=0.05)
    assert found[0] > found[1] > found[2] == 8


def test_a_profile_tells_products_apart_by_their_place() -> None:
    """A launch's time is what it adds: the last one begins while the one before runs, and waits for it."""
    names = ["_row_layout", *["_add_rmsnorm", "_linear", "_linear", "_add_rmsnorm", "_linear"] * 2, "_add_rmsnorm"]
    events = [Event(name, 2.0 * n, 2.0) for n, name in enumerate(names)]
    events.insert(0, Event("Memcpy HtoD", -1000.0, 1.0))  # the profiler launches the graph for a millisecond
    events.append(Event("_linear", 2.0 * len(names) - 1.5, 4.0))
    found = classified(events, 2)
    assert found.classes["q_a + kv_a"] == (2, 4.0)
    assert found.classes["q_b"] == (2, 4.0)
    assert found.classes["shared gate_up + router"] == (2, 4.0)
    assert found.classes["lm_head"] == (1, 2.5)
    assert found.classes["add + norm"] == (5, 10.0)
    assert found.span == pytest.approx(2.0 * len(names) + 3.5)
    assert sum(us for _, us in found.classes.values()) == pytest.approx(found.span)


def test_a_norm_within_a_product_begins_a_block_too() -> None:
    names = ["_add_rmsnorm", "linear_held", "linear_held", "linear_normed", "linear_held", "linear_normed", "_linear"]
    found = classified([Event(name, 2.0 * n, 2.0) for n, name in enumerate(names)], 2).classes
    assert found["add + norm + shared gate_up + router"] == found["add + norm + q_a + kv_a"] == (1, 2.0)
    assert found["q_b"] == (2, 4.0)
    assert found["shared down"] == (1, 2.0)


def test_a_share_of_drawn_weights_is_a_part_and_what_all_have_is_equal() -> None:
    """Halves of divided tensors differ between ranks; norms and the router are the same on both."""
    shares = [Drawn(DEVICE, DTYPE, share=Share(rank, 2)) for rank in range(2)]
    base = "model.layers.1."
    for name, shape, part in (
        ("self_attn.q_b_proj.weight", (64, 32), (32, 32)),
        ("self_attn.o_proj.weight", (32, 64), (32, 32)),
        ("mlp.gate.weight", (8, 32), (8, 32)),
        ("input_layernorm.weight", (32,), (32,)),
    ):
        one, other = (share.dense((base + name, shape)) for share in shares)
        assert one.shape == other.shape == part
        assert torch.equal(one, other) == (part == shape), name
    names = [[f"{base}mlp.experts.{e}.{part}_proj" for part in ("gate", "up")] for e in range(3)]
    assert shares[0].experts(names, 64, 128, True)[0].shape == (3, 64, 16)
    down = [[f"{base}mlp.experts.{e}.down_proj"] for e in range(3)]
    one, other = (share.experts(down, 128, 64, True)[0] for share in shares)
    assert one.shape == (3, 128, 4)
    assert not torch.equal(one, other)


def test_of_two_ranks_the_slower_one_counts() -> None:
    reports = [{"commit": str(n), "cells": [{"ms": 1.0 + n, "rank": n}, {"ms": 5.0 - n, "rank": n}]} for n in range(2)]
    assert slower(reports) == {"commit": "0", "cells": [{"ms": 2.0, "rank": 1}, {"ms": 5.0, "rank": 0}]}
