"""Renders the chat template of a model folder: a process of its own, with no environment and little memory.

Standard input: one JSON line with `template` and `seconds`, then one a request, with what the template sees. Standard
output: one JSON line each, `{"text": ...}` or `{"error": ...}`. Whoever started it ends it when it takes too long; the
alarm does where nobody is left who could.
Run as a script, isolated (`python -I`): it imports nothing of this project.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = (
    1 << 29
)  # bytes of address space: an interpreter takes less than a tenth, and a template may ask for any amount


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson` as chat templates expect it: characters as they are, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> NoReturn:
    """What templates call as `raise_exception`."""
    raise TemplateError(message)


def environment() -> ImmutableSandboxedEnvironment:
    """Whitespace, filters and names as Hugging Face's `apply_chat_template` has them."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    return made


def main() -> None:
    """Answer requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    template: Any = None
    seconds = 60
    for line in sys.stdin.buffer:
        signal.alarm(seconds)
        try:
            given = json.loads(line)
            if template is None:
                template, seconds = environment().from_string(given["template"]), given["seconds"]
                answer = {"text": ""}
            else:
                answer = {"text": template.render(**given)}
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY >> 20} MiB"}
        except RecursionError:
            answer = {"error": "it calls itself too deeply"}
        except Exception as error:  # noqa: BLE001  whatever a template does wrong, its caller is told
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.alarm(0)


if __name__ == "__main__":
    main()
