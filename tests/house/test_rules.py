"""The house's rules that no linter holds: sizes, names, environment, one place for q_len, small imports, claims."""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("kernels", "hedgerow", "services")


def tracked(*folders: str, suffix: str = ".py") -> list[Path]:
    """Files of these folders that git knows or would add, generated code left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = [ROOT / name for name in names if name.endswith(suffix) and "_pb2" not in name]
    return [path for path in paths if path.exists()]


@pytest.mark.parametrize("path", tracked(*PRODUCT, "bench", "deploy", "models"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_room(path: Path) -> None:
    lines = path.read_text().count("\n")
    limit = 350 if path.relative_to(ROOT).parts[0] == "kernels" else 310
    assert lines <= limit, f"{path.relative_to(ROOT)} has {lines} lines, the limit is {limit}"


def test_functions_are_short() -> None:
    long = []
    for path in tracked(*PRODUCT):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                jitted = any(".jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                if lines > 45 and not jitted:  # a kernel is one loop with its layouts
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_no_module_is_named_after_nothing() -> None:
    empty = {"utils", "util", "common", "helpers", "misc", "base"}
    named = [str(path) for path in tracked(*PRODUCT) if path.stem in empty]
    assert not named, named


def test_the_environment_is_read_where_configuration_is_built() -> None:
    allowed = re.compile(r"services/\w+/__main__\.py|hedgerow/cli/\w+\.py|hedgerow/client/_environment\.py")
    readers = [
        str(path.relative_to(ROOT))
        for path in tracked(*PRODUCT)
        if re.search(r"os\.environ|os\.getenv", path.read_text()) and not allowed.fullmatch(str(path.relative_to(ROOT)))
    ]
    assert not readers, f"os.environ is read in {readers}"


def test_budget_plus_one_is_written_once() -> None:
    """An earlier stack sized masks by block_size where budget + 1 was meant: wide trees came out garbled."""
    places = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked(*PRODUCT)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bbudget\)?\s*\+\s*1\b|\b1\s*\+\s*\w*\.?budget\b", line.split("#")[0]) and '"""' not in line
    ]
    assert len(places) == 1, places
    assert places[0].startswith("hedgerow/engine/tree.py"), places


def test_nothing_autotunes() -> None:
    assert not [str(p) for p in tracked(*PRODUCT) if "triton.autotune" in p.read_text()]


def test_kernels_import_is_one_docstring() -> None:
    """Hugging Face probes a package named `kernels`; ours must import cheaply."""
    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


@pytest.mark.parametrize("service", ["gateway", "kvstore"])
def test_slim_services_import_no_torch(service: str) -> None:
    code = (
        f"import sys, services.{service}.__main__; bad = {{'torch', 'numpy', 'transformers'}} & set(sys.modules);"
        "print(sorted(bad)); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_services_do_not_import_transformers() -> None:
    users = [
        str(p.relative_to(ROOT))
        for p in tracked(*PRODUCT)
        if re.search(r"import transformers|from transformers", p.read_text())
    ]
    assert not users, users


def test_grpc_and_protobuf_stay_at_the_edge() -> None:
    edge = re.compile(
        r"services/\w+/(servicer|convert|convert_store|convert_view|peers|store_peer|store_calls)\.py"
        r"|hedgerow/rpc/\w+\.py|hedgerow/client/\w+\.py"
    )
    inside = [
        str(path.relative_to(ROOT))
        for path in tracked(*PRODUCT)
        if re.search(
            r"^\s*(import grpc|from grpc|from google\.(protobuf|rpc)|from hedgerow\.v1|import hedgerow\.v1)",
            path.read_text(),
            re.M,
        )
        and not edge.fullmatch(str(path.relative_to(ROOT)))
    ]
    assert not inside, inside


def test_generated_code_says_so() -> None:
    """`make check` compares it with what protos/ gives."""
    for path in (ROOT / "hedgerow" / "v1").glob("*_pb2.py"):
        assert "Generated by the protocol buffer compiler.  DO NOT EDIT!" in path.read_text()


def test_weights_in_git_are_small() -> None:
    weights = (ROOT / "models").rglob("*.safetensors")
    assert sum(p.stat().st_size for p in weights) <= 40_000_000


def test_nothing_large_is_in_git() -> None:
    large = [
        str(p)
        for p in tracked(".", suffix="")
        if p.is_file() and p.stat().st_size > 2_000_000 and p.suffix != ".safetensors"
    ]
    assert not large, large


def test_no_two_test_files_have_one_name() -> None:
    """pytest cannot collect both in one run, though each passes by itself."""
    names = collections.Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_guide_gives_a_secret_to_a_program_as_an_argument() -> None:
    """Others on the machine can read arguments for as long as the program runs."""
    given = re.compile(
        r"\b(sed|awk|redis-cli|valkey-cli)\b[^|;\n]*(\$\$?\{?\w*(password|secret)|\$\(openssl)", re.IGNORECASE
    )
    guides = [*tracked("docs", suffix=".md"), *tracked("deploy", suffix=".yaml"), ROOT / "README.md"]
    assert [str(path) for path in guides if given.search(path.read_text())] == []
