"""Tool declarations: the OpenAI `tools` array, checked before anything is rendered.

What is checked is what a declaration needs to mean anything: names, and a JSON Schema whose keywords have values of
their kinds and whose references lead somewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from hedgerow import strict_json
from hedgerow.errors import InvalidRequest
from services.gateway.limits import TOOL_BYTES, TOOL_DEPTH, TOOL_NAME, TOOLS, brief

Schema = Mapping[str, Any] | bool
FIELD = "chat.tools_json"
_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_ONE, _MANY, _NAMED = (
    ("additionalProperties", "not"),
    ("anyOf", "oneOf", "allOf"),
    ("properties", "$defs", "definitions"),
)
_TEXTS, _NUMBERS = ("description", "title", "pattern", "format"), ("minimum", "maximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")


def declared(tools_json: str) -> list[dict[str, Any]]:
    """The tools of a request, keys in order at every level, as the family's tokenizers sort them; "": none.

    Raises InvalidRequest with the place inside of the array, what is there and what may be.
    """
    if not tools_json:
        return []
    tools = _parsed(tools_json)
    if not isinstance(tools, list):
        _refuse(FIELD, tools, "a JSON array of tools")
    if len(tools) > TOOLS:
        raise InvalidRequest(FIELD, f"{len(tools)} tools", f"at most {TOOLS} tools")
    names: dict[str, int] = {}
    for i, tool in enumerate(tools):
        _check_depth(f"{FIELD}[{i}]", tool, TOOL_DEPTH)
        name = _check_tool(f"{FIELD}[{i}]", tool)
        if name in names:
            raise InvalidRequest(f"{FIELD}[{i}].function.name", name, f"another name than that of tool {names[name]}")
        names[name] = i
    return cast(list[dict[str, Any]], _in_order(tools))


def as_json(value: object) -> str:
    """Compact JSON, characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _parsed(text: str) -> Any:
    try:
        return strict_json.loads(text)
    except ValueError as error:
        raise InvalidRequest(FIELD, brief(text), f"a JSON array of tools; {error}") from None


def _check_tool(where: str, tool: Any) -> str:
    if not isinstance(tool, dict):
        _refuse(where, tool, "an object with type and function")
    if tool.get("type") != "function":
        _refuse(f"{where}.type", tool.get("type"), '"function"')
    function = tool.get("function")
    if not isinstance(function, dict):
        _refuse(f"{where}.function", function, "an object with name, description and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        _refuse(f"{where}.function.name", name, f"a name, {TOOL_NAME.pattern}")
    if not isinstance(function.get("description"), str | None):
        _refuse(f"{where}.function.description", function["description"], "a text")
    size = len(as_json(tool).encode("utf-8", "surrogatepass"))
    if size > TOOL_BYTES:
        raise InvalidRequest(where, f"{size} bytes", f"at most {TOOL_BYTES} bytes as JSON")
    parameters = function.get("parameters")
    if parameters is not None:
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            _refuse(f"{where}.function.parameters", parameters, "a JSON Schema of an object")
        _check_schema(f"{where}.function.parameters", parameters, parameters)
    return str(name)


def _check_depth(where: str, value: Any, left: int) -> None:
    if left < 0:
        raise InvalidRequest(where, "deeper values", f"nested at most {TOOL_DEPTH} levels deep")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(where, each, left - 1)


def _check_schema(where: str, schema: Any, root: Mapping[str, Any]) -> None:
    """One schema and those inside of it; `root` is where references begin."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        _refuse(where, schema, "a JSON Schema: an object, true or false")
    _check_type(where, schema)
    _check_values(where, schema)
    if "$ref" in schema and not _leads_somewhere(schema["$ref"], root):
        _refuse(f"{where}.$ref", schema["$ref"], 'a place in this schema, as "#/$defs/NAME"')
    for key in _NAMED:
        inner = schema.get(key, {})
        if not isinstance(inner, dict):
            _refuse(f"{where}.{key}", inner, "an object of JSON Schemas")
        for name, each in inner.items():
            _check_schema(f"{where}.{key}.{brief(name)}", each, root)
    for key in _MANY:
        if key in schema:
            _check_list(f"{where}.{key}", schema[key])
            for i, each in enumerate(schema[key]):
                _check_schema(f"{where}.{key}[{i}]", each, root)
    items = schema.get("items", True)
    for i, each in enumerate(items if isinstance(items, list) else [items]):
        _check_schema(f"{where}.items[{i}]" if isinstance(items, list) else f"{where}.items", each, root)
    for key in _ONE:
        if key in schema:
            _check_schema(f"{where}.{key}", schema[key], root)


def _check_type(where: str, schema: Mapping[str, Any]) -> None:
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        _check_list(f"{where}.type", kind)
    for each in kind if isinstance(kind, list) else [kind]:
        if each not in _TYPES:
            _refuse(f"{where}.type", each, f"one of {', '.join(_TYPES)}")


def _check_values(where: str, schema: Mapping[str, Any]) -> None:
    for key in _TEXTS:
        if not isinstance(schema.get(key, ""), str):
            _refuse(f"{where}.{key}", schema[key], "a text")
    for key in (*_NUMBERS, *_COUNTS):
        value = schema.get(key, 0)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (key in _COUNTS and (value < 0 or value != int(value))):
            _refuse(f"{where}.{key}", value, "a whole number, 0 or more" if key in _COUNTS else "a number")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        _refuse(f"{where}.required", required, "an array of names")
    if "enum" in schema:
        _check_list(f"{where}.enum", schema["enum"])


def _check_list(where: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        _refuse(where, value, "an array that is not empty")


def _leads_somewhere(reference: Any, root: Mapping[str, Any]) -> bool:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return False
    at: Any = root
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping) and name in at:
            at = at[name]
        elif isinstance(at, Sequence) and not isinstance(at, str) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        else:
            return False
    return True


def _in_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_order(each) for key, each in sorted(value.items())}
    return [_in_order(each) for each in value] if isinstance(value, list) else value


def _refuse(where: str, value: object, limit: str) -> NoReturn:
    if isinstance(value, list | dict):  # which may be deep
        raise InvalidRequest(where, "an array" if isinstance(value, list) else "an object", limit)
    raise InvalidRequest(where, brief(value if isinstance(value, str) else as_json(value)), limit)
