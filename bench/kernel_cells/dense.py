"""Dense products of one rank of Kimi K2.6, and cuBLAS beside them (torch.mm and torch.bmm, bfloat16).

Where K is summed in parts, the kernel that reads the product adds them (`linear_parts`), so they are what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.kernel_cells import Call, Cell, Work
from kernels.gpu.linear import linear, linear_parts, parts_of, reference, room_of_parts

ROWS = (1, 8, 16, 64)
SHAPES = {  # (heads, N, K)
    "qkv_a": (1, 2112, 7168),
    "q_b": (1, 1536, 1536),
    "uk": (8, 512, 128),
    "uv": (8, 128, 512),
    "o": (1, 7168, 1024),
    "shared gate_up + router": (1, 896, 7168),
    "shared down": (1, 7168, 256),
    "lm_head": (1, 20480, 7168),
    "layer 0 gate_up": (1, 4608, 7168),
    "layer 0 down": (1, 7168, 2304),
}


def cell(name: str, rows: int, peer: bool) -> Cell:
    heads, n, k = SHAPES[name]
    read, written = heads * k * (n + rows) * 2, rows * heads * n * 2

    def make() -> Call:
        x = torch.randn(rows, heads, k, device="cuda").bfloat16()
        w = (torch.randn(heads, n, k, device="cuda") / k**0.5).bfloat16()
        out = torch.empty(rows, heads, n, device="cuda", dtype=torch.bfloat16 if peer else torch.float32)
        parts = torch.empty(room_of_parts(rows, n, k), device="cuda")
        in_parts = parts_of(n, k) > 1

        def run() -> None:
            if not peer and in_parts:
                linear_parts(x[:, 0], w[0], parts)
            elif not peer:
                linear(x, w, out)
            elif heads == 1:
                torch.mm(x[:, 0], w[0].T, out=out[:, 0])
            else:
                torch.bmm(x.transpose(0, 1), w.mT, out=out.view(heads, rows, n))

        def check() -> None:
            if not peer:
                expected = reference(x, w).double()
                got = linear_parts(x[:, 0], w[0], parts).sum(0).unsqueeze(1) if in_parts else out
                assert (got.double() - expected).norm() < 1e-3 * expected.norm()

        return Call(run, [parts if in_parts and not peer else out], check)

    work = Work(read, written, 2.0 * rows * heads * n * k)
    return Cell("linear", f"{name} {n}x{k} M={rows}", work, make, read, "peer cuBLAS" if peer else "kernel")


def cells() -> Iterator[Cell]:
    for name in SHAPES:
        for rows in ROWS:
            yield cell(name, rows, False)
            yield cell(name, rows, True)
