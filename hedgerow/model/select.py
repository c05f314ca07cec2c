"""Which engine computes a model: the compiled one where it builds and passes its check, PyTorch where it does not.

On a CUDA device there is one engine, and none of this applies: `device` says so, and what is missing is an error.

"auto" never fails for the compiled engine's sake: no compiler, a compiler that fails, a damaged build, sizes without
code, a check that fails, each gives PyTorch and one line in the log. "compiled" and "torch" ask for one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from hedgerow.errors import HedgerowError, InvalidRequest
from hedgerow.model.compiled import CompiledK2
from hedgerow.model.compiled_dflash import CompiledDFlash
from hedgerow.model.config import K2Config
from hedgerow.model.devices import Device, cuda_device
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.fits import check_fit
from hedgerow.model.interface import Draft, Target
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import Checkpoint
from hedgerow.model.room import check_draft_room, check_room
from hedgerow.model.selfcheck import check_drafter, check_rows, check_target
from hedgerow.model.threads import ThreadChoice, usual_threads
from hedgerow.scheduling import usable_cores
from kernels.cpu.build import BUILDS

log = logging.getLogger(__name__)
Engine = Literal["auto", "compiled", "torch"]
Compiled = TypeVar("Compiled", CompiledK2, CompiledDFlash)


def load_target(
    folder: Path,
    feature_layers: Sequence[int],
    engine: Engine = "auto",
    threads: int = 1,
    builds: Path = BUILDS,
    device: Device = "cpu",
    rows: int = 0,
    pages: int | None = None,
) -> Target:
    """The target in `folder`. `threads`: the most of a compiled step, which takes more than one fewer than cores only
    while that pays; PyTorch's are the process's. `builds`: for libraries. `rows` of the largest step and `pages` of the
    cache: what a CUDA device must have room for beside the weights.

    Raises ConfigError or CheckpointError; with "compiled" also BuildError and SelfCheckFailed; on a CUDA device
    InvalidRequest where there is none, and SelfCheckFailed.
    """
    if device == "cuda":
        return _cuda_target(folder, feature_layers, engine, rows, pages)
    check_room(folder, K2Config.from_folder(folder), compiled=engine != "torch")
    reference = K2Model.load(folder, feature_layers)
    if engine == "torch":
        return reference

    def compile_it() -> CompiledK2:
        compiled = CompiledK2.load(folder, feature_layers, threads, builds=builds)
        check_target(compiled, reference)
        return compiled

    return _compiled("target", compile_it, engine, threads) or reference


def load_drafter(
    folder: Path,
    target_folder: Path,
    engine: Engine = "auto",
    threads: int = 1,
    builds: Path = BUILDS,
    device: Device = "cpu",
    amplitude: float | None = None,
    projected: bool = False,
) -> Draft:
    """The drafter in `folder` for the target in `target_folder`; `amplitude`, `projected`: see DFlashModel; the rest
    as in `load_target`.
    """
    check_fit(folder, target_folder)
    if device == "cuda":
        return _cuda_drafter(folder, target_folder, engine, amplitude, projected)
    check_draft_room(folder, DraftConfig.from_folder(folder), None, projected)
    reference = DFlashModel.load(folder, target_folder, amplitude, projected)
    if engine == "torch":
        return reference

    def compile_it() -> CompiledDFlash:
        compiled = CompiledDFlash.load(
            folder, target_folder, amplitude, threads=threads, builds=builds, projected=projected
        )
        check_drafter(compiled, reference)
        return compiled

    return _compiled("drafter", compile_it, engine, threads) or reference


def _cuda_target(folder: Path, feature_layers: Sequence[int], engine: Engine, rows: int, pages: int | None) -> Target:
    _no_choice(engine)
    place = cuda_device()
    from hedgerow.model.cuda import CudaK2  # its kernels need triton
    from hedgerow.model.cuda_memory import Asked, check_device

    config = K2Config.from_folder(folder)
    checkpoint = Checkpoint(folder)
    checkpoint.check(config)
    check_device(folder, config, place, Asked(rows, pages), len(feature_layers))
    checkpoint.compare()
    model = CudaK2.load(folder, feature_layers, place)
    check_rows(model)
    return model


def _cuda_drafter(folder: Path, target_folder: Path, engine: Engine, amplitude: float | None, projected: bool) -> Draft:
    _no_choice(engine)
    place = cuda_device()
    from hedgerow.model.cuda_dflash import CudaDFlash

    check_draft_room(folder, DraftConfig.from_folder(folder), place, projected)
    return CudaDFlash.load(folder, target_folder, place, amplitude, projected)


def _no_choice(engine: Engine) -> None:
    """What computes on a CPU cannot be asked for on another device."""
    if engine != "auto":
        raise InvalidRequest("engine", engine, "auto where device is cuda: it has one engine")


def _compiled(what: str, compile_it: Callable[[], Compiled], engine: Engine, threads: int) -> Compiled | None:
    """A model that passed its check and chooses its threads; None, with "auto" alone, where there is none."""
    try:
        compiled = compile_it()
    except (HedgerowError, MemoryError) as error:
        if engine == "compiled":
            raise
        log.warning("the %s runs on PyTorch, the compiled engine is not used: %s", what, error)
        return None
    compiled.choice = ThreadChoice(threads, usual_threads(usable_cores()))
    return compiled
