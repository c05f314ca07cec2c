"""The selector's probabilities on a GPU against their reference, and that against the CPU's selector."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.model.draft_config import SelectorSize
from hedgerow.model.selector import Selector
from kernels.gpu.pair_scores import TEST_SHAPES, pair_scores, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, VOCABULARY = "cpu" if INTERPRETED else "cuda", 301
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy under the interpreter
]


class Given:
    """Marginals with candidates of their own at every depth, and a selector."""

    def __init__(self, sequences: int, depth: int, k: int, rank: int) -> None:
        g = torch.Generator().manual_seed(sequences + depth + k + rank)
        self.logits = torch.randn(sequences, depth, VOCABULARY, generator=g) * 2
        best = self.logits.log_softmax(-1).topk(k)
        self.logprobs, self.tokens = best.values, best.indices
        self.hidden = torch.randn(sequences, depth, 32, generator=g)
        books = [torch.randn(VOCABULARY, rank, generator=g) for _ in range(2)]
        self.selector = Selector(SelectorSize(rank, k), *books, torch.randn(rank, 32, generator=g) * 0.1)
        self.anchors = torch.randint(0, VOCABULARY, (sequences,), generator=g)
        self.caps = torch.arange(sequences) * 2 % (k + 3)  # the first: none

    @property
    def arguments(self) -> list[torch.Tensor]:
        s = self.selector
        state, ints = self.hidden @ s.projection, (self.tokens, self.anchors, self.caps)
        tokens, anchors, caps = (part.int() for part in ints)
        every = (self.logprobs, tokens, state, anchors, caps, s.predecessor, s.successor)
        return [part.to(DEVICE) for part in every]


def compare(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Equal where nothing is nearly so: scores are sums in another order."""
    (values, choice), (expected, chosen) = ([part.cpu() for part in both] for both in (got, want))
    impossible = expected.isinf()
    assert torch.equal(values.isinf(), impossible)
    assert float((values - expected)[~impossible].abs().max()) < 1e-4
    gap = (expected[..., :-1] - expected[..., 1:]).nan_to_num(nan=1.0) > 1e-4  # of two impossible ones: in order
    clear = torch.ones_like(impossible)
    clear[..., 1:] &= gap
    clear[..., :-1] &= gap
    assert float(clear.float().mean()) > 0.9
    assert torch.equal(choice[clear], chosen[clear])


@pytest.mark.parametrize("shape", TEST_SHAPES, ids=str)
def test_scores_are_the_references(shape: tuple[int, int, int, int]) -> None:
    given = Given(*shape)
    compare(pair_scores(*given.arguments), reference(*given.arguments))


@pytest.mark.parametrize("shape", TEST_SHAPES, ids=str)
def test_the_reference_is_the_selectors(shape: tuple[int, int, int, int]) -> None:
    given = Given(*shape)
    pairs = given.selector.pairs(given.logits, given.hidden, given.anchors, given.caps)
    assert torch.equal(pairs.tokens, given.tokens)
    compare(reference(*(part.cpu() for part in given.arguments)), (pairs.logprobs, pairs.choice.int()))


def test_what_is_impossible_comes_last_in_its_order() -> None:
    """Candidates without probability, a row of them, a state that is no number, and equals."""
    given = Given(2, 3, 6, 16)
    args = given.arguments
    args[0][0, 0, 4:] = -torch.inf
    args[0][0, 1] = -torch.inf
    args[2][1, 1] = torch.nan
    args[2][1, 2] = 0.0
    args[0][1, 2] = -3.0  # as probable as each other
    values, choice = pair_scores(*args)
    wanted, chosen = reference(*args)
    assert torch.equal(values.isinf(), wanted.isinf())
    assert values[0, 1].isinf().all()
    assert values[1, 1].isinf().all()
    assert torch.equal(choice[0, 0, :, 4:], chosen[0, 0, :, 4:])
    for row in (choice[0, 1], choice[1, 1], choice[1, 2]):
        assert torch.equal(row.cpu(), torch.arange(6, dtype=torch.int32).expand(6, 6))


def test_anchors_may_stand_among_other_tokens() -> None:
    given = Given(3, 2, 5, 16)
    args = given.arguments
    blocks = torch.full((3, 8), 7, dtype=torch.int32, device=DEVICE)
    blocks[:, 0] = args[3]
    got = pair_scores(*args[:3], blocks[:, 0], *args[4:])
    for mine, theirs in zip(got, pair_scores(*args), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("fault", range(7))
def test_what_does_not_fit_is_refused_by_name(fault: int) -> None:
    names = ("logprobs", "tokens", "state", "anchors", "caps", "predecessor", "successor")
    args = Given(2, 3, 6, 16).arguments
    args[fault] = args[fault][:1] if fault not in (1, 5) else args[fault].double()
    with pytest.raises(ValueError, match=f"^{names[fault]} "):
        pair_scores(*args)
