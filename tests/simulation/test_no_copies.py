"""The simulation drives what is shipped: it loads the services' own modules and holds no second version of any."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.simulation import world

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("hedgerow", "services")
DRIVEN = (
    *(f"services.gateway.{name}" for name in (
        "creating", "endings", "following", "gateway", "leases", "orphans", "outbox", "peers", "repairs", "service",
        "resuming", "servicer", "session", "store_peer", "stream", "table", "takeover", "verifiers",
    )),
    *(f"services.kvstore.{name}" for name in ("index", "owners", "scripts", "service", "servicer", "store", "tail")),
    *(f"services.verifier.{name}" for name in ("loop", "service", "servicer", "streams")),
    *(f"hedgerow.engine.{name}" for name in ("adopt", "inbox", "scheduler", "sequence", "stops", "verifier")),
    *(f"hedgerow.client.{name}" for name in ("_order", "_stream", "_wire")),
    "hedgerow.rpc.interceptors",
    "hedgerow.rpc.status",
)  # fmt: skip


def _bodies(folder: Path) -> dict[str, str]:
    """The longer functions of a folder: what they do, by where they are."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if sum(1 for _ in ast.walk(ast.Module(body, []))) > 40:
                    found["".join(ast.dump(part) for part in body)] = f"{path.relative_to(ROOT)}: {node.name}"
    return found


def test_the_protocol_modules_that_run_are_the_shipped_ones() -> None:
    assert world
    missing = [name for name in DRIVEN if name not in sys.modules]
    assert not missing
    elsewhere = [name for name in DRIVEN if not str(sys.modules[name].__file__).startswith(str(ROOT))]
    assert not elsewhere


def test_no_function_of_the_simulation_is_a_copy_of_a_shipped_one() -> None:
    own = _bodies(Path(__file__).parent)
    for folder in SHIPPED:
        copies = [(own[body], where) for body, where in _bodies(ROOT / folder).items() if body in own]
        assert not copies, copies


def test_the_scripts_that_run_are_the_shipped_ones() -> None:
    assert not list(Path(__file__).parent.rglob("*.lua"))
