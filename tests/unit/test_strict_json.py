"""JSON from outside: one value for every reader, wherever it comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hedgerow import strict_json
from hedgerow.cli.evaluation.command import _object
from hedgerow.errors import HedgerowError, InvalidRequest
from hedgerow.model.fields import Fields
from hedgerow.model.headers import read_header
from services.gateway.tokenizer import read_json
from services.gateway.tool_calls import parsed
from services.gateway.tools import declared
from services.verifier.defaults import read_defaults
from tests.unit.test_tool_declarations import tool

HUGE = "1" + "0" * 309
WRONG = {
    "1e999": "1e999 is beyond the largest number",
    "-1e999": "-1e999 is beyond the largest number",
    "1.8e308": "beyond the largest number",
    HUGE: "100000000000000000000000... (310 characters) is beyond the largest number",
    f"-{HUGE}": "beyond the largest number",
    "9" * 5000: "beyond the largest number",
    "NaN": "NaN is no JSON number",
    "Infinity": "Infinity is no JSON number",
    "-Infinity": "-Infinity is no JSON number",
    '{"a": 1, "a": 1}': "a name comes twice in one object",
    "[" * 100_000: "nested too deeply",
}
FINE = {
    "1e308": 1e308,
    "-1.7976931348623157e308": -1.7976931348623157e308,
    "1e-999": 0.0,
    "9" * 300: int("9" * 300),
    "1" + "0" * 308: 10**308,
    "18446744073709551615": (1 << 64) - 1,
    '{"a": {"a": 1}, "b": 1}': {"a": {"a": 1}, "b": 1},
    '"NaN"': "NaN",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:20])
def test_what_readers_would_read_differently_is_refused(text: str) -> None:
    for given in (text, f"[{text}]", f'{{"deep": [{{"in": {text}}}]}}', text.encode()):
        with pytest.raises(ValueError, match=r".") as refused:
            strict_json.loads(given)
        assert WRONG[text] in str(refused.value), given[:40]


@pytest.mark.parametrize("text", FINE, ids=lambda text: text[:20])
def test_what_all_read_alike_is_read(text: str) -> None:
    value = strict_json.loads(text)
    assert value == FINE[text]
    assert type(value) is type(FINE[text])
    assert value == json.loads(text)


def test_an_objects_maker_says_itself_what_a_name_twice_means() -> None:
    assert strict_json.loads('{"a": 1, "a": 2}', list) == [("a", 1), ("a", 2)]
    with pytest.raises(ValueError, match="beyond"):
        strict_json.loads('{"a": 1e999}', list)


def of_fields(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(f'{{"x": {text}}}')
    Fields.read(folder / "config.json")


def of_defaults(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(f'{{"x": {text}}}')
    read_defaults(folder)


def of_tokenizer(folder: Path, text: str) -> None:
    (folder / "tokenizer_config.json").write_text(f'{{"x": {text}}}')
    read_json(folder / "tokenizer_config.json")


def of_header(folder: Path, text: str) -> None:
    header = f'{{"__metadata__": {{"x": {text}}}}}'.encode()
    (folder / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    read_header(folder / "a.safetensors")


def of_tools(folder: Path, text: str) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "number", "default": "HERE"}}}
    declared(json.dumps([tool(parameters)]).replace('"HERE"', text))


def of_arguments(folder: Path, text: str) -> None:
    value, why = parsed(f'{{"n": {text}}}')
    if value is None:
        raise InvalidRequest("arguments", text, why)


def of_an_option(folder: Path, text: str) -> None:
    _object("--plain-body", f'{{"x": {text}}}')


PLACES = [of_fields, of_defaults, of_tokenizer, of_header, of_tools, of_arguments, of_an_option]


@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_reads_json_from_outside_refuses_it(tmp_path: Path, place: Callable[[Path, str], Any]) -> None:
    place(tmp_path, "1e308")
    for text in WRONG:
        if place is of_header and text.startswith("{"):
            continue  # what is no tensor has any names
        with pytest.raises(HedgerowError):
            place(tmp_path, text)
