"""The compiled engine as Python sees it: its structures, its functions, and one check that both sides mean the same."""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

from kernels.cpu.build import BuildError

F32, BF16, Q4 = range(3)
POINTER = c.c_void_p
NO_MEMORY, NO_SUM = 11, 12  # target.h: what a call returns then
SUM = c.CFUNCTYPE(c.c_int, c.POINTER(c.c_float), c.c_int64)  # target.h, Model.sum


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
        *integers(
            "width shared_width experts top_k expert_width normalise positions taps ranks first_token tokens narrow"
        ),
        *floats("eps latent_eps softmax_scale routed_scale"),
        ("tapped", POINTER),
        ("layer", c.POINTER(Layer)),
        *pointers("embedding norm cos sin sum"),
        ("head", Matrix),
    )


class Cache(c.Structure):
    """target.h"""

    _fields_ = (("keys", POINTER), ("latents", POINTER), ("pages", c.c_int64))


class Fault(c.Structure):
    """target.h: what is wrong with a plan."""

    _fields_ = tuple(integers("code sequence row value"))


class DraftLayer(c.Structure):
    """drafter.h"""

    _fields_ = (
        *pointers("input_norm mlp_norm q_norm k_norm attention_base mlp_base"),
        *matrices("qkv o gate_up down attention_conv mlp_conv"),
        *integers("window causal"),
    )


class DraftModel(c.Structure):
    """drafter.h"""

    _fields_ = (
        *integers("layers hidden vocab heads kv_heads head_dim width block mask_token feature_width positions"),
        *integers("projected taps group narrow"),
        *floats("eps scale"),
        ("layer", c.POINTER(DraftLayer)),
        *pointers("embedding context_norm norm cos sin"),
        *matrices("fc head"),
    )


class DraftContext(c.Structure):
    """drafter.h: a sequence's context in a layer."""

    _fields_ = (("keys", POINTER), ("values", POINTER), ("pages", c.c_int64))


class DraftAsk(c.Structure):
    """drafter.h: one sequence of a step."""

    _fields_ = tuple(integers("anchor position start end"))


class Walk(c.Structure):
    """walk.h: one sequence's rows of logits and how they are drawn."""

    _fields_ = (
        ("seed", c.c_uint64),
        ("top_p", c.c_double),
        *floats("temperature min_p"),
        ("top_k", c.c_int32),
        ("sample_index", c.c_uint32),
        ("position", c.c_uint32),
        *integers("first rows unused"),
    )


class TreeAsk(c.Structure):
    """walk.h: one sequence's tree."""

    _fields_ = tuple(integers("budget cap"))


class PairWeights(c.Structure):
    """walk.h: a candidate selector."""

    _fields_ = (*pointers("predecessor successor projection"), *integers("rank k hidden vocab"))


STRUCTURES = (
    Matrix,
    Layer,
    Model,
    Cache,
    Fault,
    DraftLayer,
    DraftModel,
    DraftContext,
    DraftAsk,
    Walk,
    TreeAsk,
    PairWeights,
)
SIGNATURES: dict[str, list[Any]] = {
    "target_open": [c.POINTER(Model), c.c_int],
    "target_close": [POINTER],
    "target_step": [
        POINTER, c.POINTER(Cache), POINTER, c.c_int64, c.c_int, POINTER, POINTER, c.POINTER(Fault),
    ],
    "target_experts": [POINTER, c.POINTER(c.c_int)],
    "cache_copy": [c.POINTER(Cache), c.c_int, c.c_int, c.c_int, c.c_int64, POINTER, POINTER, POINTER],
    "drafter_open": [c.POINTER(DraftModel), c.c_int],
    "drafter_close": [POINTER],
    "drafter_append": [POINTER, POINTER, POINTER, c.c_int, c.c_int, c.c_int],
    "drafter_step": [POINTER, c.c_int, POINTER, POINTER, c.c_int, POINTER, POINTER, c.POINTER(c.c_int)],
    "walk_trees": [
        POINTER, c.c_int64, c.c_int, c.c_int, POINTER, POINTER, POINTER, POINTER, c.POINTER(c.c_int),
    ],
    "top_logprobs": [POINTER, c.c_int64, c.c_int, c.c_int, POINTER, POINTER],
    "build_trees": [
        POINTER, POINTER, c.c_int, c.c_int, c.c_int, c.c_int, POINTER, POINTER, POINTER, POINTER, POINTER,
    ],
    "pair_logprobs": [
        c.POINTER(PairWeights), POINTER, POINTER, POINTER, c.c_int, c.c_int, POINTER, POINTER, POINTER, POINTER,
    ],
    "build_pair_trees": [
        POINTER, POINTER, POINTER, c.c_int, c.c_int, c.c_int, c.c_int, POINTER, POINTER, POINTER, POINTER, POINTER,
    ],
}  # fmt: skip


class Library:
    """An opened library. `lanes`: floats in a vector, which the packing of bfloat16 matrices follows."""

    def __init__(self, path: Path) -> None:
        """Raises BuildError where it cannot be loaded or is not of these sources."""
        try:
            self.functions = c.CDLL(str(path))
            sizes = (c.c_int32 * (len(STRUCTURES) + 1))()
            self.functions.engine_sizes(sizes)
            for name, arguments in SIGNATURES.items():
                function = getattr(self.functions, name)
                function.argtypes = arguments
                function.restype = {"open": POINTER, "close": None}.get(name.split("_")[1], c.c_int)
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from None
        expected = [c.sizeof(kind) for kind in STRUCTURES]
        if list(sizes)[:-1] != expected:
            raise BuildError(f"{path} has structures of {list(sizes)[:-1]} bytes, {expected} were expected")
        self.path, self.lanes = path, sizes[len(STRUCTURES)]
