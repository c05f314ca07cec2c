"""Edges of a step on a GPU: rejected rows poisoned, no row accepted, the context's last position, pools past 2^31."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.drive import plain
from hedgerow.engine.types import Sampling
from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import SequenceRows
from hedgerow.model.cuda import CudaK2
from kernels.gpu import block_attention, draft_block, rope
from kernels.sample import Law
from kernels.tree_accept import WalkRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
TOKENS = 40
LONGEST = 2**31


@pytest.fixture(scope="module")
def model() -> CudaK2:
    return CudaK2.load(Path("models/sapling"), (1, 4, 7), CUDA)


class Session:
    """One sequence: what plain decoding makes of it, and trees that hold some of that, or none."""

    def __init__(self, model: CudaK2, length: int, pages: list[int]) -> None:
        choose = random.Random(length)
        self.prompt, self.pages = [choose.randrange(3000) for _ in range(length)], pages
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        self.truth = plain(model, self.prompt, sampling, frozenset())
        self.output, self.limit = self.truth[:1], length + TOKENS

    @property
    def cached(self) -> int:
        """Positions before the anchor's."""
        return len(self.prompt) + len(self.output) - 1

    def tree(self, agrees: bool) -> SequenceRows:
        """Wrong tokens beside the true ones of three levels, or wrong ones alone."""
        next = self.truth[len(self.output) :][:3]
        tokens, parents, last = [self.output[-1]], [-1], 0
        for true in next:
            for token in ((true + 1) % 3000, true if agrees else (true + 2) % 3000):
                tokens.append(token)
                parents.append(last)
            last = len(tokens) - 1
        return SequenceRows(self.cached, self.pages, tokens, parents, range(len(tokens)), limit=self.limit)

    def slots(self, begin: int, end: int) -> list[int]:
        return [self.pages[at // 64] * 64 + at % 64 for at in range(begin, end)]


def test_what_was_rejected_may_hold_anything(model: CudaK2) -> None:
    """Prompts that end before, at and behind a page's border, in one batch; after each step every slot behind what was
    accepted is NaN. In every third step no request has a node accepted. Tokens and keys are those of plain decoding."""
    cache = model.new_cache(9)
    sessions = [Session(model, n, pages) for n, pages in ((5, [8, 0]), (63, [2, 7]), (64, [1, 5]))]
    for one in sessions:
        rows = SequenceRows(0, one.pages, one.prompt, range(-1, len(one.prompt) - 1), [], True)
        model.forward([rows], cache)
    accepted = set[int]()
    for step in range(TOKENS):
        left = [one for one in sessions if len(one.output) < TOKENS]
        if not left:
            break
        parts = [one.tree(agrees=step % 3 > 0) for one in left]
        first, walks = 0, list[WalkRows]()
        for part in parts:
            walks.append(WalkRows(first, part.parents, part.tokens, Law(0.0, 0, 1.0, 0.0, 0, 0, 0)))
            first += len(part.tokens)
        for one, part, walked in zip(left, parts, model.verify(parts, cache, walks).walked, strict=True):
            assert (len(walked.path) == 1) is (step % 3 == 0 or len(part.tokens) == 1)
            new = [*(part.tokens[row] for row in walked.path[1:]), walked.bonus]
            one.output = [*one.output, *new][:TOKENS]
            accepted.add(len(walked.path))
            behind = [cache.base * 64 + slot for slot in one.slots(one.cached, len(one.pages) * 64)]
            with torch.inference_mode():
                cache.arena.data[:, behind] = torch.nan
    assert accepted >= {1, 4}
    for one in sessions:
        assert one.output == one.truth
        got = cache.read(one.slots(0, one.cached))
        fresh = model.new_cache(2)
        for at in (0, *range(len(one.prompt), one.cached)):
            tokens = one.prompt if not at else [one.truth[at - len(one.prompt)]]
            chain = range(-1, len(tokens) - 1)
            model.forward([SequenceRows(at, (0, 1), tokens, chain, [], not at, one.limit)], fresh)
        wanted = fresh.read(range(one.cached))
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


def test_the_last_positions_of_the_context(model: CudaK2) -> None:
    """A chain up to the last one, beside a short sequence, has the bits of its rows one by one; none comes after it."""
    positions, rows = model.positions, 5
    pages = list(range(positions // 64 + 1, 0, -1))
    cache, choose = model.new_cache(len(pages) + 1), random.Random(1)
    tokens = [choose.randrange(3000) for _ in range(positions)]
    begin = positions - rows
    for at in range(0, begin, 256):
        part = tokens[at : min(at + 256, begin)]
        model.forward([SequenceRows(at, pages, part, range(-1, len(part) - 1), [], True)], cache)
    last = tokens[begin:]
    chain = SequenceRows(begin, pages, last, range(-1, rows - 1), range(rows))
    short = SequenceRows(0, (0,), [7], [-1], [0])
    together = model.forward([short, chain], cache).logits[1 : rows + 1].clone()
    model.device.wait()
    for n, token in enumerate(last):
        alone = model.forward([SequenceRows(begin + n, pages, [token], [-1], [0])], cache).logits[0].clone()
        assert torch.equal(alone, together[n]), begin + n
    fork = SequenceRows(positions - 2, pages, [1, 2, 3, 4], [-1, 0, 0, 0], range(4))
    assert model.forward([fork], cache).logits.isfinite().all(), "slots behind the last position, at its depth"
    for prefix, count in ((positions, 1), (positions - 1, 2), (begin, rows + 1)):
        with pytest.raises(InvalidRequest, match="prefix"):
            model.forward([SequenceRows(prefix, pages, [1] * count, range(-1, count - 1), [0])], cache)


def rand(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(of)


def test_a_latent_pool_past_two_to_the_31_elements() -> None:
    q, latent, turned = 96, 512, 64
    a, angle = rand(3, q + latent + turned, of=torch.float32), rand(9, turned // 2, of=torch.float32)
    given = a, rand(q), rand(latent), 1e-5, torch.tensor([1, 5, 8], dtype=torch.int32, device=CUDA)
    far = LONGEST // (latent + turned) + 7
    pool, near = torch.zeros(far + 64, latent + turned, dtype=torch.bfloat16, device=CUDA), rand(64, latent + turned)
    for cache, base in ((near, 0), (pool, far)):
        slots = torch.tensor([base + 3, base, base + 63], dtype=torch.int32, device=CUDA)
        rope.mla_inputs(*given, slots, angle.cos(), angle.sin(), cache, torch.empty(3, q, device=CUDA).bfloat16())
    some = torch.tensor([0, 3, 63], device=CUDA)
    assert torch.equal(pool[far + some], near[some])
    assert int(pool.any(1).sum()) == 3


def test_a_drafters_pool_past_two_to_the_31_elements() -> None:
    """Rows are written there, and read by both attentions."""
    heads, groups, width, block, length = 6, 2, 64, 8, 600
    few = -(-length // 64)
    far = LONGEST // (2 * groups * width * 64) + 1  # pages before
    a, norms = rand(length, 2 * groups * width, of=torch.float32), rand(groups, width)
    angle = rand(length, width // 2, of=torch.float32)
    places = torch.arange(length, dtype=torch.int32, device=CUDA)
    q, own = rand(block, heads, width), rand(block, 2, groups, width)
    bounds = [torch.tensor([at], dtype=torch.int32, device=CUDA) for at in (0, length, length)]
    found = []
    for base in (0, far):
        pool = torch.empty((base + few) * 64, 2, groups, width, dtype=torch.bfloat16, device=CUDA)
        pool[base * 64 :] = torch.nan
        draft_block.draft_rows(a, norms, 1e-5, places, places + base * 64, angle.cos(), angle.sin(), None, pool)
        pages = torch.arange(base, base + few, dtype=torch.int32, device=CUDA)[None]
        for attention in (draft_block.draft_attention, block_attention.block_attention):
            out = torch.full_like(q, torch.nan)
            attention(q, own, pool, pages, *bounds, out, None, False)
            found.append(out)
    assert not any(out.isnan().any() for out in found)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
