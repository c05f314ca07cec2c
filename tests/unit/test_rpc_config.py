"""Environment to configuration."""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from pathlib import Path

import pytest

from hedgerow.rpc.config import ConfigError, describe, from_env, from_env_or_exit, to_env, variable_of
from hedgerow.rpc.server import ServerConfig
from services.gateway.config import GatewayConfig
from services.verifier.config import VerifierServiceConfig


@dataclass(frozen=True, kw_only=True)
class Sample(ServerConfig):
    model_path: Path
    tenant_secret: str = field(metadata={"min": 8, "secret": True})
    budget: int = field(default=8, metadata={"min": 0, "max": 63, "help": "most nodes of a tree"})
    drafter: str | None = None
    share: float = field(default=0.5, metadata={"min": 0})
    detach: bool = False
    limit: int | None = field(default=None, metadata={"max": 9})


NEEDED = {"HEDGEROW_MODEL_PATH": "/m", "HEDGEROW_TENANT_SECRET": "hunter2hunter2"}


def test_fields_are_parsed_by_their_types() -> None:
    given = {
        "HEDGEROW_BUDGET": "16",
        "HEDGEROW_DRAFTER": "127.0.0.1:5",
        "HEDGEROW_SHARE": "1e-3",
        "HEDGEROW_DETACH": "Yes",
        "HEDGEROW_LISTEN": "0.0.0.0:7000",
        "HEDGEROW_LIMIT": "9",
        "PATH": "/bin",
    }
    config = from_env(Sample, NEEDED | given)
    assert config == Sample(
        model_path=Path("/m"),
        tenant_secret="hunter2hunter2",
        budget=16,
        drafter="127.0.0.1:5",
        share=0.001,
        detach=True,
        listen="0.0.0.0:7000",
        limit=9,
    )
    with pytest.raises(FrozenInstanceError):
        config.budget = 3  # type: ignore[misc]


def test_absent_variables_take_the_defaults_and_empty_optional_ones_are_none() -> None:
    config = from_env(Sample, NEEDED | {"HEDGEROW_DRAFTER": "", "HEDGEROW_LIMIT": ""})
    assert (config.budget, config.drafter, config.limit, config.listen) == (8, None, None, "127.0.0.1:0")


@pytest.mark.parametrize(
    ("variable", "value", "limit"),
    [
        ("HEDGEROW_BUDGET", "64", "must be in [0, 63]"),
        ("HEDGEROW_BUDGET", "-1", "must be in [0, 63]"),
        ("HEDGEROW_BUDGET", "eight", "must be a whole number"),
        ("HEDGEROW_BUDGET", "8.0", "must be a whole number"),
        ("HEDGEROW_BUDGET", "", "must be a whole number"),
        ("HEDGEROW_SHARE", "nan", "must be a finite number"),
        ("HEDGEROW_SHARE", "inf", "must be a finite number"),
        ("HEDGEROW_SHARE", "-0.1", "must be at least 0"),
        ("HEDGEROW_LIMIT", "10", "must be at most 9"),
        ("HEDGEROW_DETACH", "perhaps", "must be one of true, false"),
        ("HEDGEROW_MODEL_PATH", "", "must be a path"),
        ("HEDGEROW_LOG_LEVEL", "loud", "must be one of debug, info, warning, error"),
        ("HEDGEROW_BUDGT", "8", "unknown variable; did you mean HEDGEROW_BUDGET?"),
        ("HEDGEROW_X", "green", "unknown; known are HEDGEROW_"),
    ],
)
def test_bad_variable_stops_with_its_name_value_and_limit(variable: str, value: str, limit: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_env(Sample, NEEDED | {variable: value})
    assert raised.value.variable == variable
    assert raised.value.limit.startswith(limit)
    assert str(raised.value).startswith(f"{variable}: ")
    if "unknown" not in limit:
        assert raised.value.value == repr(value)


def test_missing_required_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="HEDGEROW_MODEL_PATH: nothing is not allowed: it must be set"):
        from_env(Sample, {})


def test_secret_is_never_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        from_env(Sample, NEEDED | {"HEDGEROW_TENANT_SECRET": "hunter2"})
    assert "hunter2" not in str(raised.value)
    assert raised.value.limit == "its length must be at least 8"


def test_process_ends_with_the_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        from_env_or_exit(Sample, {"HEDGEROW_X": "1"})
    assert raised.value.code == 2
    assert "HEDGEROW_X" in capsys.readouterr().err


def test_to_env_is_the_inverse_of_from_env() -> None:
    config = from_env(Sample, NEEDED | {"HEDGEROW_DETACH": "on", "HEDGEROW_SHARE": "0.1"})
    assert from_env(Sample, to_env(config)) == config


def test_description_names_every_variable_default_and_limit() -> None:
    rows = {variable: (default, meaning) for variable, default, meaning in describe(Sample)}
    assert rows["HEDGEROW_BUDGET"] == ("8", "most nodes of a tree; must be in [0, 63]")
    assert rows["HEDGEROW_MODEL_PATH"][0] == "required"
    assert "HEDGEROW_GRACE" in rows


ADDRESSES = {
    VerifierServiceConfig: ("listen", "admin_listen", "metrics_address", "health_listen", "drafter", "group_listen"),
    GatewayConfig: ("listen", "verifier", "kvstore"),
}


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "127.0.0.1:99999", "[::1]:70000", "h:-1", "a:1,b:65537"])
def test_a_port_that_there_is_not_is_refused(address: str) -> None:
    """gRPC would listen, or connect, at that port modulo 65536."""
    for config, names in ADDRESSES.items():
        needed = {variable_of(each.name): "x" * 16 for each in fields(config) if each.default is MISSING}
        for name in names:
            with pytest.raises(ConfigError, match=rf"HEDGEROW_{name.upper()}: .*its port must be in \[0, 65535\]"):
                from_env(config, needed | {variable_of(name): address})


@pytest.mark.parametrize("address", ["127.0.0.1:0", "host:65535", "host", "[::1]:7411", "unix:/tmp/x", "in-process"])
def test_what_may_be_an_address_is_left_to_who_uses_it(address: str) -> None:
    needed = {variable_of(name): "x" for name in ("model_path", "model_name")}
    assert from_env(VerifierServiceConfig, needed | {variable_of("drafter"): address}).drafter == address
