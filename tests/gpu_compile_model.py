"""Compiles what a step of the bundled model and a draft launch: python -m tests.gpu_compile_model 90"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from hedgerow.model.batch import SequenceRows
from hedgerow.model.cuda import CudaK2
from hedgerow.model.cuda_dflash import CudaDFlash
from hedgerow.model.cuda_fed import CudaFed
from hedgerow.model.fed import FedMember
from kernels.sample import Law
from tests.gpu_compile import NOT_READ, SHARED, Launch, as_served, build, launches, on_tensor_cores

SAPLING = Path("models/sapling")
UNDER_THE_INTERPRETER = ("_row_attention",)  # on a card others do its work
BETWEEN = ("_pack", "_follow_on", "_pick")  # what a step that feeds the next one has besides
PRODUCTS = ("_linear", "_absorb", "_gate_up", "_down", "_row_attention", "_draft_attention")  # by tensor cores


def steps() -> list[Launch]:
    """A tree's step, a chunk of 256 rows of a prompt, a draft, and what lets them feed each other."""
    cpu = torch.device("cpu")
    model = CudaK2.load(SAPLING, (1, 4, 7), cpu)
    drafter = CudaDFlash(SAPLING.with_name("sapling-dflash"), SAPLING, cpu)
    cache, state = model.new_cache(5), drafter.new_state()

    def run() -> None:
        model.forward([SequenceRows(0, range(5), [1] * 8, [-1] + [0] * 7, range(8))], cache)
        model.forward([SequenceRows(0, range(5), [1] * 256, range(-1, 255), [255], True)], cache)
        drafter.append(state, torch.zeros(3, drafter.feature_width), 0)
        drafter.draft([state], [1], [3])

    def feed() -> None:
        fed = CudaFed(model, drafter)
        fed.enter([FedMember(1, 3, range(5), Law(0.0, 0, 1.0, 0.0, 0, 0, 4), 64, 60, 8, 0, state)], cache)
        fed.launch([8])
        fed.leave([4])

    first = [as_served(launch) for launch in launches(run)]
    return first + [as_served(one) for one in launches(feed) if one.function.__name__ in BETWEEN]


def form(launch: Launch) -> tuple[object, ...]:
    """One of each kernel is compiled; of products one a tile, of attention one a mask."""
    tile, window = (launch.arguments.get(name) for name in ("BM", "WINDOW"))
    return launch.function.__name__, tile, window


if __name__ == "__main__":
    different = {form(launch): launch for launch in steps()}
    capability = int(sys.argv[1])
    built = [build(launch, capability) for launch in different.values()]
    most = 0 if capability == 90 else 128  # bytes spilled, where nothing was tuned
    for one, launch in zip(built, different.values(), strict=True):
        waits = bool(launch.arguments.get("PDL"))
        assert waits or one.name in UNDER_THE_INTERPRETER, f"{one.name} does not follow the kernel before it"
        told = (one.instructions["ACQBULK"], one.instructions["PREEXIT"])
        assert capability in NOT_READ or told == (waits, waits), one
        assert one.spilled <= most, f"{one.name} spills {one.spilled} bytes"
        assert one.shared <= SHARED[capability], f"{one.name} takes {one.shared} bytes of shared memory"
        assert one.name not in PRODUCTS or on_tensor_cores(one), one
        print(f"{one.name}: {one.registers} registers, {one.shared} bytes shared, {one.instructions.total()} long")
    print(f"{len(built)} kernels")
