"""Single services as processes, without the rest of the stack."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hedgerow.cli.child import Backoff, Child, Command

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def started(module: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Child]:
    """`python -m module arguments`, ready; stopped at the end."""
    command = [sys.executable, "-m", module, *arguments]
    child = Child(Command(module, command, {**os.environ, **(env or {})}, ROOT), lambda name, line: None, Backoff())
    child.start()
    try:
        child.wait_ready(60)
        yield child
    except BaseException:
        print(f"--- {module}", *child.lines()[-30:], sep="\n")
        raise
    finally:
        child.stop(10)


@contextmanager
def service(name: str, **settings: object) -> Iterator[Child]:
    """`python -m services.name` with HEDGEROW_* settings."""
    env = {f"HEDGEROW_{key.upper()}": str(value) for key, value in settings.items()}
    with started(f"services.{name}", env=env) as child:
        yield child


def address(child: Child) -> str:
    """Where a child that is ready listens."""
    return f"127.0.0.1:{child.wait_ready(60).port}"
