"""One call of a tool as the family writes it: what its header names, and whether its arguments are arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from hedgerow import strict_json
from hedgerow.errors import InvalidRequest
from services.gateway.limits import TOOL_NAME
from services.gateway.tools import declared

HEADER = 256  # characters of a header, the longest name and a counter beside it
_HEADER = re.compile(rf"(?:functions\.)?({TOOL_NAME.pattern}):\d+")
_COUNTER = re.compile(r"\d+")
# A tool that the prompt declares as TypeScript, and a parameter of it. Comments begin with //, deeper fields deeper.
_TOOL = re.compile(r"type (\S+) = \(_: (\{|\{\}\) => any;|\w+\) => any;)")
_PARAMETER = re.compile(r"  ([^\s/\[][^:?]*)(\??): ")


class Parameters(NamedTuple):
    """The names that a tool takes, and those that it needs."""

    known: frozenset[str]
    required: frozenset[str]

    def fit(self, given: frozenset[str]) -> bool:
        """Whether a call with these names may be one of this tool."""
        return self.required <= given <= self.known


Tools = Mapping[str, Parameters]


def name_in(header: str, tools: Tools) -> str | None:
    """The function that a header names: `functions.{name}:{n}`, `{name}:{n}`, or a declared name alone.

    "": it is a bare counter, and the arguments have to tell. None: it names nothing.
    """
    header = header.strip()
    if _COUNTER.fullmatch(header):
        return ""
    if found := _HEADER.fullmatch(header):
        return found[1]
    alone = header.removeprefix("functions.")
    return alone if alone in tools else None


def parsed(arguments: str) -> tuple[dict[str, Any] | None, str]:
    """The JSON object that arguments are, and "", or None and why they are none."""
    try:
        value = strict_json.loads(arguments)
    except ValueError as error:
        return None, f"arguments are not JSON: {error}"
    return (value, "") if isinstance(value, dict) else (None, "arguments are no JSON object")


def tool_of(arguments: Mapping[str, Any], tools: Tools) -> str | None:
    """The one tool that could be called with these arguments; None: there is none, or several."""
    names = frozenset(arguments)
    fitting = [name for name, parameters in tools.items() if parameters.fit(names)]
    return fitting[0] if len(fitting) == 1 else None


def declared_in(text: str) -> Tools:
    """The tools that a prompt's `tool_declare` turn declares, as TypeScript or as JSON; it may be any text."""
    if text.startswith("["):
        try:
            tools = [tool["function"] for tool in declared(text)]
        except InvalidRequest:
            return {}
        return {tool["name"]: _parameters(tool.get("parameters") or {}) for tool in tools}
    found: dict[str, tuple[set[str], set[str]]] = {}
    known, required = set[str](), set[str]()
    for line in text.split("\n"):
        if tool := _TOOL.fullmatch(line):
            known, required = found.setdefault(tool[1], (set(), set()))
        elif field := _PARAMETER.match(line):
            known.add(field[1])
            if not field[2]:
                required.add(field[1])
        elif not line.startswith("  "):
            known, required = set(), set()
    return {name: Parameters(frozenset(known), frozenset(required)) for name, (known, required) in found.items()}


def _parameters(schema: Mapping[str, Any]) -> Parameters:
    return Parameters(frozenset(schema.get("properties", {})), frozenset(schema.get("required", [])))
