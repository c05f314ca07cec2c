"""Builds the compiled engine with the machine's C compiler, once, and finds it again.

    path = build(folder)            # the library; raises BuildError where it cannot be had
    python -m kernels.cpu.build     # the same at set-up, so that no service has to wait for it
    python -m kernels.cpu.build --prebuilt FOLDER   # one for each instruction set, found where no compiler is

The file's name is a SHA-256 of everything that decides its contents: sources, flags, instruction set, compiler and its
version. Flags are pinned and fused multiply-adds are written out in the sources, so that no choice of compiler, level
of optimisation or instruction set changes a bit of a result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from hedgerow.errors import HedgerowError

InstructionSet = Literal["avx512", "avx2", "baseline"]

HERE = Path(__file__).resolve().parent
BUILDS = HERE.parents[1] / ".hedgerow" / "engine"  # where libraries lie, unless a caller names another folder
SOURCES = ("product.c", "pool.c", "plan.c", "target.c", "drafter.c", "walk.c", "trees.c", "pairs.c")
FLAGS = ("-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-fPIC", "-shared")
ISA_FLAGS: dict[InstructionSet, tuple[str, ...]] = {
    "avx512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "avx2": ("-mavx2", "-mfma"),
    "baseline": (),
}
COMPILERS = ("cc", "gcc", "clang")
PATIENCE = 300  # seconds that a compiler may take


class BuildError(HedgerowError):
    """The engine cannot be built here; `why` is one line."""

    reason = "BUILD_FAILED"

    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(why, metadata={"detail": detail})
        self.why, self.detail = why, detail


def build(
    folder: Path = BUILDS,
    *,
    compiler: str | None = None,
    isa: InstructionSet | None = None,
    level: str = "-O2",
    defines: Sequence[str] = (),
) -> Path:
    """The library below `folder`, compiled where it is not there whole.

    compiler: its name or path; None: a prebuilt library, else the first of cc, gcc and clang. isa: None is the best
    that this CPU has. Of several processes one builds and the others wait; a library appears under its name complete
    or not at all.
    """
    flags = (*FLAGS, level, *ISA_FLAGS[isa or isa_of_this_cpu()], *(f"-D{name}" for name in defines))
    if compiler is None and is_whole(prebuilt(folder, flags)):
        return prebuilt(folder, flags)
    found = find_compiler(compiler)
    path = folder / f"hedgerow-{digest(flags, version_of(found))[:32]}.so"
    if is_whole(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder), room_in(folder) as room:
            if not is_whole(path):  # nobody has built it meanwhile
                fresh = Path(room) / path.name
                compile_all(found, flags, fresh)
                seal_of(fresh).write_text(hash_of(fresh))
                os.replace(fresh, path)
                os.replace(seal_of(fresh), seal_of(path))
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror}", str(error)) from None
    return path


def prebuilt(folder: Path, flags: Sequence[str]) -> Path:
    """Where a library lies that another machine built, say at an image's build: no compiler is in its name."""
    return folder / f"prebuilt-{digest(flags, '')[:32]}.so"


def prebuild(folder: Path) -> list[Path]:
    """Builds for every instruction set that machines of this kind may have. Raises BuildError."""
    folder.mkdir(parents=True, exist_ok=True)
    x86 = platform.machine() not in ("aarch64", "arm64")
    sets: tuple[InstructionSet, ...] = ("avx512", "avx2") if x86 else ("baseline",)
    paths = []
    for isa in sets:
        flags = (*FLAGS, "-O2", *ISA_FLAGS[isa])
        paths.append(prebuilt(folder, flags))
        compile_all(find_compiler(), flags, paths[-1])
        seal_of(paths[-1]).write_text(hash_of(paths[-1]))
    return paths


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While the block runs no other process is in such a block of this folder. A process that dies lets go of it."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def room_in(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder to build in. Those of processes that ended while they built are removed: this one is alone here."""
    for left in folder.glob("building-*"):
        shutil.rmtree(left, ignore_errors=True)
    return tempfile.TemporaryDirectory(dir=folder, prefix="building-")


def find_compiler(name: str | None = None) -> str:
    """Path of a C compiler."""
    for candidate in COMPILERS if name is None else (name,):
        found = shutil.which(candidate)
        if found is not None:
            return found
    raise BuildError("there is no C compiler" if name is None else f"there is no compiler {name!r}")


def version_of(compiler: str) -> str:
    """Name and version as the compiler tells them."""
    return run([compiler, "--version"]).split("\n", 1)[0]


def compile_all(compiler: str, flags: Sequence[str], target: Path) -> None:
    run([compiler, *flags, *(str(HERE / name) for name in SOURCES), "-o", str(target), "-lm", "-lpthread"])
    if not target.is_file():
        raise BuildError(f"{compiler} wrote no library")


def run(command: list[str]) -> str:
    """Its output. BuildError with the first line of its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {type(error).__name__}", str(error)) from None
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no output"]
        )
        raise BuildError(f"{command[0]} failed: {lines[0][:200]}", done.stderr)
    return done.stdout


def digest(flags: Sequence[str], compiler: str) -> str:
    """SHA-256 over what decides the library's contents."""
    parts = [compiler, platform.machine(), *flags]
    files = sorted([*HERE.glob("*.h"), *(HERE / name for name in SOURCES)])
    return hashlib.sha256("\0".join(parts).encode() + b"".join(b"\0" + path.read_bytes() for path in files)).hexdigest()


def is_whole(path: Path) -> bool:
    """Whether the library is as it was built: loading a damaged one could end the process."""
    try:
        return seal_of(path).read_text() == hash_of(path)
    except (OSError, ValueError):
        return False


def seal_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def cpu_features() -> frozenset[str]:
    """Features that the operating system lets programs use; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def isa_of_this_cpu() -> InstructionSet:
    """BuildError where a multiply-add would be a call of the C library, slower than PyTorch."""
    best = best_isa(cpu_features())
    if best == "baseline" and platform.machine() not in ("aarch64", "arm64"):
        raise BuildError("this CPU has no AVX2 with FMA, or does not say so")
    return best


def best_isa(features: frozenset[str]) -> InstructionSet:
    """The widest instruction set of the three that has a form here."""
    if not {"avx2", "fma"} <= features:
        return "baseline"
    return "avx512" if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= features else "avx2"


def main(argv: Sequence[str] = ()) -> int:
    """Builds into `BUILDS`, or says why not: then the engine is PyTorch's, which is no failure."""
    if argv[:1] == ["--prebuilt"] and len(argv) == 2:
        print("compiled engine:", *prebuild(Path(argv[1])))
        return 0
    try:
        print(f"compiled engine: {build()}")
    except BuildError as error:
        print(f"compiled engine: {error.why}; PyTorch will serve", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
