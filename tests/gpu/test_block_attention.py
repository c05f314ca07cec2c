"""The drafter's attention with split keys against the reference and against one launch.

On a machine without a GPU `tests/unit/test_gpu_tree_ops.py` runs this file under Triton's interpreter, in float32.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu import block_attention, draft_block

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TYPE = torch.float32 if INTERPRETED else torch.bfloat16
NEAR = 2e-5 if INTERPRETED else 1e-2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("window", "causal"), [(None, False), (256, False), (300, True)])
@pytest.mark.parametrize(("sequences", "heads", "groups", "width", "block"), block_attention.TEST_SHAPES)
def test_a_block_sees_its_context(
    sequences: int, heads: int, groups: int, width: int, block: int, window: int | None, causal: bool
) -> None:
    """Contexts of three splits, of less than a page, and none; with a gap before the anchor, and one that is cut off in
    front. Slots that hold nothing are NaN, and so is all of the output before."""
    g = torch.Generator().manual_seed(width + block)
    starts, ends, gaps = [0, 100, 7][:sequences], [1100, 100, 50][:sequences], [0, 3, 0][:sequences]
    most = 18
    pages = torch.randperm(most * sequences, generator=g).view(sequences, most).int()
    pool = torch.full((most * sequences * 64, 2, groups, width), torch.nan)
    contexts = []
    for s, (start, end) in enumerate(zip(starts, ends, strict=True)):
        p = torch.arange(start, end)
        slots = pages[s, p // 64 - start // 64].long() * 64 + p % 64
        pool[slots] = torch.randn(end - start, 2, groups, width, generator=g)
        contexts.append(pool[slots].to(TYPE))
    rows = sequences * block
    q, own = torch.randn(rows, heads, width, generator=g), torch.randn(rows, 2, groups, width, generator=g)
    q, own, pool = q.to(TYPE), own.to(TYPE), pool.to(TYPE)
    anchors = [end + gap for end, gap in zip(ends, gaps, strict=True)]
    bounds = [torch.tensor(value, dtype=torch.int32, device=DEVICE) for value in (starts, ends, anchors)]
    given = [tensor.to(DEVICE) for tensor in (q, own, pool, pages)]
    out, once = (torch.full_like(given[0], torch.nan) for _ in range(2))
    needed = block_attention.words(sequences, heads, groups, width, block, most)
    block_attention.block_attention(
        *given, *bounds, out, window, causal, torch.full((needed,), torch.nan, device=DEVICE)
    )
    draft_block.draft_attention(*given, *bounds, once, window, causal)
    torch.testing.assert_close(out, once, atol=NEAR, rtol=NEAR)
    for s in range(sequences):
        at = slice(s * block, (s + 1) * block)
        want = block_attention.reference(q[at], own[at], contexts[s], starts[s], anchors[s], window or 0, causal)
        torch.testing.assert_close(out[at].cpu().float(), want.float(), atol=NEAR, rtol=NEAR)


def test_states_stay_small_whatever_the_longest_context() -> None:
    """Of 64 sequences of 262,144 positions and eight KV heads: 4 splits each and the block's, not 512."""
    splits, pages, _ = block_attention.cut(64, 64, 8, 8, 4096)
    assert (splits, pages) == (5, 1024)
    assert 4 * block_attention.words(64, 64, 8, 128, 8, 4096) < 100 << 20
    assert block_attention.cut(1, 6, 2, 8, 65) == (10, 8, 32), "short contexts keep splits of 512 positions"


def test_what_does_not_fit_is_refused_by_name() -> None:
    q, own = torch.zeros(8, 2, 16, device=DEVICE), torch.zeros(8, 2, 1, 16, device=DEVICE)
    pool, pages = torch.zeros(64, 2, 1, 16, device=DEVICE), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    bound = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    strided, two = torch.zeros(8, 16, 2, device=DEVICE).transpose(1, 2), bound.repeat(2)
    wide, wide_own = torch.zeros(8, 2, 24, device=DEVICE), torch.zeros(8, 2, 1, 24, device=DEVICE)
    wide_pool = torch.zeros(64, 2, 1, 24, device=DEVICE)
    with pytest.raises(ValueError, match="out has strides"):
        block_attention.block_attention(q, own, pool, pages, bound, bound, bound, strided, None, False)
    with pytest.raises(ValueError, match=r"anchor has shape \(2,\), expected \(1\)"):
        block_attention.block_attention(q, own, pool, pages, bound, bound, two, q.clone(), None, False)
    with pytest.raises(ValueError, match=r"states has 3 words, \d+ are needed"):
        block_attention.block_attention(
            q, own, pool, pages, bound, bound, bound, q.clone(), None, False, bound[[0] * 3].float()
        )
    with pytest.raises(ValueError, match="q has heads 24 wide, expected a power of two"):
        block_attention.block_attention(wide, wide_own, wide_pool, pages, bound, bound, bound, wide, None, False)
