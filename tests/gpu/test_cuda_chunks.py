"""A prompt's keys on a GPU: the same bits in chunks of any size, alone and beside rows of output, in any pages."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.model.batch import SequenceRows
from hedgerow.model.config import K2Config
from hedgerow.model.cuda import CudaK2
from hedgerow.model.cuda_cache import CudaCache
from hedgerow.model.cuda_weights import Reader
from hedgerow.model.loader import Checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SAPLING, LENGTH = Path("models/sapling"), 8200  # longer than the bundled model's own context
PAGES = -(-LENGTH // 64)
BESIDE = 70  # tokens that each of the two other sequences has


@pytest.fixture(scope="module")
def model() -> CudaK2:
    config = replace(K2Config.from_folder(SAPLING), max_position_embeddings=LENGTH + 64)
    reader = Reader(Checkpoint(SAPLING), torch.device("cuda"), torch.bfloat16)
    return CudaK2(config, reader, (1, 4, 7))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    choose = random.Random(3)
    return [choose.randrange(3800) for _ in range(LENGTH)]


class Computed:
    """A prompt that went through in chunks of the given sizes, in turns; the last one may be cut."""

    def __init__(
        self, model: CudaK2, prompt: list[int], chunks: list[int], beside: bool = False, seed: int = 0
    ) -> None:
        choose = random.Random(seed)
        self.cache = model.new_cache(PAGES + 4)
        order = choose.sample(range(PAGES + 4), PAGES + 4)
        self.pages, self.others = order[:PAGES], (order[PAGES : PAGES + 2], order[PAGES + 2 :])
        for n, pages in enumerate(self.others if beside else ()):
            rows = SequenceRows(0, pages, prompt[n : n + BESIDE], range(-1, BESIDE - 1), [], True)
            model.forward([rows], self.cache)
        done = step = 0
        while done < len(prompt):
            count = min(chunks[step % len(chunks)], len(prompt) - done)
            own = SequenceRows(
                done, self.pages, prompt[done : done + count], range(-1, count - 1), [count - 1], prompt=True
            )
            out = model.forward([*(self.output(step) if beside else ()), own], self.cache)
            done, step = done + count, step + 1
        self.last = out.logits[-1].clone()  # waits: the device does one thing after the other
        self.latents = latents(self.cache, self.pages, len(prompt))

    def output(self, step: int) -> list[SequenceRows]:
        """A plain row of one sequence, a tree of another, at the same place again and again."""
        plain, tree = self.others
        return [
            SequenceRows(BESIDE, plain, [step % 3000], [-1], [0]),
            SequenceRows(BESIDE, tree, [(step + n) % 3000 for n in range(8)], [-1, 0, 0, 1, 2, 2, 3, 4], range(8)),
        ]


def latents(cache: CudaCache, pages: list[int], count: int) -> torch.Tensor:
    """[layers, count, width] on the device, in the order of positions."""
    at = torch.arange(count, device="cuda")
    slots = torch.tensor(pages, device="cuda")[at // 64] * 64 + at % 64 + cache.base * 64
    return cache.arena.data[:, slots].view(torch.int16)


@pytest.fixture(scope="module")
def whole(model: CudaK2, prompt: list[int]) -> Computed:
    """In one chunk of 8,192, and the eight rows that are left."""
    return Computed(model, prompt, [8192])


CASES = {
    "1": ([1], False),
    "17": ([17], False),
    "512": ([512], False),
    "2048": ([2048], False),
    "17 beside output": ([17], True),
    "512 beside output": ([512], True),
    "2048 beside output": ([2048], True),
    "any, beside output": ([1, 300, 17, 64, 2048, 63, 65, 512], True),
}


@pytest.mark.parametrize("case", CASES)
def test_chunks_leave_the_same_keys(model: CudaK2, prompt: list[int], whole: Computed, case: str) -> None:
    chunks, beside = CASES[case]
    got = Computed(model, prompt, chunks, beside, seed=len(case))
    differ = int((got.latents != whole.latents).sum())
    assert differ == 0, f"{differ} of {whole.latents.numel()} numbers differ"
    assert torch.equal(got.last.view(torch.int32), whole.last.view(torch.int32))


def test_other_tokens_are_other_keys(model: CudaK2, prompt: list[int], whole: Computed) -> None:
    """What the comparison would see: one token changed, far from the end."""
    other = [*prompt[:100], prompt[100] + 1, *prompt[101:]]
    got = Computed(model, other, [2048])
    same = (got.latents == whole.latents).all(2)
    assert same[:, :100].all()
    assert not same[1:, 100].any()
    assert not same[:, 101:].all()
