"""Compiles the attention kernels at K2.6's widths and the bundled model's: for Hopper, or the portable forms.

python -m tests.gpu_compile_attention 90
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from kernels.gpu import mla_tree_attention
from kernels.gpu.mla_tree_attention import Plan, Workspace
from tests.gpu_compile import SHARED, compiled


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def calls(latent: int, rope: int, batch: int, splits: int, hopper: bool) -> list[Callable[[], object]]:
    q = torch.zeros(batch * 16, 8, latent + rope, dtype=torch.bfloat16)
    cache = torch.zeros(16, 64, latent + rope, dtype=torch.bfloat16)
    out = torch.zeros(batch * 16, 8, latent, dtype=torch.bfloat16)
    table, lens, starts, widths = ints(batch, 16), ints(batch), ints(batch + 1), ints(batch)
    about, masks = (table, lens, starts, widths), torch.zeros(batch * 16, dtype=torch.int64)
    workspace = Workspace(batch * 16, 8, latent, splits, device="cpu")

    def tree(form: Plan) -> Callable[[], object]:
        return lambda: mla_tree_attention.launch(q, cache, about, masks, out, workspace, form)

    portable = [tree(Plan(16, 0, 132, columns)) for columns in (64, latent)]
    if not hopper:
        return portable
    if batch == 1:
        return [tree(Plan(16, 1, 264, 64)), *portable]
    forms = [Plan(16, 2, 132, 64), Plan(64, 2, 132, latent)]
    return [tree(form) for form in forms]


if __name__ == "__main__":
    capability = int(sys.argv[1])
    seen = {}
    for sizes in [(512, 64, 1, 128), (512, 64, 8, 128), (128, 32, 8, 64)]:
        for call in calls(*sizes, capability == 90):
            for one in compiled(call, capability):
                seen[(one.name, sizes, one.shared)] = one
    for (name, sizes, _), one in seen.items():
        anywhere = name == "path_merge" or "portable" in name
        assert one.instructions["HMMA" if anywhere else "HGMMA"], f"{name} at {sizes} is on another matrix unit"
        assert anywhere or one.instructions["UTMALDG"], f"{name} does not use the copy engine"
        assert not anywhere or one.shared <= SHARED[120], f"{name} at {sizes} takes {one.shared} bytes"
        print(f"{name} {sizes}: {one.registers} registers, {one.shared} bytes shared")
    print(f"{len(seen)} builds")
