"""Compiles what a launcher would launch, for a card that is not here, and reads the machine code.

`TRITON_INTERPRET` must not be set when triton is imported: run this in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from kernels.gpu import checks

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED = {90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024, 120: 99 * 1024}  # bytes one program may have
NOT_READ = {103}  # triton's disassembler knows no such card: spills are the stack's bytes, products counted in the PTX
KINDS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.bool: "*i1", torch.int16: "*i16", torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


class Compiled(NamedTuple):
    """One kernel's machine code."""

    name: str
    registers: int
    spilled: int  # bytes of stack and local memory
    shared: int  # bytes
    threads: int
    instructions: Counter[str]


class Launch(NamedTuple):
    """A call of a jitted function, not carried out."""

    function: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


def launches(call: Callable[[], object]) -> list[Launch]:
    """What `call` launches, on CPU tensors."""
    found: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in self.arg_names}
        found.append(Launch(self, dict(zip(self.arg_names, args, strict=False)) | kwargs, options))

    with patch.object(JITFunction, "run", record), patch.object(checks, "INTERPRETED", True):
        call()
    return found


def as_served(launch: Launch) -> Launch:
    """With what `launches` turns off: the wait for the kernel before."""
    if "PDL" not in launch.arguments:
        return launch
    return launch._replace(arguments=launch.arguments | {"PDL": True}, options=launch.options | {"launch_pdl": True})


def build(launch: Launch, capability: int) -> Compiled:
    return read(kernel_of(launch, capability), capability)


def kernel_of(launch: Launch, capability: int) -> Any:
    """As Triton specialises: pointers are aligned, integers 1 are constants, multiples of 16 are known as such."""
    signature, constants, attributes = dict[str, str](), dict[tuple[int, ...], Any](), dict[tuple[int, ...], Any]()
    for i, parameter in enumerate(launch.function.params):
        value = launch.arguments[parameter.name]
        special = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = KINDS[value.dtype]
        elif isinstance(value, TensorDescriptor):
            box = ", ".join(str(size) for size in value.block_shape)
            signature[parameter.name] = f"tensordesc<{KINDS[value.base.dtype][1:]}[{box}],{value.layout!r}>"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source_of = GluonASTSource if isinstance(launch.function, GluonJITFunction) else ASTSource
    source = source_of(launch.function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def read(kernel: Any, capability: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = "" if capability in NOT_READ else _run("nvdisasm", "-c", file.name)
    registers, stack, local = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK", "LOCAL"))
    operations = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", code, re.M)
    counted = Counter(operations)
    spilled = stack + local if counted["LDL"] or counted["STL"] or not code else 0
    if not code:
        counted["HMMA"] = kernel.asm["ptx"].count("mma.sync.aligned")
        counted["UTCHMMA"] = kernel.asm["ptx"].count("tcgen05.mma")
    metadata = kernel.metadata
    return Compiled(metadata.name, registers, spilled, metadata.shared, metadata.num_warps * 32, counted)


def on_tensor_cores(one: Compiled) -> bool:
    """mma.sync, Hopper's wgmma, or the matrix unit that Triton takes on sm_100 and sm_103 for 64 rows or more."""
    return any(one.instructions[name] for name in ("HMMA", "HGMMA", "UTCHMMA"))


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([BIN / tool, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def compiled(
    call: Callable[[], object], capability: int = 90, spilled: int = 0, served: bool = False
) -> list[Compiled]:
    """Every kernel that `call` launches, for this compute capability. `served`: with its wait for the one before.

    Asserts that each spills no more than `spilled` bytes and has room for what it shares.
    """
    built = [build(as_served(launch) if served else launch, capability) for launch in launches(call)]
    assert built, "nothing was launched"
    for one in built:
        assert one.spilled <= spilled, f"{one.name} spills {one.spilled} bytes"
        assert one.shared <= SHARED[capability], f"{one.name} takes {one.shared} bytes of shared memory"
    return built
