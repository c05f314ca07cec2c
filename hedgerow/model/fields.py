"""Typed access to the fields of a JSON file. Complaints name the file, the field, the value and the limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hedgerow import strict_json
from hedgerow.errors import InvalidRequest, printable

T = TypeVar("T", int, float, bool, str)
MOST = 100_000_000  # bytes of a JSON file; the index of a K2 checkpoint has 25 MB
MOST_SIZE = 1 << 24  # of a width or a count, where nothing lower is said


class ConfigError(InvalidRequest):
    """`field` of `file` has the value `value`, which breaks `limit`."""

    def __init__(self, file: Path, field: str, value: object, limit: str) -> None:
        super().__init__(printable(f"{file}: {field}"), value, limit)
        self.file, self.name = file, field


@dataclass(frozen=True)
class Fields:
    """A JSON object of `file` with typed access; `path` is its place in the file, for messages."""

    file: Path
    values: Mapping[str, Any]
    path: str = ""

    @classmethod
    def read(cls, file: Path) -> Fields:
        """Raises ConfigError, also for a name that comes twice in one object: which one counts, nobody can know."""

        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, value in pairs:
                if name in found:
                    raise ConfigError(file, name, "twice", "must be there once")
                found[name] = value
            return found

        try:
            if file.exists() and not file.is_file():
                raise ConfigError(file, "file", "no regular file", "must be readable JSON")
            if (size := file.stat().st_size) > MOST:
                raise ConfigError(file, "file", f"{size} bytes", f"must have at most {MOST} bytes")
            values = strict_json.loads(file.read_text(encoding="utf-8"), once)
        except FileNotFoundError:
            raise ConfigError(file, "file", None, "must exist") from None
        except (ValueError, OSError) as error:
            raise ConfigError(file, "file", str(error), "must be readable JSON") from None
        if not isinstance(values, dict):
            raise ConfigError(file, "file", type(values).__name__, "must be a JSON object")
        return cls(file, values)

    def fail(self, name: str, limit: str) -> ConfigError:
        return ConfigError(self.file, self.path + name, self.values.get(name), limit)

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """The field as `kind`; an integer is a float too; absent or null: `default`, which None makes an error."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return kind(value)
            except OverflowError:
                raise self.fail(name, "must be finite") from None
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self.fail(name, f"must be {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.fail(name, "must be finite")
        return value

    def size(self, name: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        """A positive integer, at most `most`."""
        value = self.get(name, int, default)
        if value < 1:
            raise self.fail(name, "must be at least 1")
        if value > most:
            raise self.fail(name, f"must be at most {most}")
        return value

    def above(self, least: float, name: str, default: float | None = None) -> float:
        """A number greater than `least`."""
        value = self.get(name, float, default)
        if value <= least:
            raise self.fail(name, f"must be greater than {least:g}")
        return value

    def inner(self, name: str) -> Fields | None:
        """The object under `name`; None where absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "must be an object")
        return Fields(self.file, value, f"{self.path}{name}.")

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, or one; empty where absent."""
        value = self.values.get(name)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(item, int) or isinstance(item, bool) for item in listed):
            raise self.fail(name, "must be an integer or a list of them")
        return tuple(listed)

    def neutral(self, name: str, *allowed: object) -> None:
        """Refuses what is neither absent nor null nor one of these, for which there is no code."""
        value = self.values.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
            raise self.fail(name, f"only {' and '.join(map(repr, allowed))} {'are' if allowed[1:] else 'is'} supported")

    def must_be(self, name: str, allowed: object, default: object) -> None:
        """Refuses a value for which there is no code."""
        if self.values.get(name, default) != allowed:
            raise self.fail(name, f"only {allowed!r} is supported")
