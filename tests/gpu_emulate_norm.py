"""A norm or an activation within a product against the kernel that does it alone, as compiled and carried out:
python -m tests.gpu_emulate_norm"""

from __future__ import annotations

import numpy as np
import torch

from kernels.gpu.add_rmsnorm import add_rmsnorm
from kernels.gpu.linear import parts_of
from kernels.gpu.linear_activated import ACTIVATED, multiply_activated
from kernels.gpu.linear_normed import NORMED, linear_parts_normed
from kernels.gpu.silu_mul import silu_mul
from tests.gpu_compile import kernel_of, launches
from tests.gpu_emulated import Program, rounded


def compiled(n: int, k: int) -> tuple[str, str]:
    """PTX of `add_rmsnorm`, and of `linear_normed`."""
    x, delta, into, tap = (torch.empty(1, k) for _ in range(4))
    w, norm, kept = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((n, k), (k,), (1, k)))
    room, how = torch.empty(parts_of(n, k) * n), NORMED[n, k]
    (one,) = launches(lambda: add_rmsnorm(x, norm, kept, 1e-6, delta=delta))
    (other,) = launches(
        lambda: linear_parts_normed(x, delta, norm, w, room, into, 1e-6, how, kept=kept, tap=tap)
    )  # fmt: skip
    return kernel_of(one, 90).asm["ptx"], kernel_of(other, 90).asm["ptx"]


def compare(n: int, k: int) -> None:
    plain, within = compiled(n, k)
    draw, parts = np.random.default_rng(n), parts_of(n, k)
    x, delta = (draw.standard_normal(k).astype(np.float32) for _ in range(2))
    norm, w = (rounded(draw.standard_normal(shape).astype(np.float32)).astype(np.uint16) for shape in (k, (n, k)))
    stream, y, eps = x.copy(), np.zeros(k, np.uint16), np.float32(1e-6)
    Program(plain, stream, x, x, delta, x, norm, y, x, 0, eps)
    into, kept, tap = np.full(k, np.nan, np.float32), np.zeros(k, np.uint16), np.full(k, np.nan, np.float32)
    out = np.full((parts, n), np.nan, np.float32)
    for part in range(parts):
        Program(within, x, delta, norm, w, out, into, kept, tap, eps, block=(0, part))
    for got, expected in ((into, stream), (tap, stream), (kept, y)):
        assert (got.view(np.uint16) == expected.view(np.uint16)).all(), (got, expected)
    last = n // 64 - 1
    Program(within, x, delta, norm, w, out, *(np.empty_like(one) for one in (into, kept, tap)), eps, block=(last, 3))
    real, of = ((one.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for one in (y, w))
    products = np.stack([of[:, span] @ real[span] for span in np.split(np.arange(k), parts)])
    for part, columns in ((slice(None), slice(0, 64)), (slice(3, 4), slice(n - 64, n))):
        assert np.abs(out[part, columns] - products[part, columns]).max() < 1e-3, (out, products)
    assert np.isnan(out[:, 64 : n - 64]).all()


def compare_activated(n: int, k: int, early: bool) -> None:
    made, act, out = torch.empty(8, 1, 896), torch.empty(1, k, dtype=torch.bfloat16), torch.empty(1, n)
    (one,) = launches(lambda: silu_mul(made, act))
    (other,) = launches(lambda: multiply_activated(made, torch.empty(n, k, dtype=torch.bfloat16), out, early))
    draw = np.random.default_rng(k)
    parts, y = draw.standard_normal((8, 896)).astype(np.float32), np.zeros(k, np.uint16)
    Program(kernel_of(one, 90).asm["ptx"], parts, y, 896, 896)
    real = (y.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    w, got = np.zeros((n, k), np.uint16), np.full(n, np.nan, np.float32)
    w[np.arange(n), np.arange(n) % k] = 0x3F80  # ones: an output is one of y
    for block in range(4):
        Program(kernel_of(other, 90).asm["ptx"], parts, w, got, 896, block=(block, 0))
    assert (got[:256] == real[:256]).all(), (got, real)
    assert np.isnan(got[256:]).all()


if __name__ == "__main__":
    for shape in NORMED:
        compare(*shape)
    for shape in ACTIVATED:
        for early in (False, True):
            compare_activated(*shape, early)
    print(f"{len(NORMED) + len(ACTIVATED)} products")
