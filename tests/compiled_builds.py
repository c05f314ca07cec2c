"""Builds of the compiled engine for its tests, and whether there can be any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hedgerow.model.compiled import CompiledK2
from hedgerow.model.config import K2Config
from hedgerow.model.loader import Checkpoint
from kernels.cpu.build import BuildError, build, find_compiler, isa_of_this_cpu
from kernels.cpu.library import Library

FAULTS = {0: "none", 1: "path summed leaf first", 2: "normaliser one ulp off", 3: "an ancestor left out"}


def missing_compiler() -> str:
    """Why nothing can be built here; empty where it can."""
    try:
        find_compiler()
        isa_of_this_cpu()
    except BuildError as error:
        return f"{error.why}: the compiled engine is not tested"
    return ""


def plain_build() -> Path:
    """Without vector instructions, in AVX-512's 16 lanes, not optimised, and with faults that `plant` switches on: one
    build serves every test that wants another compilation than the usual.
    """
    return build(isa="baseline", level="-O0", defines=["HEDGEROW_FAULTS", "HEDGEROW_LANES=16"])


def of_build(path: Path, target: Path, feature_layers: Sequence[int], threads: int = 1) -> CompiledK2:
    """The target in its folder, on that library."""
    return CompiledK2(Library(path), K2Config.from_folder(target), Checkpoint(target), feature_layers, threads)


def plant(model: CompiledK2, fault: int) -> None:
    """Switches a fault of FAULTS on, in a model `of_build(plain_build(), ...)`; 0 switches it off."""
    model._library.functions.target_plant(fault)
