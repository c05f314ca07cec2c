"""Configuration: environment variables to frozen dataclasses.

A service's configuration is one frozen dataclass. Each field `name` is read from `HEDGEROW_NAME`; a field without a
default is required. Fields carry their limits where they are defined:

    budget: int = dataclasses.field(default=8, metadata={"min": 0, "max": 63, "help": "most nodes of a tree"})

Known metadata: `min` and `max` (inclusive), `choices`, `help`, `secret` (the value is never shown), `live` (it may
change while the process runs: `overlaid` reads such fields from a file), `address` (one or several of host:port: gRPC
takes a port modulo 65536, so one that there is not is refused here).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hedgerow.errors import HedgerowError

PREFIX = "HEDGEROW_"
MOST_BYTES = 16 << 20  # of a file of settings or keys
MOST_PORT = 65535
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

Config = TypeVar("Config")


class ConfigError(HedgerowError):
    """The environment variable `variable` has the value `value`, which breaks `limit`."""

    reason: ClassVar[str] = "INVALID_CONFIG"

    def __init__(self, variable: str, value: str, limit: str) -> None:
        super().__init__(
            f"{variable}: {value} is not allowed: {limit}",
            metadata={"variable": variable, "value": value, "limit": limit},
        )
        self.variable, self.value, self.limit = variable, value, limit


def from_env(cls: type[Config], env: Mapping[str, str]) -> Config:
    """Build `cls` from `HEDGEROW_*` variables of `env`.

    Raises ConfigError for an unknown `HEDGEROW_*` variable, a missing required one, and a value that is not of the
    field's type or outside its limits. An empty value of an optional field is None.
    """
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    fields = {variable_of(field.name): field for field in dataclasses.fields(cls) if field.init}
    _refuse_unknown(env, list(fields))
    values: dict[str, Any] = {}
    for variable, field in fields.items():
        if variable in env:
            values[field.name] = _parse(variable, env[variable], hints[field.name], field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(variable, "nothing", f"it must be set ({_meaning(field, hints)})")
    return cls(**values)


def from_env_or_exit(cls: type[Config], env: Mapping[str, str]) -> Config:
    """As `from_env`; a ConfigError ends the process with its message on stderr and status 2."""
    try:
        return from_env(cls, env)
    except ConfigError as error:
        print(f"configuration: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def overlaid(config: Config, path: Path) -> Config:
    """`config` with the HEDGEROW_NAME=value lines of a file, for its `live` fields; # begins a comment line.

    Raises ConfigError with the file, the line, the variable and its limit.
    """
    assert dataclasses.is_dataclass(config)
    assert not isinstance(config, type)
    hints = typing.get_type_hints(type(config))
    known = {variable_of(field.name): field for field in dataclasses.fields(config)}
    values: dict[str, Any] = {}
    for number, line in read_lines(path):
        variable, equals, text = (part.strip() for part in line.partition("="))
        at = f"{path}, line {number}: {variable}"
        if not equals:
            raise ConfigError(f"{path}, line {number}", "this", "must be HEDGEROW_NAME=value, or begin with #")
        field = known.get(variable)
        if field is None or not field.metadata.get("live"):
            live = ", ".join(name for name, each in known.items() if each.metadata.get("live"))
            raise ConfigError(at, "this", f"what may change while it runs is {live}")
        if field.name in values:
            raise ConfigError(at, "this", "it is in this file twice")
        values[field.name] = _parse(at, text, hints[field.name], field.metadata)
    return dataclasses.replace(config, **values)


def read_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a text file that say something, and their numbers. Raises ConfigError with the file."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        lines = content.decode().splitlines()
    except OSError as error:
        raise ConfigError(str(path), "the file", f"must be one that can be read: {error.strerror}") from None
    except UnicodeDecodeError:  # whose text shows what is in the file
        raise ConfigError(str(path), "the file", "must be text in UTF-8") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(str(path), "the file", f"must have at most {MOST_BYTES} bytes")
    stripped = ((number, line.strip()) for number, line in enumerate(lines, 1))
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]


def to_env(config: object) -> dict[str, str]:
    """The variables from which `from_env` builds `config` again; what a supervisor hands to a child."""
    assert dataclasses.is_dataclass(config)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    return {variable_of(name): "" if value is None else str(value) for name, value in values.items()}


def describe(cls: type[object]) -> list[tuple[str, str, str]]:
    """Per variable: its name, its default ("required" where there is none) and what it means."""
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING
        rows.append((variable_of(field.name), "required" if required else str(field.default), _meaning(field, hints)))
    return rows


def variable_of(field: str) -> str:
    """`max_budget` -> `HEDGEROW_MAX_BUDGET`."""
    return PREFIX + field.upper()


def _refuse_unknown(env: Mapping[str, str], known: list[str]) -> None:
    for variable in sorted(env):
        if variable.startswith(PREFIX) and variable not in known:
            names = [name.removeprefix(PREFIX) for name in known]  # the prefix would make everything alike
            near = difflib.get_close_matches(variable.removeprefix(PREFIX), names, n=1)
            limit = (
                f"unknown variable; did you mean {PREFIX}{near[0]}?"
                if near
                else f"unknown; known are {', '.join(known)}"
            )
            raise ConfigError(variable, "this", limit)


def _parse(variable: str, text: str, hint: Any, metadata: Mapping[str, Any]) -> Any:
    shown = "the value" if metadata.get("secret") else repr(text if len(text) <= 80 else text[:77] + "...")
    kind, optional = _unwrap(hint)
    if optional and text == "":
        return None
    try:
        value = _convert(kind, text)
    except ValueError:
        raise ConfigError(variable, shown, f"must be {_kind_name(kind)}") from None
    low, high, choices = metadata.get("min"), metadata.get("max"), metadata.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(variable, shown, f"must be one of {', '.join(map(str, choices))}")
    size = len(value) if isinstance(value, str) else value
    if (low is not None and size < low) or (high is not None and size > high):
        raise ConfigError(variable, shown, _range(low, high, of_length=isinstance(value, str)))
    if metadata.get("address") and not all(map(_port_exists, text.split(","))):
        raise ConfigError(variable, shown, f"its port must be in [0, {MOST_PORT}]")
    return value


def _port_exists(address: str) -> bool:
    """Of host:port, [host]:port or host; what else an address may be is left to who uses it."""
    try:
        return 0 <= int(address.rpartition(":")[2]) <= MOST_PORT
    except ValueError:
        return True


def _unwrap(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        assert len(kinds) == 1, f"a configuration field is of one type or optional, not {hint}"
        return kinds[0], True
    return hint, False


def _convert(kind: Any, text: str) -> Any:
    if kind is bool:
        if text.lower() not in TRUE + FALSE:
            raise ValueError(text)
        return text.lower() in TRUE
    if kind is float and not math.isfinite(float(text)):
        raise ValueError(text)
    if kind is Path and text == "":
        raise ValueError(text)  # Path("") would be the working directory
    assert kind in (int, float, str, Path), f"no configuration field is of type {kind}"
    return kind(text)


def _kind_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a finite number", bool: "one of true, false", Path: "a path", str: "text"}
    return names[kind]


def _range(low: object, high: object, *, of_length: bool) -> str:
    what = "its length must be" if of_length else "must be"
    if high is None:
        return f"{what} at least {low}"
    return f"{what} at most {high}" if low is None else f"{what} in [{low}, {high}]"


def _meaning(field: dataclasses.Field[Any], hints: Mapping[str, Any]) -> str:
    metadata = field.metadata
    parts = [str(metadata.get("help", _kind_name(_unwrap(hints[field.name])[0])))]
    if "choices" in metadata:
        parts.append(f"one of {', '.join(map(str, metadata['choices']))}")
    elif "min" in metadata or "max" in metadata:
        of_length = _unwrap(hints[field.name])[0] is str
        parts.append(_range(metadata.get("min"), metadata.get("max"), of_length=of_length))
    if metadata.get("live"):
        parts.append("may be in the limits file")
    return "; ".join(parts)
