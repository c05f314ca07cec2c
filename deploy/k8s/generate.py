"""Writes the chart's values.schema.json and README.md from values.yaml and from the services' configuration classes,
and copies what the chart shares with others into its folder files/, the only place that Helm reads from.

    .venv/bin/python deploy/k8s/generate.py          # --check compares and says what is stale

In values.yaml a comment "# -- text" describes the next key. At its end may stand one of
    @schema {...}     JSON Schema that narrows the key's type further
    @open             a Kubernetes object or list, taken as it is
    @resources        a container's requests, and its limits with one of memory
    @env              variables by name, none of which is HEDGEROW_*
    @env-list         variables as Kubernetes has them
    @config SERVICE   that service's settings, by the names of its configuration's fields in lower case
    @live SERVICE     those of them that may change while it runs
Every other key must be one of values.yaml, of the type that it has there, and no key may be made null.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.configuration import SERVICES  # noqa: E402

CHART = ROOT / "deploy" / "k8s" / "hedgerow"
SHARED = ("redis.acl", "operator.acl", "observability/rules.yaml", "observability/hedgerow.json")
NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", Path: "string"}
# What the chart sets by itself, or keeps in a Secret.
OURS = {
    *("listen", "admin_listen", "metrics_address", "grace", "model_path", "otlp_endpoint", "trace_ratio"),
    *("tls_cert", "tls_key", "tls_ca", "tls_client_certs", "tls_peer_cert", "tls_peer_key", "tls_admin"),
    *("limits_file", "api_keys_file"),
}
GROUP = {"group_hosts", "group_host", "group_listen", "group_leader", "group_address", "group_secret"}
SET = {
    "gateway": OURS | {"verifier", "kvstore", "tenant_secret"},
    "verifier": OURS | {"health_listen", "model_name", "drafter", "feature_layers", *GROUP},
    "drafter": OURS | {"target_path"},
    "kvstore": OURS | {"redis_url"},
}
COMMENT = re.compile(
    r"^(?P<text>.*?)(?: @(?P<mark>schema|open|resources|env-list|env|config|live)(?: (?P<rest>.*))?)?$"
)
QUANTITIES = {"shm", "size"}
QUANTITY = {"type": ["string", "number"]}
RESOURCES: dict[str, Any] = {
    "type": "object",
    "required": ["requests", "limits"],
    "properties": {
        "requests": {"type": "object", "required": ["cpu", "memory"], "additionalProperties": QUANTITY},
        "limits": {"type": "object", "required": ["memory"], "additionalProperties": QUANTITY},
    },
}


class Key:
    """One described key of values.yaml."""

    def __init__(self, path: tuple[str, ...], value: Any, comment: str) -> None:
        found = COMMENT.match(comment)
        assert found is not None
        self.path, self.value = path, value
        self.text, self.mark, self.rest = found["text"], found["mark"], found["rest"] or ""

    def schema(self) -> dict[str, Any]:
        """Of its value."""
        described = {"description": self.text} if self.text else {}
        if self.mark in ("config", "live"):
            return described | config_schema(self.rest, live=self.mark == "live")
        if self.mark == "env":
            # Not propertyNames, of which helm says a wrong place; that none is HEDGEROW_* is in templates/_checks.tpl.
            names = {"^[A-Za-z_][A-Za-z0-9_]*$": {"type": "string"}}
            return described | {"type": "object", "patternProperties": names, "additionalProperties": False}
        if self.mark == "env-list":
            named = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
            return described | {"type": "array", "items": named}
        if self.mark == "resources":
            return described | RESOURCES
        kind = {dict: "object", list: "array"}.get(type(self.value)) or NAMES[type(self.value)]
        own = {"type": kind} | (json.loads(self.rest) if self.mark == "schema" else {})
        if self.path[-1] in QUANTITIES:
            own["pattern"] = "^[0-9]+[a-zA-Z]*$"
        return described | own


def keys(text: str) -> Iterator[Key]:
    """Every described key, in the file's order."""
    values, path, comment = yaml.safe_load(text), [], ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = stripped.removeprefix("# -- ")
        found = re.match(r"^( *)([A-Za-z][\w]*):", line)
        if found is None or stripped.startswith("#"):
            continue
        path = [*path[: len(found[1]) // 2], found[2]]
        value = values
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if comment:
            yield Key(tuple(path), value, comment)
        comment = ""


def config_schema(service: str, *, live: bool = False) -> dict[str, Any]:
    """The settings of a service that the values may say, with the limits that the service itself checks."""
    config = SERVICES[service]
    assert dataclasses.is_dataclass(config)
    hints = typing.get_type_hints(config)
    fields = {
        field.name: field_schema(hints[field.name], field.metadata)
        for field in dataclasses.fields(config)
        if (field.metadata.get("live") if live else field.name not in SET[service])
    }
    return {"type": "object", "properties": fields, "additionalProperties": False}


def field_schema(hint: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Of one field of a configuration class."""
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kind = next(each for each in typing.get_args(hint) if each is not type(None)) if optional else hint
    schema: dict[str, Any] = {"description": str(metadata.get("help", ""))}
    schema["type"] = [NAMES[kind], "null"] if optional else NAMES[kind]
    low, high = ("minLength", "maxLength") if kind is str else ("minimum", "maximum")
    for name, limit in ((low, metadata.get("min")), (high, metadata.get("max"))):
        if limit is not None:
            schema[name] = limit
    if "choices" in metadata:
        schema["enum"] = list(metadata["choices"])
    return schema


def values_schema(found: list[Key]) -> dict[str, Any]:
    """Closed: what is not described is refused."""
    top: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    for key in found:
        node = top
        for name in key.path[:-1]:
            node = node["properties"].setdefault(
                name, {"type": "object", "properties": {}, "additionalProperties": False}
            )
        node["properties"][key.path[-1]] = key.schema()
    top["properties"]["global"] = {"type": "object", "description": "Helm's own"}
    # Beside and not among the properties: an entry of `previous` says only what was another value.
    top["allOf"] = [required(found)]
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the Hedgerow chart"} | top


def required(found: list[Key]) -> dict[str, Any]:
    """Every key is there: a null would take away what values.yaml says, and with it a limit or a probe."""
    top: dict[str, Any] = {"required": [], "properties": {}}
    for key in found:
        node = top
        for name in key.path[:-1]:
            if name not in node["required"]:
                node["required"].append(name)
            node = node["properties"].setdefault(name, {"required": [], "properties": {}})
        node["required"].append(key.path[-1])
    return top


def readme(found: list[Key]) -> str:
    """The chart's page: its introduction, and a table of all values."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    about = f"{chart['description']}. [docs/deploy.md](../../../docs/deploy.md) is the guide,\n"
    parts = [f"# hedgerow {chart['version']}\n\n{about}"]
    parts.append("[docs/sizing.md](../../../docs/sizing.md) says how large. Written by `deploy/k8s/generate.py`.\n\n")
    laptop = "deploy/k8s/hedgerow/values-laptop.yaml"
    parts.append(f"```\nhelm install hedgerow deploy/k8s/hedgerow -f {laptop} --wait --timeout 10m\n")
    parts.append("helm test hedgerow --logs\n```\n\n| value | default | meaning |\n|---|---|---|\n")
    for key in found:
        shown = json.dumps(key.value)
        text = key.text.replace("|", "\\|")
        if key.mark in ("config", "live"):
            names = sorted(config_schema(key.rest, live=key.mark == "live")["properties"])
            text += ": " + ", ".join(f"`{name}`" for name in names)
        parts.append(f"| `{'.'.join(key.path)}` | `{shown}` | {text} |\n")
    return "".join(parts)


def written() -> dict[Path, str]:
    """Every generated file."""
    found = list(keys((CHART / "values.yaml").read_text()))
    schema = json.dumps(values_schema(found), indent=1, ensure_ascii=False) + "\n"
    shared = {CHART / "files" / Path(name).name: (ROOT / "deploy" / name).read_text() for name in SHARED}
    return {CHART / "values.schema.json": schema, CHART / "README.md": readme(found)} | shared


def main() -> None:
    stale = [path for path, text in written().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv and stale:
        sys.exit(f"chart: run deploy/k8s/generate.py: {', '.join(path.name for path in stale)} would change")
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(written()[path])
        print(f"chart: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
