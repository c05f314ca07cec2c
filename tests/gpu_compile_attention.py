"""Compiles the attention kernels for Hopper, at K2.6's widths and the bundled model's.

python -m tests.gpu_compile_attention
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.gpu import mla_prefill_attention, mla_tree_attention
from kernels.gpu.mla_tree_attention import Plan, Workspace
from tests.gpu_compile import compiled


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def calls(latent: int, rope: int, batch: int) -> list[Callable[[], object]]:
    q = torch.zeros(batch * 16, 8, latent + rope, dtype=torch.bfloat16)
    cache = torch.zeros(16, 64, latent + rope, dtype=torch.bfloat16)
    out = torch.zeros(batch * 16, 8, latent, dtype=torch.bfloat16)
    table, lens, starts, widths = ints(batch, 16), ints(batch), ints(batch + 1), ints(batch)
    about, masks = (table, lens, starts, widths), torch.zeros(batch * 16, dtype=torch.int64)
    workspace = Workspace(batch * 16, 8, latent, device="cpu")

    def tree(form: Plan) -> Callable[[], object]:
        return lambda: mla_tree_attention.launch(q, cache, about, masks, out, workspace, form)

    if batch == 1:
        return [tree(Plan(16, 1, 264, 64))]
    forms = [Plan(16, 2, 132, 64), Plan(64, 2, 132, latent)]
    return [*(tree(form) for form in forms), lambda: mla_prefill_attention.launch(q, cache, table, lens, starts, out)]


if __name__ == "__main__":
    seen = {}
    for sizes in [(512, 64, 1), (512, 64, 8), (128, 32, 8)]:
        for call in calls(*sizes):
            for one in compiled(call):
                seen[(one.name, sizes, one.shared)] = one
    for (name, sizes, _), one in seen.items():
        unit = "HMMA" if name == "path_merge" else "HGMMA"
        assert one.instructions[unit], f"{name} at {sizes} has no {unit}"
        assert one.instructions["UTMALDG"] or name == "path_merge", f"{name} does not use the copy engine"
        print(f"{name} {sizes}: {one.registers} registers, {one.shared} bytes shared")
    print(f"{len(seen)} builds")
