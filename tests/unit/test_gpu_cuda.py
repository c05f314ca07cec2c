"""CUDA C++ kernels on a machine without a card: how they are built and found, and what becomes of one that is not."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu import cuda, mla_wide_cuda, moe_few_tiles, moe_many_cuda
from tests.gpu_compile import BIN


class Compiler:
    """NVRTC as `_compile` calls it, without the library."""

    def __init__(self, failed: int = 0) -> None:
        self.failed, self.options = failed, list[bytes]()

    def nvrtcCreateProgram(self, *_: object) -> int:
        return 0

    def nvrtcCompileProgram(self, _program: object, count: int, options: list[bytes]) -> int:
        self.options = [options[i] for i in range(count)]
        return self.failed

    def nvrtcGetProgramLogSize(self, _program: object, size: object) -> None:
        size._obj.value = 9  # type: ignore[attr-defined]

    def nvrtcGetProgramLog(self, _program: object, room: object) -> None:
        room.value = b"line 7: x"  # type: ignore[attr-defined]

    def nvrtcGetCUBINSize(self, _program: object, size: object) -> None:
        size._obj.value = 4  # type: ignore[attr-defined]

    def nvrtcGetCUBIN(self, _program: object, room: object) -> None:
        room.raw = b"code"  # type: ignore[attr-defined]

    def nvrtcDestroyProgram(self, _program: object) -> None:
        return None


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(cuda, "BUILDS", tmp_path / "builds")
    return tmp_path / "builds"


def test_an_image_finds_what_was_built_with_it(monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    compiler = Compiler()
    monkeypatch.setattr(cuda, "_nvrtc", lambda: compiler)
    cuda.main()
    assert compiler.options == [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    assert [path.read_bytes() for path in elsewhere.iterdir()] == [b"code"] * len(cuda.SOURCES)
    monkeypatch.setattr(cuda, "_nvrtc", lambda: None)
    assert [cuda.build(source) for source in cuda.SOURCES] == [b"code"] * len(cuda.SOURCES)


def test_a_build_of_another_text_is_not_taken() -> None:
    assert cuda.built("mla_prefix_wide", b"one") != cuda.built("mla_prefix_wide", b"two")


def test_what_the_compiler_says_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_nvrtc", lambda: Compiler(failed=6))
    with pytest.raises(RuntimeError, match=r"mla_prefix_wide\.cu: line 7: x"):
        cuda.build("mla_prefix_wide")


def test_without_a_compiler_there_is_none_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "_nvrtc", lambda: None)
    assert cuda.build("mla_prefix_wide") is None
    assert "the Triton form of mla_prefix_wide is used" in caplog.text
    with pytest.raises(SystemExit, match="no NVRTC"):
        cuda.main()


def test_a_build_that_fails_leaves_the_work_to_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "_nvrtc", lambda: Compiler(failed=6))
    assert cuda.kernel("mla_prefix_wide", 7, 384, 1024) is None
    assert "mla_prefix_wide.cu: line 7: x; the Triton form of mla_prefix_wide is used" in caplog.text
    cuda.kernel.cache_clear()


def test_tensors_without_a_card_are_left_to_others() -> None:
    q = torch.zeros(2, 8, 576, dtype=torch.bfloat16)
    assert not mla_wide_cuda.prefix_wide_cuda(q, q, [q] * 8, 512, 132, 64, early=False)
    assert moe_many_cuda.many_cuda(q.device) is None
    chosen = torch.zeros(4, 8, dtype=torch.int32)
    assert not moe_few_tiles.few_tiles_cuda(chosen, 16, 8, (chosen,) * 3, False, 16)


PRODUCTS = {  # of the matrix unit
    "mla_prefix_wide": {"HGMMA.64x64x16.F32.BF16": 36, "HGMMA.64x256x16.F32.BF16": 4},  # scores of 64 keys; half of P V
    "moe_many": {"HMMA.16816.F32.BF16": 2 * 16 * sum(range(2, 9))},  # a step's of each count of pairs, in two kernels
    "moe_few_tiles": {},
}
# Bytes: of 128 sums under way a few, where a step begins.
SPILLED = {"mla_prefix_wide": 0, "moe_many": 96, "moe_few_tiles": 0}


@pytest.mark.parametrize("source", cuda.SOURCES)
def test_compiled_without_spills(source: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    out = tmp_path / "out.cubin"
    target = "arch=compute_90a,code=sm_90a"
    text = cuda.HERE / f"{source}.cu"
    done = subprocess.run(
        [compiler, "-gencode", target, "-cubin", "-Xptxas", "-v", "-o", str(out), str(text)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    spilled = re.findall(r"(\d+) bytes spill stores", done.stderr)
    assert spilled
    assert all(int(size) <= SPILLED[source] for size in spilled), done.stderr
    assert "serialized" not in done.stderr
    code = subprocess.run([BIN / "nvdisasm", out], capture_output=True, text=True, timeout=60, check=True).stdout
    found = Counter(word for word in code.split() if word.startswith(("HGMMA", "HMMA", "STL", "LDL")))
    assert {name: found[name] for name in PRODUCTS[source]} == PRODUCTS[source]
    if not SPILLED[source]:
        assert not found["STL"]
        assert not found["LDL"]
