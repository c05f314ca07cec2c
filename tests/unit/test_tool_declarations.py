"""Tools: what is refused and where, and the TypeScript of every kind of schema.

Expected texts follow the published `tool_declaration_ts.py` of K2.5 and K2.6 (MoonshotAI/Kimi-Vendor-Verifier), read by
hand; the first two are those of lightseekorg/smg's tests of its own port.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hedgerow.errors import InvalidRequest
from services.gateway.declarations import Inexpressible, typescript
from services.gateway.limits import TOOL_BYTES, TOOL_DEPTH, TOOLS
from services.gateway.tools import as_json, declared


def tool(parameters: Any = None, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **function}}


def of(properties: Any, **schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **schema}


def text(*tools: Any) -> str:
    return typescript(declared(json.dumps(tools)))


def body(parameters: Any) -> str:
    """What stands between the braces of the namespace."""
    whole = text(tool(parameters))
    begin, end = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert whole.startswith(begin)
    assert whole.endswith(end)
    return whole[len(begin) : -len(end)]


def takes(fields: str) -> str:
    return f"type f = (_: {{\n{fields}\n}}) => any;"


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def test_whole_texts() -> None:
    inner = of({"name": {"type": "string"}, "age": {"type": "integer"}}, required=["name"])
    user = tool(of({"user": inner}, required=["user"]), name="create_user", description="Create a new user record.")
    assert text(user) == (
        "# Tools\n\n## functions\nnamespace functions {\n// Create a new user record.\ntype create_user = (_: {\n"
        "  user: {\n    name: string,\n    age?: number\n  }\n}) => any;\n}\n"
    )
    status = tool(of({"status": {"enum": ["active", "paused", "done"]}}, required=["status"]), name="set_status")
    assert text(status) == (
        "# Tools\n\n## functions\nnamespace functions {\ntype set_status = (_: {\n"
        '  status: "active" | "paused" | "done"\n}) => any;\n}\n'
    )
    assert text(user, status).count("type ") == 2


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({"type": "string"}, "x?: string"),
        ({"type": "integer"}, "x?: number"),
        ({"type": "null"}, "x?: null"),
        (True, "x?: any"),
        (False, "x?: null"),
        ({}, "x?: any"),
        ({"type": ["integer", "null", "object", "array"]}, "x?: number | null | {} | Array<any>"),
        ({"enum": ["a", 1, None, True]}, 'x?: "a" | 1 | None | True'),  # as the published code writes them
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "x?: string | Array<any>"),
        ({"type": "array", "items": {"type": "boolean"}}, "x?: Array<boolean>"),
        (
            {"type": "array", "items": {"type": "string", "description": "d", "pattern": "^a"}},
            "x?: Array<\n    // d\n    // pattern: ^a\n    string\n  >",
        ),
        ({"type": "object"}, "x?: {}"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "x?: {\n    [k: string]: number\n  }"),
        ({"type": "number", "minimum": 0.5, "maximum": 9}, "// maximum: 9, minimum: 0.5\n  x?: number"),
        ({"type": "number", "default": 1, "minimum": 0}, "// minimum: 0\n  // Default: 1\n  x?: number"),
        ({"type": "boolean", "default": False}, "// Default: False\n  x?: boolean"),
        ({"type": "string", "default": "é"}, '// Default: "é"\n  x?: string'),
        ({"type": "string", "description": "a\n\nb"}, "// a\n\n  // b\n  x?: string"),
        ({"type": "string", "minimum": 1, "title": "T"}, "x?: string"),  # of another type, and unknown to the form
    ],
)  # fmt: skip
def test_a_schema_as_typescript(schema: Any, shown: str) -> None:
    assert body(of({"x": schema})) == takes(f"  {shown}")


def test_what_is_required_comes_first_and_names_are_in_order() -> None:
    properties = {name: {"type": "string"} for name in ("b", "a", "d", "c", "Z")}
    assert body(of(properties, required=["d", "b"])) == takes(
        "  b: string,\n  d: string,\n  Z?: string,\n  a?: string,\n  c?: string"
    )


def test_references_to_definitions_and_to_the_whole() -> None:
    node = of({"next": {"$ref": "#/$defs/Node"}, "v": {"type": "integer"}}, description="A node.", required=["v"])
    assert body(of({"head": {"$ref": "#/$defs/Node", "description": "First."}}, **{"$defs": {"Node": node}})) == (
        "// A node.\ninterface Node {\n  v: number,\n  next?: Node\n}\n" + takes("  // First.\n  head?: Node")
    )
    tree = of({"left": {"$ref": "#"}, "a": {"type": "string"}}, required=["left"])
    assert (
        body(tree) == "interface parameters {\n  a?: string,\n  left: parameters\n}\ntype f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"description": "no type"},
        {"$ref": "#/properties/y"},
        {"enum": [1], "type": "string"},
        {"enum": ["a"], "type": ["string", "integer"]},
        {"type": "array", "items": [{"type": "string"}]},
    ],
)
def test_what_the_form_cannot_say_is_shown_as_json(schema: Any) -> None:
    """Not only that tool: the published tokenizer gives up on the whole array."""
    tools = declared(json.dumps([tool(of({"x": schema, "y": {"type": "string"}})), tool(name="g")]))
    with pytest.raises(Inexpressible):
        typescript(tools)


def test_keys_are_in_order_at_every_level_and_characters_as_they_are() -> None:
    tools = declared(
        '[{"type":"function","function":{"parameters":{"type":"object","b":[{"z":1,"a":"é"}]},"name":"f"}}]'
    )
    assert as_json(tools) == (
        '[{"function":{"name":"f","parameters":{"b":[{"a":"é","z":1}],"type":"object"}},"type":"function"}]'
    )


FUNCTION = "chat.tools_json[0].function"
X = f"{FUNCTION}.parameters.properties.x"


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("{", "chat.tools_json"),
        ('{"type": "function"}', "chat.tools_json"),
        ("[NaN]", "chat.tools_json"),
        ("[" * 200_000, "chat.tools_json"),
        (["f"], "chat.tools_json[0]"),
        ([tool(), {"type": "_plugin", "function": {"name": "p"}}], "chat.tools_json[1].type"),
        ([{"type": "function"}], FUNCTION),
        ([tool(name="")], f"{FUNCTION}.name"),
        ([tool(name="get weather")], f"{FUNCTION}.name"),
        ([tool(name="f" * 65)], f"{FUNCTION}.name"),
        ([tool(name=7)], f"{FUNCTION}.name"),
        ([tool(), tool()], "chat.tools_json[1].function.name"),
        ([tool(description=7)], f"{FUNCTION}.description"),
        ([tool("object")], f"{FUNCTION}.parameters"),
        ([tool({"type": "string"})], f"{FUNCTION}.parameters"),
        ([tool(of([]))], f"{FUNCTION}.parameters.properties"),
        ([tool(of({"x": 3}))], X),
        ([tool(of({"x": {"type": "text"}}))], f"{X}.type"),
        ([tool(of({"x": {"type": []}}))], f"{X}.type"),
        ([tool(of({"x": {"type": ["string", {}]}}))], f"{X}.type"),
        ([tool(of({"x": {"type": "string", "minLength": -1}}))], f"{X}.minLength"),
        ([tool(of({"x": {"type": "string", "maxLength": "5"}}))], f"{X}.maxLength"),
        ([tool(of({"x": {"type": "number", "minimum": True}}))], f"{X}.minimum"),
        ([tool(of({"x": {"enum": []}}))], f"{X}.enum"),
        ([tool(of({"x": {"anyOf": {}}}))], f"{X}.anyOf"),
        ([tool(of({"x": {"anyOf": [{}, 1]}}))], f"{X}.anyOf[1]"),
        ([tool(of({"x": {"type": "array", "items": "string"}}))], f"{X}.items"),
        ([tool(of({"x": {"$ref": "#/$defs/No"}}))], f"{X}.$ref"),
        ([tool(of({"x": {"$ref": "https://example.com/schema"}}))], f"{X}.$ref"),
        ([tool(of({}, required="x"))], f"{FUNCTION}.parameters.required"),
        ([tool(of({}, additionalProperties="no"))], f"{FUNCTION}.parameters.additionalProperties"),
        ([tool(of({"x": nested(TOOL_DEPTH)}))], "chat.tools_json[0]"),
        ([{**tool(), "x": nested(200)}], "chat.tools_json[0]"),
        (json.dumps(nested(200)), "chat.tools_json"),
        ("[" * 900 + "]" * 900, "chat.tools_json[0]"),
        ('{"a":' * 900 + "1" + "}" * 900, "chat.tools_json"),
        ([tool(name=f"f{i}") for i in range(TOOLS + 1)], "chat.tools_json"),
        ([tool(description="x" * TOOL_BYTES)], "chat.tools_json[0]"),
    ],
)  # fmt: skip
def test_a_tool_that_means_nothing_is_refused_with_its_place(tools: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        declared(tools if isinstance(tools, str) else json.dumps(tools))
    assert refused.value.field == field
    assert len(refused.value.message) < 600


def test_the_largest_tools_are_taken() -> None:
    assert len(declared(json.dumps([tool(name=f"f{i}") for i in range(TOOLS)]))) == TOOLS
    large = tool()
    large["function"]["description"] = "x" * (TOOL_BYTES - len(as_json(large)) - len(',"description":""'))
    assert declared(json.dumps([large]))
    assert declared(json.dumps([tool(of({"x": nested(TOOL_DEPTH // 2 - 2)}))]))
