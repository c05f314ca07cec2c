"""One process with `shards=n`: the partial sums of n ranks, added in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hedgerow.model.batch import SequenceRows
from hedgerow.model.fields import ConfigError
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import CheckpointError
from hedgerow.model.selfcheck import check_rows
from kernels.collectives import TEST_SHAPES, Ranks, ordered_sum
from kernels.linear import MIN_4
from tests.tiny import TinyTarget, write_target

WIDE = TinyTarget(expert_width=128, dense_width=256, heads=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, WIDE)
    return folder


def load(folder: Path, shards: int) -> K2Model:
    return K2Model.load(folder, (1, 2), MIN_4, ranks=Ranks(shards))


def outputs(model: K2Model, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    cache = model.new_cache(2)
    rows = SequenceRows(0, (0, 1), tokens, range(-1, len(tokens) - 1), range(len(tokens)))
    out = model.forward([rows], cache)
    return out.logits, out.features


@pytest.mark.parametrize("shape", TEST_SHAPES)
def test_a_sum_is_made_in_rank_order(shape: tuple[int, int, int]) -> None:
    parts = torch.randn(*shape) * torch.logspace(0, 6, shape[0]).view(-1, 1, 1)
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    assert torch.equal(ordered_sum(parts), total)
    if shape[0] > 2:
        assert not torch.equal(ordered_sum(parts.flip(0)), total), "an order that changes nothing is tested by nothing"


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_compute_the_model(folder: Path, shards: int) -> None:
    """Up to rounding it is the undivided model; its bits are others, and so is the name of its law."""
    one, many = load(folder, 1), load(folder, shards)
    tokens = [(7 * i + 3) % WIDE.vocab for i in range(90)]
    for whole, divided in zip(outputs(one, tokens), outputs(many, tokens), strict=True):
        torch.testing.assert_close(divided, whole, rtol=1e-4, atol=1e-4)
        assert not torch.equal(divided, whole)
    assert many.kernel_law == f"{one.kernel_law}-shards-{shards}"
    assert many.checkpoint_hash == one.checkpoint_hash


@pytest.mark.parametrize("shards", [2, 4])
def test_a_row_of_shards_depends_on_its_path_alone(folder: Path, shards: int) -> None:
    check_rows(K2Model.load(folder, (), ranks=Ranks(shards)))


def test_a_rank_holds_its_part_of_the_weights(folder: Path) -> None:
    part, whole = load(folder, 2).parts[1], load(folder, 1).parts[0]
    half = WIDE.vocab // 2
    assert torch.equal(part.embedding, whole.embedding[half:])
    attention, undivided = part.layers[1].attention, whole.layers[1].attention
    heads = len(undivided.uk) // 2
    assert torch.equal(attention.uk, undivided.uk[heads:])
    assert torch.equal(attention.o, undivided.o[len(undivided.o) // 2 :])
    assert torch.equal(attention.qkv_a, undivided.qkv_a)
    experts, all_of_them = part.layers[1].mlp.experts, whole.layers[1].mlp.experts  # type: ignore[union-attr]
    width = all_of_them.down.shape[1]
    assert torch.equal(experts.down, all_of_them.down[:, width // 2 :])
    columns = [*range(width // 2, width), *range(width + width // 2, 2 * width)]
    assert torch.equal(experts.gate_up, all_of_them.gate_up[:, :, columns])


def test_what_does_not_divide_is_refused_before_loading(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("hedgerow.model.k2.Shard.load", never)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: \[512, 64\] .*rows that 3 ranks can"):
        load(folder, 3)
    write_target(tmp_path / "experts", TinyTarget(expert_width=128, dense_width=256, heads=8))
    with pytest.raises(CheckpointError, match=r"weight_packed: \[64, 16\] .*columns that 8 ranks can"):
        load(tmp_path / "experts", 8)
    write_target(tmp_path, TinyTarget(expert_width=128, dense_width=96))
    with pytest.raises(ConfigError, match=r"config.json: intermediate_size: 96 .* a multiple of 64 for 2 ranks"):
        load(tmp_path, 2)


def test_heads_that_do_not_divide_are_refused_with_the_tensor(tmp_path: Path) -> None:
    write_target(tmp_path, TinyTarget(expert_width=256, dense_width=256, heads=4))
    with pytest.raises(CheckpointError, match=r"q_b_proj.weight.*8 ranks"):
        load(tmp_path, 8)
