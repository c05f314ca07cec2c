"""The target divided among ranks on GPUs. One process that computes all ranks is the reference: against PyTorch's
shards, and processes of a rank each against it. Under Triton's interpreter: a tiny one, its processes over gloo.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.model.batch import SequenceRows
from hedgerow.model.cuda_ranked import RankedK2
from hedgerow.model.headers import CheckpointError
from hedgerow.model.k2 import K2Model
from hedgerow.model.selfcheck import plain_logits, tree_logits
from kernels.collectives import Ranks
from tests.cuda_rank import TAPS, run, steps
from tests.gpu.test_cuda_k2 import BITS, close, pytestmark
from tests.tiny import TinyTarget, write_target

__all__ = ["pytestmark"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TWO = pytest.mark.skipif(not INTERPRETED and torch.cuda.device_count() < 2, reason="needs two CUDA devices")
TREE = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not INTERPRETED:
        return Path("models/sapling")
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, TinyTarget(layers=2, experts=4, expert_width=64, dense_width=128))
    return folder


def prompt(length: int) -> list[int]:
    return [(7 * i + 3) % 256 for i in range(length)]


def test_two_shards_are_what_pytorchs_two_are(folder: Path) -> None:
    asked = prompt(6 if INTERPRETED else 70), TREE, [6 if INTERPRETED else 70]
    model = RankedK2.of(folder, TAPS, DEVICE, Ranks(2), DTYPE)
    close(tree_logits(model, *asked), tree_logits(K2Model.load(folder, TAPS, ranks=Ranks(2)), *asked))
    assert model.shards == 2
    assert model.kernel_law.endswith("-shards-2")


@BITS
def test_rows_have_bits_of_their_own(folder: Path) -> None:
    model, asked, deepest = RankedK2.of(folder, TAPS, DEVICE, Ranks(2), DTYPE), prompt(70), [0, 1, 3, 5, 6, 8]
    whole = tree_logits(model, asked, TREE, [70])
    assert torch.equal(tree_logits(model, asked, TREE, [1, 17, 52]), whole)
    assert torch.equal(plain_logits(model, asked, [TREE[row] for row in deepest]), whole[deepest])


@BITS
def test_another_number_of_shards_has_other_bits(folder: Path) -> None:
    """What `shards` in the fingerprint is for; and the sum over ranks is not left out."""
    asked = prompt(70), TREE, [70]
    one, two = (tree_logits(RankedK2.of(folder, TAPS, DEVICE, Ranks(n), DTYPE), *asked) for n in (1, 2))
    assert not torch.equal(one, two)
    close(two, one.cpu())


@TWO
@pytest.mark.timeout(240)
@pytest.mark.parametrize("direct", [False] if INTERPRETED else [True, False])
def test_processes_have_the_bits_of_one(folder: Path, tmp_path: Path, direct: bool) -> None:
    """Logits, features, drawn paths and every latent, in steps that are graphs; over the ranks' own memory, and over
    NCCL without peer access, which has no sum of its own."""
    model = RankedK2.of(folder, TAPS, DEVICE, Ranks(2), DTYPE)
    expected = steps(model, 4, 1) if INTERPRETED else steps(model)
    assert max(len(part) for part in expected if part.dtype == torch.int64) > 1
    for rank, found in enumerate(run("gloo" if INTERPRETED else "nccl", folder, 2, direct, tmp_path)):
        assert len(found) == len(expected)
        for n, (there, here) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(there, here), f"rank {rank}, result {n}"


def test_what_ranks_cannot_share_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="that 3 ranks can share"):
        RankedK2.of(folder, TAPS, DEVICE, Ranks(3), DTYPE)


@BITS
def test_more_rows_than_before_get_more_room(folder: Path) -> None:
    model = RankedK2.of(folder, TAPS, DEVICE, Ranks(2), DTYPE)
    cache = model.new_cache(12)
    chunk = [SequenceRows(0, range(10), prompt(600), range(-1, 599), [599], True)]
    first = model.forward(chunk, cache).logits.clone()
    other = RankedK2.of(folder, TAPS, DEVICE, Ranks(2), DTYPE)
    parts, cache = prompt(600), other.new_cache(12)
    other.forward([SequenceRows(0, range(10), parts[:300], range(-1, 299), [], True)], cache)
    rest = SequenceRows(300, range(10), parts[300:], range(-1, 299), [299], True)
    assert torch.equal(other.forward([rest], cache).logits, first)


def test_parts_that_are_gathered_have_the_same_bits(folder: Path) -> None:
    """What a group turns to where the memory of others gives other bits; steps that were captured are made anew."""
    model, asked = RankedK2.of(folder, TAPS, DEVICE, Ranks(2), DTYPE), (prompt(4), TREE, [4])
    before = tree_logits(model, *asked)
    model.gather()
    assert not model.direct
    assert torch.equal(tree_logits(model, *asked), before)
