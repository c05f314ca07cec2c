"""Tool declarations as text: TypeScript, in the form that K2.5 and K2.6 were trained on.

The form is that of the published `tool_declaration_ts.py`, character by character. What it cannot say (a schema of
`oneOf`, say, or without a type) it refuses for the whole array, and the template shows JSON then; so do we.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.gateway.tools import Schema

INDENT = "  "
_SHOWN = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION = {"integer": "number", "object": "{}", "array": "Array<any>"}
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,),
}  # fmt: skip


class Inexpressible(Exception):
    """This form has no word for what a schema says."""


def typescript(tools: Sequence[Mapping[str, Any]]) -> str:
    """Checked tools, their keys in order, as one text. Raises Inexpressible."""
    functions = "\n".join(_function(tool["function"]) for tool in tools)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"


def _function(function: Mapping[str, Any]) -> str:
    parameters, found = function.get("parameters") or {}, _References()
    found.look_into_object(parameters)
    lines = []
    takes = _object(parameters, "")
    if found.root:
        takes = "parameters"
        fields = ",\n".join(_fields(parameters, INDENT))
        lines.append(f"interface {takes} {{\n{fields}\n}}" if fields else f"interface {takes} {{}}")
    for name, schema in list(found.definitions.items()):
        if isinstance(schema, bool):
            raise Inexpressible(name)
        found.look_into(schema)
        about = schema.get("description", "")
        lines += [_comment(about, "")] if about else []
        lines.append(f"interface {name} {_type(schema, '')}")
    if function.get("description"):
        lines.append(_comment(function["description"], ""))
    return "\n".join([*lines, f"type {function['name']} = (_: {takes}) => any;"])


class _References:
    """What references lead to, in the order in which a reader meets it. Looking raises Inexpressible."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self.root = False

    def look_into(self, schema: Schema) -> None:
        if isinstance(schema, bool) or not schema:
            return
        if "$ref" in schema:
            self._follow(schema["$ref"])
        elif "anyOf" in schema:
            self._look_into_all(schema["anyOf"])
        elif "enum" in schema:
            _check_enum(schema)
        elif schema.get("type") == "object":
            self.look_into_object(schema)
        elif schema.get("type") == "array":
            items = schema.get("items") or {}
            if isinstance(items, list):
                raise Inexpressible("items")
            self.look_into(items)
        elif "type" not in schema:
            raise Inexpressible("no type")

    def look_into_object(self, schema: Mapping[str, Any]) -> None:
        self.definitions |= schema.get("$defs", {})
        self.look_into(schema.get("additionalProperties", True))
        self._look_into_all(schema.get("properties", {}).values())

    def _look_into_all(self, schemas: Iterable[Schema]) -> None:
        for schema in schemas:
            self.look_into(schema)

    def _follow(self, reference: str) -> None:
        if reference == "#":
            self.root = True
        elif not reference.startswith("#/$defs/") or _last(reference) not in self.definitions:
            raise Inexpressible(reference)


def _check_enum(schema: Mapping[str, Any]) -> None:
    """A declared type that the values are not of; of two types one has to be null."""
    kinds = schema.get("type", [])
    if isinstance(kinds, list):
        if len(kinds) > 2 or (len(kinds) == 2 and "null" not in kinds):
            raise Inexpressible("enum of several types")
        kinds = next((kind for kind in kinds if kind != "null"), "null" if kinds else "")
    allowed = _KINDS.get(kinds)
    if allowed and not all(value is None or isinstance(value, allowed) for value in schema["enum"]):
        raise Inexpressible("enum of another type")


def _type(schema: Schema, indent: str) -> str:
    """The type's name; of what has been looked into."""
    if isinstance(schema, bool) or not schema:
        return "null" if schema is False else "any"
    if "$ref" in schema:
        return "parameters" if schema["$ref"] == "#" else _last(schema["$ref"])
    if "anyOf" in schema:
        return " | ".join(_type(each, indent) for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    kind = schema["type"]
    if isinstance(kind, list):
        return " | ".join(_UNION.get(str(each), str(each)) for each in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return _array(schema.get("items") or {}, indent)
    return "number" if kind == "integer" else str(kind)


def _object(schema: Mapping[str, Any], indent: str) -> str:
    required = schema.get("required", [])
    names = sorted(schema.get("properties", {}), key=lambda name: name not in required)
    fields = _fields(schema, indent + INDENT, names)
    others = schema.get("additionalProperties")
    if others is not None:
        kind = "any" if others is True else "never" if others is False else _type(others, indent + INDENT)
        fields.append(f"{indent}{INDENT}[k: string]: {kind}")
    inside = ",\n".join(fields)
    return f"{{\n{inside}\n{indent}}}" if fields else "{}"


def _fields(schema: Mapping[str, Any], indent: str, names: Sequence[str] | None = None) -> list[str]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return [
        f"{_about(properties[name], indent)}{_default(properties[name], indent)}"
        f"{indent}{name}{'' if name in required else '?'}: {_type(properties[name], indent)}"
        for name in (properties if names is None else names)
    ]


def _array(items: Schema, indent: str) -> str:
    about = _about(items, indent + INDENT)
    if not about:
        return f"Array<{_type(items, indent)}>"
    return f"Array<\n{about}{indent}{INDENT}{_type(items, indent + INDENT)}\n{indent}>"


def _about(schema: Schema, indent: str) -> str:
    """Comment lines: the description, and what limits the value."""
    if isinstance(schema, bool):
        return ""
    lines = [_comment(schema["description"], indent)] if schema.get("description") else []
    kind = schema.get("type")
    if isinstance(kind, str) and not {"$ref", "anyOf", "enum"} & schema.keys():
        limits = [f"{key}: {schema[key]}" for key in _SHOWN.get(kind, ()) if key in schema]
        lines += [f"{indent}// {', '.join(limits)}"] if limits else []
    return "".join(f"{line}\n" for line in lines)


def _default(schema: Schema, indent: str) -> str:
    value = None if isinstance(schema, bool) else schema.get("default")
    if value is None:
        return ""
    shown = repr(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)
    return f"{indent}// Default: {shown}\n"


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


def _last(reference: str) -> str:
    return reference.split("/")[-1]
