"""Path P's attention on a GPU: against the reference, and bits that no chunk, batch or page layout changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.gpu.mla_reference import prefill_attention_reference
from tests.gpu.attention_cases import batch, ints, one, prefill, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FORMS = pytest.mark.parametrize("portable", [False, True], ids=["hopper", "portable"])
SHAPES = [
    ([0], [1]),
    ([0], [64]),
    ([0], [65]),
    ([63], [1]),
    ([64], [130]),
    ([1], [512]),
    ([1000, 0, 64], [17, 0, 300]),
    ([100, 0, 0, 63, 700], [8, 1, 200, 2, 64]),
]


@FORMS
@pytest.mark.parametrize("heads", [8, 16, 12])
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 32)])
def test_it_computes_the_reference(latent, rope, heads, portable) -> None:
    for n, (prefixes, counts) in enumerate(SHAPES):
        b = batch(prefixes, counts, kind="chain", latent=latent, rope=rope, heads=heads, seed=n, padding=n * 5)
        got = prefill(b, portable)
        expected = prefill_attention_reference(
            b.q.nan_to_num(), b.cache, b.page_table, b.prefix_lens, b.row_start, latent
        )
        assert torch.isfinite(got).all()
        assert not got[b.starts[-1] :].any()
        assert (got.float() - expected).norm() < 4e-3 * expected.norm()


@FORMS
@pytest.mark.parametrize("chunks", [[1] * 40 + [560], [17] * 35 + [5], [512, 88], [300, 300]], ids=lambda c: str(c[0]))
def test_chunks_do_not_show(chunks, portable) -> None:
    """Later keys are in the cache already or not: a chunk's rows do not see them either way."""
    whole = batch([0], [600], kind="chain", seed=1)
    expected, done = prefill(whole, portable), 0
    for count in chunks:
        cache = whole.cache.clone()
        late = torch.arange(done + count, 600, device="cuda")
        cache[whole.page_table[0, late // 64].long(), late % 64] = float("nan")
        rows = slice(done, done + count)
        part = replace(
            whole, q=whole.q[rows].contiguous(), cache=cache, prefix_lens=ints([done]), row_start=ints([0, count])
        )
        assert same(prefill(part, portable), expected[rows])
        done += count


@FORMS
def test_a_sequence_alone_has_the_bits_of_any_batch(portable) -> None:
    b = batch([100, 0, 64, 63, 700, 0], [8, 1, 200, 2, 64, 77], kind="chain", padding=9, seed=2)
    together = prefill(b, portable)
    for n in range(6):
        assert same(prefill(one(b, n), portable), together[b.starts[n] : b.starts[n + 1]])


@FORMS
def test_page_numbers_past_two_to_the_31_elements(portable) -> None:
    b = batch([1000, 65], [16, 3], kind="chain", seed=4)
    pages = 2**31 // (64 * 576) + 300
    far = torch.empty(pages, 64, 576, dtype=torch.bfloat16, device="cuda")
    far[-len(b.cache) :] = b.cache
    moved = replace(b, cache=far, page_table=b.page_table + (pages - len(b.cache)))
    assert same(prefill(moved, portable), prefill(b, portable))
