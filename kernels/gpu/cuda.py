"""Kernels in CUDA C++, for what Triton has no words for: built by NVRTC, which comes with torch for CUDA, and launched
through the driver.

    python -m kernels.gpu.cuda    # builds them all, without a card: when an image is made

Where no build is found, a kernel is built before its first launch (two seconds). Where there is no NVRTC either, it is
not there, and its Triton form, which has the same bits, serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
BUILDS = HERE.parents[1] / ".hedgerow" / "cuda"
SOURCES = ("mla_prefix_wide", "moe_many", "moe_few_tiles")
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
SHARED_LIMIT, SERIALIZED = 8, 6  # CUfunction_attribute; CUlaunchAttributeID
BFLOAT16, SWIZZLE_128B = 9, 3  # CUtensorMapDataType, CUtensorMapSwizzle

log = logging.getLogger(__name__)


class Map(ctypes.Structure):
    """CUtensorMap: how the copy engine reads a tensor."""

    _fields_ = (("words", c_uint64 * 16),)


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", c_uint),
    )


class Kernel(NamedTuple):
    """A function on one device."""

    function: c_void_p
    threads: int
    shared: int  # bytes a program, all of it dynamic

    def launch(self, programs: int, arguments: Sequence[Any]) -> None:
        """On torch's current stream, as programmatic dependent launch. `arguments`: ctypes values."""
        follows = Attribute(SERIALIZED, 0, (c_int * 16)(1))
        stream = torch.cuda.current_stream().cuda_stream
        sizes = ((c_uint * 3)(programs, 1, 1), (c_uint * 3)(self.threads, 1, 1), self.shared)
        config = Config(*sizes, stream, ctypes.pointer(follows), 1)
        places = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        _call("cuLaunchKernelEx", byref(config), self.function, places, None)


@cache
def kernel(source: str, device: int, threads: int, shared: int, name: str = "") -> Kernel | None:
    """`name`, or what is called as it, of <source>.cu on this device; None where there is none.

    The first time not while a graph is captured.
    """
    try:
        code = _code(source)
        return None if code is None else _load(code, name or source, device, threads, shared)
    except RuntimeError as error:
        log.warning("%s; the Triton form of %s is used, which is slower", error, source)
        return None


@cache
def _code(source: str) -> bytes | None:
    """What several kernels of one source share."""
    return build(source)


def _load(code: bytes, name: str, device: int, threads: int, shared: int) -> Kernel:
    module, function = c_void_p(), c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context the current one
        _call("cuModuleLoadData", byref(module), code)
        _call("cuModuleGetFunction", byref(function), module, name.encode())
        _call("cuFuncSetAttribute", function, SHARED_LIMIT, shared)
    return Kernel(function, threads, shared)


def tensor_map(matrix: torch.Tensor, lines: int, groups: int) -> Map:
    """Of a bf16 matrix, in boxes of `lines` rows and `groups` groups of 64 columns, a group behind the other; at
    (0, row, group). Rows that are not there are read as zeros.
    """
    room = (ctypes.c_char * (ctypes.sizeof(Map) + 64))()
    at = ctypes.addressof(room) + 63 & ~63
    made = Map.from_buffer(room, at - ctypes.addressof(room))
    height, width = matrix.shape
    _call(
        "cuTensorMapEncodeTiled", byref(made), BFLOAT16, 3, c_void_p(matrix.data_ptr()),
        (c_uint64 * 3)(64, height, width // 64), (c_uint64 * 2)(width * 2, 128), (c_uint * 3)(64, lines, groups),
        (c_uint * 3)(1, 1, 1), 0, SWIZZLE_128B, 0, 0,
    )  # fmt: skip
    return made


def build(source: str) -> bytes | None:
    """Machine code of <source>.cu: the build that lies there for this text, else a new one; None without NVRTC."""
    text = (HERE / f"{source}.cu").read_bytes()
    path = built(source, text)
    if path.exists():
        return path.read_bytes()
    library = _nvrtc()
    if library is None:
        log.warning("no NVRTC for this torch: the Triton form of %s is used, which is slower", source)
        return None
    return _compile(library, text, source)


def built(source: str, text: bytes) -> Path:
    """Where the build of this text lies."""
    digest = hashlib.sha256(text + " ".join(OPTIONS).encode()).hexdigest()
    return BUILDS / f"{source}-{digest[:32]}.cubin"


def _compile(library: ctypes.CDLL, text: bytes, name: str) -> bytes:
    program, size = c_void_p(), c_size_t()
    if library.nvrtcCreateProgram(byref(program), text, f"{name}.cu".encode(), 0, None, None):
        raise RuntimeError(f"NVRTC makes no program of {name}.cu")
    options = (c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    failed = library.nvrtcCompileProgram(program, len(OPTIONS), options)
    library.nvrtcGetProgramLogSize(program, byref(size))
    said = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, said)
    if failed:
        raise RuntimeError(f"{name}.cu: {said.value.decode(errors='replace')}")
    library.nvrtcGetCUBINSize(program, byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    library.nvrtcDestroyProgram(byref(program))
    return code.raw


def _libraries() -> Iterator[str]:
    """Where NVRTC may be: the system's, or the wheels' that torch depends on."""
    major = (torch.version.cuda or "12").split(".")[0]
    yield f"libnvrtc.so.{major}"
    wheels = Path(torch.__file__).resolve().parents[1] / "nvidia"
    yield from map(str, sorted(wheels.glob(f"*/lib/libnvrtc.so.{major}")))


@cache
def _nvrtc() -> ctypes.CDLL | None:
    for name in _libraries():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """A call of the driver; RuntimeError with its name for the failure."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        said = c_char_p()
        _driver().cuGetErrorName(code, byref(said))
        raise RuntimeError(f"{name}: {(said.value or b'unknown').decode()}")


def main() -> None:
    """Builds every source into BUILDS."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        code = build(source)
        if code is None:
            raise SystemExit("there is no NVRTC")
        path = built(source, (HERE / f"{source}.cu").read_bytes())
        path.write_bytes(code)
        print(f"{path}: {len(code)} bytes")


if __name__ == "__main__":
    main()
