"""The compiled engine as Python sees it: its structures, its functions, and one check that both sides mean the same."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

from kernels.cpu.build import BuildError

F32, BF16, Q4 = range(3)
POINTER = c.c_void_p


class Matrix(c.Structure):
    """engine.h"""

    _fields_ = (("type", c.c_int32), ("k", c.c_int32), ("n", c.c_int32), ("unused", c.c_int32), ("data", POINTER),
                ("scales", POINTER))  # fmt: skip


def pointers(names: str) -> list[tuple[str, type[c.c_void_p]]]:
    return [(name, POINTER) for name in names.split()]


def matrices(names: str) -> list[tuple[str, type[Matrix]]]:
    return [(name, Matrix) for name in names.split()]


def integers(names: str) -> list[tuple[str, type[c.c_int32]]]:
    return [(name, c.c_int32) for name in names.split()]


def floats(names: str) -> list[tuple[str, type[c.c_float]]]:
    return [(name, c.c_float) for name in names.split()]


class Layer(c.Structure):
    """target.h"""

    _fields_ = (
        *pointers("attention_norm mlp_norm q_norm kv_norm bias"),
        *matrices("qkv_a q_b uk uv o router gate_up down experts_gate_up experts_down"),
    )


class Model(c.Structure):
    """target.h"""

    _fields_ = (
        *integers("layers hidden vocab heads nope rope value q_rank kv_rank"),
        *integers("width shared_width experts top_k expert_width normalise positions taps unused"),
        *floats("eps latent_eps softmax_scale routed_scale"),
        ("tapped", POINTER),
        ("layer", c.POINTER(Layer)),
        *pointers("embedding norm cos sin"),
        ("head", Matrix),
    )


class Cache(c.Structure):
    """target.h"""

    _fields_ = (("keys", POINTER), ("latents", POINTER), ("pages", c.c_int64))


class Fault(c.Structure):
    """target.h: what is wrong with a plan."""

    _fields_ = tuple(integers("code sequence row value"))


class Library:
    """An opened library. `lanes`: floats in a vector, which the packing of bfloat16 matrices follows."""

    def __init__(self, path: Path) -> None:
        """Raises BuildError where it cannot be loaded or is not of these sources."""
        try:
            self.functions = f = c.CDLL(str(path))
            sizes = (c.c_int32 * 6)()
            f.target_sizes(sizes)
            f.target_open.restype = POINTER
            f.target_open.argtypes = [c.POINTER(Model), c.c_int]
            f.target_close.argtypes = [POINTER]
            f.target_step.argtypes = [
                POINTER, c.POINTER(Cache), POINTER, c.c_int64, c.c_int, POINTER, POINTER, c.POINTER(Fault),
            ]  # fmt: skip
            f.cache_copy.argtypes = [
                c.POINTER(Cache), c.c_int, c.c_int, c.c_int, c.c_int64, POINTER, POINTER, POINTER,
            ]  # fmt: skip
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from None
        expected = [c.sizeof(kind) for kind in (Matrix, Layer, Model, Cache, Fault)]
        if list(sizes)[:5] != expected:
            raise BuildError(f"{path} has structures of {list(sizes)[:5]} bytes, {expected} were expected")
        self.path, self.lanes = path, sizes[5]
