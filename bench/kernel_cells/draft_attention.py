"""The drafter's attention: keys split among programs, and in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.kernel_cells import Call, Cell, Work
from kernels.gpu import block_attention, draft_block

FORMS: dict[str, Callable[..., None]] = {
    "kernel": block_attention.block_attention,
    "one launch": draft_block.draft_attention,
}


def cells() -> Iterator[Cell]:
    for shape in block_attention.BENCH_SHAPES:
        for form in FORMS:
            yield cell(shape, form)


def cell(shape: tuple[int, ...], form: str) -> Cell:
    sequences, heads, groups, width, block, context, window = shape
    attend, half = FORMS[form], torch.bfloat16

    def make() -> Call:
        most = -(-context // 64)
        q = torch.randn(sequences * block, heads, width, device="cuda", dtype=half)
        own = torch.randn(sequences * block, 2, groups, width, device="cuda", dtype=half)
        pool = torch.randn(sequences * most * 64, 2, groups, width, device="cuda", dtype=half)
        pages = torch.randperm(sequences * most, device="cuda").view(sequences, most).int()
        start, end = (torch.full((sequences,), at, dtype=torch.int32, device="cuda") for at in (0, context))
        out = torch.empty_like(q)

        def run() -> None:
            attend(q, own, pool, pages, start, end, end, out, window or None, False)

        def check() -> None:
            slots = (pages[0].long()[:, None] * 64 + torch.arange(64, device="cuda")).view(-1)
            given = q[:block].cpu(), own[:block].cpu(), pool[slots].cpu()
            want = block_attention.reference(*given, 0, context, window, False)
            torch.testing.assert_close(out[:block].cpu().float(), want, atol=1e-2, rtol=1e-2)

        return Call(run, (out,), check)

    seen = min(context, window or context) + block
    read = sequences * seen * 2 * groups * width * 2
    work = Work(read, sequences * block * heads * width * 2, 4.0 * sequences * block * heads * width * seen)
    name = f"S={sequences} {heads}/{groups} heads x {width} L={context}" + (f" window {window}" if window else "")
    return Cell("draft_attention", name, work, make, sequences * context * 4 * groups * width, form, most_sets=40)
