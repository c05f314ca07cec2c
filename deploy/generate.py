"""Generates hedgerow/v1 from protos/, in an environment of its own. `--check` compares instead of writing.

grpcio-tools 1.76 stamps its output with protobuf 6.31.1, the oldest runtime that this project claims; generated code
never loads on a runtime older than its generator (protobuf.dev, "Cross-Version Runtime Guarantee"), so the generator
stays at that version while the runtime moves on.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-protos"
PYTHON = VENV / "bin" / "python"
TOOLS = ["grpcio-tools==1.76.0", "grpcio==1.76.0", "protobuf==6.31.1"]
PROTOS = sorted((ROOT / "protos").glob("hedgerow/v1/*.proto"))


def ensure_tools() -> None:
    """Installs the pinned generator once."""
    stamp = VENV / ".tools"
    if stamp.exists() and stamp.read_text() == " ".join(TOOLS):
        return
    print(f"protos: installing {', '.join(TOOLS)} (about 10 MB)", flush=True)
    venv.create(VENV, with_pip=True, clear=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, *TOOLS], check=True, stderr=subprocess.DEVNULL)
    stamp.write_text(" ".join(TOOLS))


def generate(out: Path) -> dict[str, bytes]:
    """Generated files by their path below `out`; protos without a service leave no _pb2_grpc behind."""
    flags = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    command = [str(PYTHON), "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *flags, *map(str, PROTOS)]
    subprocess.run(command, check=True)
    for proto in PROTOS:
        if "\nservice " not in proto.read_text():
            (out / "hedgerow" / "v1" / f"{proto.stem}_pb2_grpc.py").unlink()
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*_pb2*.py*"))}


def main() -> None:
    ensure_tools()
    with tempfile.TemporaryDirectory() as folder:
        fresh = generate(Path(folder))
    held = {str(p.relative_to(ROOT)): p.read_bytes() for p in sorted((ROOT / "hedgerow" / "v1").glob("*_pb2*.py*"))}
    different = sorted(name for name in fresh.keys() | held.keys() if fresh.get(name) != held.get(name))
    if "--check" in sys.argv:
        if different:
            sys.exit(f"protos: generated code is stale, run `make protos`: {', '.join(different)}")
        return
    for name in different:
        if name in fresh:
            (ROOT / name).write_bytes(fresh[name])
        else:
            (ROOT / name).unlink()
        print(f"protos: {name}")


if __name__ == "__main__":
    main()
