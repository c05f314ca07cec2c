"""Many requests in one step on a GPU: each has the bits that it has alone, whatever its budget and the others'."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.rank_model import Drawn, rank_config, rank_sizes
from hedgerow.model.batch import SequenceRows
from hedgerow.model.cuda import CudaK2
from kernels.sample import Law
from kernels.tree_accept import WalkRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA, REQUESTS, LIMIT = torch.device("cuda"), 60, 192
PAGES = LIMIT // 64


@pytest.fixture(scope="module", params=["bundled", "rank"])
def model(request: pytest.FixtureRequest) -> CudaK2:
    """The bundled model; two layers of one of K2.6's eight ranks."""
    if request.param == "bundled":
        return CudaK2.load(Path("models/sapling"), (1, 4), CUDA)
    return CudaK2(rank_config(rank_sizes(2)), Drawn(CUDA), (0, 1))


def tree(model: CudaK2, n: int, length: int, rows: int) -> tuple[SequenceRows, WalkRows]:
    """Of request n, after its prompt; some of a tree's rows stand below each other, others side by side."""
    draw, most = random.Random(64 * n + rows), model.config.vocab_size
    tokens, parents = [draw.randrange(most) for _ in range(rows)], [-1]
    parents += [draw.randrange(max(0, row - 6), row) for row in range(1, rows)]
    law = Law(0.7 * (n % 2), 0, 1.0, 0.0, n, 0, length)
    parts = range(PAGES * n, PAGES * (n + 1))
    return SequenceRows(length, parts, tokens, parents, range(rows), limit=LIMIT), WalkRows(0, parents, tokens, law)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("budgets", [[0], [3], [16], [63], [63, 0, 5, 31]], ids=str)
def test_sixty_requests_have_the_bits_of_one(model: CudaK2, budgets: list[int]) -> None:
    """Logits, features and what is drawn, of up to 3,840 rows in a step."""
    cache = model.new_cache(PAGES * REQUESTS)
    lengths = [1 + 11 * n % 100 for n in range(REQUESTS)]
    for n, length in enumerate(lengths):
        text = [(31 * n + 7 * at) % model.config.vocab_size for at in range(length)]
        model.forward(
            [SequenceRows(0, range(PAGES * n, PAGES * (n + 1)), text, range(-1, length - 1), [], True)], cache
        )
    made = [tree(model, n, lengths[n], budgets[n % len(budgets)] + 1) for n in range(REQUESTS)]
    rows, first, walks = [part for part, _ in made], [0], list[WalkRows]()
    for part, walk in made:
        walks.append(walk._replace(first=first[-1]))
        first.append(first[-1] + len(part.tokens))
    logits = model.forward(rows, cache).logits.clone()
    together = model.verify(rows, cache, walks)
    features, walked = together.features.clone(), together.walked
    assert len(features) == first[-1]
    assert logits.isfinite().all()
    for n in range(0, REQUESTS, 7):
        mine = slice(first[n], first[n + 1])
        assert torch.equal(model.forward([rows[n]], cache).logits, logits[mine]), n
        alone = model.verify([rows[n]], cache, [walks[n]._replace(first=0)])
        assert torch.equal(alone.features, features[mine]), n
        assert alone.walked == [walked[n]], n


@pytest.mark.parametrize(("requests", "each"), [(4, 64), (16, 16), (64, 4)])
def test_256_rows_have_the_bits_of_fewer(model: CudaK2, requests: int, each: int) -> None:
    cache = model.new_cache(PAGES * requests)
    rows = [tree(model, n, 0, each)[0] for n in range(requests)]
    logits = model.forward(rows, cache).logits.clone()
    assert len(logits) == 256
    for n in range(0, requests, 3):
        assert torch.equal(model.forward([rows[n]], cache).logits, logits[n * each : (n + 1) * each]), n
