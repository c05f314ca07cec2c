"""The model's own sampling parameters, for requests that do not say."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hedgerow import strict_json
from hedgerow.errors import InvalidRequest
from hedgerow.rpc.logs import get_log

FILE = "generation_config.json"
log = get_log(__name__)


class _Key(NamedTuple):
    """One key of the file: our field, and what its values may be."""

    field: str
    kind: type
    allowed: Callable[[Any], bool]
    limit: str


_KEYS = {
    "temperature": _Key("temperature", float, lambda v: 0 <= v <= 100, "in [0, 100]"),
    "top_k": _Key("top_k", int, lambda v: 0 <= v < 1 << 32, "a whole number, at least 0; 0 keeps all tokens"),
    "top_p": _Key("top_p", float, lambda v: 0 < v <= 1, "in (0, 1]"),
    "min_p": _Key("min_p", float, lambda v: 0 <= v <= 1, "in [0, 1]"),
    "max_new_tokens": _Key("max_tokens", int, lambda v: 1 <= v < 1 << 32, "a whole number, at least 1"),
}
# What would change the model's tokens and is not served: the value that is none.
_UNSERVED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0}


def read_defaults(folder: Path) -> dict[str, Any]:
    """What the folder's `generation_config.json` says, by the names of SamplingParams; nothing where there is none.

    `do_sample` false is greedy, whatever the file says besides. Raises InvalidRequest with file, key and limit.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        said = strict_json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(str(path), str(error), "a JSON object") from error
    if not isinstance(said, dict):
        raise InvalidRequest(str(path), said, "a JSON object")
    for name, none in _UNSERVED.items():
        if said.get(name) not in (None, none):
            log.warning("a default of the model is not served", file=str(path), key=name, value=said[name])
    found = {key.field: _value(path, name, said[name]) for name, key in _KEYS.items() if said.get(name) is not None}
    if said.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _value(path: Path, name: str, value: object) -> float:
    key = _KEYS[name]
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (key.kind is int and not isinstance(value, int)) or not key.allowed(value):
        raise InvalidRequest(f"{name} of {path}", value, key.limit)
    return key.kind(value)  # type: ignore[no-any-return]
