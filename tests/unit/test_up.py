"""What `hedgerow up` makes of its options, and what it says where it cannot run."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

import hedgerow
from hedgerow.cli import up
from hedgerow.cli.child import Child
from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout, parse_address
from hedgerow.errors import InvalidRequest, Unavailable
from services.verifier.config import VerifierServiceConfig

ROOT = Path(__file__).resolve().parents[2]


def config(root: Path, *options: str) -> StackConfig:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return up.stack_config(parser.parse_args(options), root)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like a checkout, with two models and one drafter."""
    for name in ("models/sapling", "models/sapling-dflash", "other"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def test_a_device_is_that_of_target_and_drafter_and_a_setting_of_one_of_them_wins(checkout: Path) -> None:
    settings = config(checkout, "--device", "cuda", "--set", "drafter.device=cpu").settings
    assert (settings["verifier"], settings["drafter"]) == ({"DEVICE": "cuda"}, {"DEVICE": "cpu"})
    assert "DEVICE" not in config(checkout).settings.get("verifier", {})


def test_ranks_are_the_verifiers_setting(checkout: Path) -> None:
    assert config(checkout, "--tensor-parallel", "2").settings == {"verifier": {"TENSOR_PARALLEL": "2"}}
    assert "verifier" not in config(checkout).settings
    for number in ("0", "65", "-1"):
        with pytest.raises(InvalidRequest, match="--tensor-parallel"):
            config(checkout, "--tensor-parallel", number)


def test_without_options_it_serves_the_bundled_pair(checkout: Path) -> None:
    chosen = config(checkout)
    assert chosen.model == checkout / "models/sapling"
    assert chosen.drafter == checkout / "models/sapling-dflash"
    assert (chosen.listen, chosen.data, chosen.budget) == ("127.0.0.1:7411", checkout / ".hedgerow", None)


def test_a_model_without_its_drafter_needs_a_word(checkout: Path) -> None:
    with pytest.raises(InvalidRequest, match="--no-drafter decodes without one"):
        config(checkout, "--model", str(checkout / "other"))
    assert config(checkout, "--model", str(checkout / "other"), "--no-drafter").drafter is None
    named = config(checkout, "--model", str(checkout / "other"), "--drafter", str(checkout / "models/sapling-dflash"))
    assert named.drafter == checkout / "models/sapling-dflash"


def test_another_kind_of_drafter_needs_no_folder(checkout: Path) -> None:
    other = ("--model", str(checkout / "other"))
    chosen = config(checkout, *other, "--drafter-kind", "lookup")
    assert (chosen.drafter, chosen.lookup) == (None, True)
    chosen = config(checkout, *other, "--drafter-kind", "none")
    assert (chosen.drafter, chosen.lookup) == (None, False)
    assert config(checkout, "--drafter-kind", "dflash") == config(checkout)


def test_a_drafter_in_the_verifiers_process_is_no_process(checkout: Path) -> None:
    chosen = config(checkout, "--drafter-in-process")
    assert (chosen.drafter, chosen.hosted) == (checkout / "models/sapling-dflash", True)
    assert not config(checkout).hosted
    for other in (("--no-drafter",), ("--drafter-kind", "lookup")):
        with pytest.raises(InvalidRequest, match="--drafter-in-process"):
            config(checkout, "--drafter-in-process", *other)


def test_on_one_gpu_the_drafter_is_in_the_verifiers_process(checkout: Path) -> None:
    assert config(checkout, "--device", "cuda").hosted
    assert config(checkout, "--set", "verifier.device=cuda").hosted
    for other in (
        ("--no-drafter-in-process",), ("--verifiers", "2"), ("--tensor-parallel", "2"), ("--no-drafter",),
        ("--drafter-kind", "lookup"), ("--set", "drafter.trees=conditional"), ("--set", "verifier.features=projected"),
        ("--set", "verifier.device=cpu"),
    ):  # fmt: skip
        assert not config(checkout, "--device", "cuda", *other).hosted, other
    assert config(checkout, "--device", "cuda", "--verifiers", "2", "--drafter-in-process").hosted
    assert not config(checkout, "--device", "cpu").hosted
    with pytest.raises(InvalidRequest, match=r"--set: 'drafter.trees=marginal' is not allowed: a setting of the verif"):
        config(checkout, "--drafter-in-process", "--set", "drafter.trees=marginal")


def test_a_negative_budget_is_refused(checkout: Path) -> None:
    with pytest.raises(InvalidRequest, match="--budget: -1 is not allowed: at least 0"):
        config(checkout, "--budget", "-1")
    assert config(checkout, "--budget", "0").budget == 0


def test_a_budget_above_the_verifiers_is_refused_at_once(checkout: Path) -> None:
    """It was refused by the verifier, half a minute later; requests may not ask for more either."""
    (field,) = [field for field in dataclasses.fields(VerifierServiceConfig) if field.name == "max_budget"]
    assert field.default == up.MAX_BUDGET
    with pytest.raises(InvalidRequest, match="--budget: 64 is not allowed: at least 0 and at most 63"):
        config(checkout, "--budget", "64")
    assert config(checkout, "--budget", "63").budget == 63
    assert config(checkout, "--budget", "64", "--set", "verifier.max_budget=64").budget == 64


def test_several_of_a_service_are_asked_for_by_number(checkout: Path) -> None:
    chosen = config(checkout)
    assert (chosen.gateways, chosen.verifiers, chosen.kvstores) == (1, 1, 1)
    chosen = config(checkout, "--gateways", "2", "--verifiers", "3", "--kvstores", "4")
    assert (chosen.gateways, chosen.verifiers, chosen.kvstores) == (2, 3, 4)


@pytest.mark.parametrize("option", ["--gateways", "--verifiers", "--kvstores"])
@pytest.mark.parametrize("number", ["0", "-1", "17"])
def test_a_number_of_processes_has_limits(checkout: Path, option: str, number: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"{option}: {number} is not allowed: in \[1, 16\]"):
        config(checkout, option, number)


def test_every_gateway_needs_a_port(checkout: Path) -> None:
    assert config(checkout, "--listen", "127.0.0.1:65534", "--gateways", "2").gateways == 2
    with pytest.raises(InvalidRequest, match="leaves room for 3 gateways"):
        config(checkout, "--listen", "127.0.0.1:65534", "--gateways", "3")


def test_every_gateway_knows_all_verifiers_and_kvstores(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"gateway": {"CLIENT_LAG": "7"}, "gateway-2": {"CLIENT_LAG": "8"}}
    asked = StackConfig(
        checkout,
        checkout / "other",
        checkout / "data",
        listen="[::1]:0",
        gateways=2,
        verifiers=2,
        kvstores=2,
        redis_url="redis://127.0.0.1:1/0",
        settings=settings,
    )
    stack = Stack(asked)
    monkeypatch.setattr(Child, "start", lambda self: None)
    monkeypatch.setattr(Child, "wait_ready", lambda self, *arguments: None)
    stack.start()
    names = ("kvstore", "kvstore-2", "verifier", "verifier-2", "gateway", "gateway-2")
    assert stack.services == names
    env = {name: stack._children[name].command.env for name in names}
    assert len({env[name]["HEDGEROW_LISTEN"] for name in names}) == len(names)
    for name, lag in (("gateway", "7"), ("gateway-2", "8")):
        assert env[name]["HEDGEROW_VERIFIER"] == f"{stack.address('verifier')},{stack.address('verifier-2')}"
        assert env[name]["HEDGEROW_KVSTORE"] == f"{stack.address('kvstore')},{stack.address('kvstore-2')}"
        assert env[name]["HEDGEROW_CLIENT_LAG"] == lag
        assert env[name]["HEDGEROW_LISTEN"].startswith("[::1]:")
    assert env["gateway"]["HEDGEROW_TENANT_SECRET"] == env["gateway-2"]["HEDGEROW_TENANT_SECRET"]
    assert env["kvstore-2"]["HEDGEROW_REDIS_URL"] == "redis://127.0.0.1:1/0"


def test_a_model_that_is_not_there_is_blamed_itself(checkout: Path) -> None:
    """`--model /nonexistent` was told that --drafter '/nonexistent-dflash' is not allowed."""
    with pytest.raises(InvalidRequest) as refused:
        config(checkout, "--model", "/nonexistent")
    assert refused.value.field == "--model"


def test_any_setting_of_a_service_can_be_set(checkout: Path) -> None:
    chosen = config(checkout, "--set", "verifier.engine=torch", "--set", "verifier.THREADS=1")
    assert chosen.settings == {"verifier": {"ENGINE": "torch", "THREADS": "1"}}


@pytest.mark.parametrize(
    "text", ["engine=torch", "redis.port=1", "verifier.engine", "verifier.=1", "", "gateway.listen=127.0.0.1:7"]
)
def test_a_setting_names_its_service_and_field(checkout: Path, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        config(checkout, "--set", text)
    assert (refused.value.field, refused.value.value) == ("--set", text)


@pytest.mark.parametrize(
    "address",
    ["a:²", "ä..b:80", "a:" + "1" * 5000, "7411", ":7411", "localhost", "localhost:http", "localhost:70000", ""],
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_address(address)


def test_addresses_of_both_kinds_are_read() -> None:
    assert parse_address("0.0.0.0:0") == ("0.0.0.0", 0)
    assert parse_address("[::1]:7411") == ("::1", 7411)


def test_the_checkout_is_found_from_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_checkout() == ROOT


def test_outside_of_a_checkout_it_says_what_to_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hedgerow, "__file__", str(tmp_path / "site-packages" / "hedgerow" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unavailable, match="clone the Hedgerow repository"):
        find_checkout()
    monkeypatch.chdir(ROOT)
    assert find_checkout() == ROOT
