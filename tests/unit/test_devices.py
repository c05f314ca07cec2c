"""A device that cannot serve is refused by the setting's name, with what is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.devices import cuda_device
from hedgerow.model.select import load_target
from hedgerow.rpc.config import ConfigError
from services.verifier.agreement import Wanted
from services.verifier.config import VerifierServiceConfig
from services.verifier.service import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InvalidRequest, match=r"device.*cuda.*torch built for CUDA"):
        cuda_device()


def test_no_triton(monkeypatch: pytest.MonkeyPatch, built_for_cuda: None) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"device.*the package triton"):
        cuda_device()


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, built_for_cuda: None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match=r"device.*a CUDA device that torch can see"):
        cuda_device()


def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch, built_for_cuda: None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(InvalidRequest, match=r"device.*capability 9.0 or more; this has \(8, 0\)"):
        cuda_device()


def test_a_gpu_that_serves(built_for_cuda: None) -> None:
    assert cuda_device() == torch.device("cuda", 0)


def test_a_cpu_s_engine_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"engine.*'torch'.*auto where device is cuda"):
        load_target(tmp_path, (), "torch", device="cuda")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may find a device")
@pytest.mark.parametrize("service", ["verifier", "drafter"])
def test_a_service_without_a_gpu_says_so_and_ends(service: str) -> None:
    settings = {
        "DEVICE": "cuda",
        "MODEL_PATH": "models/sapling" if service == "verifier" else "models/sapling-dflash",
        "LISTEN": "127.0.0.1:0",
        "ADMIN_LISTEN": "127.0.0.1:0",
    }
    settings |= {"MODEL_NAME": "m"} if service == "verifier" else {"TARGET_PATH": "models/sapling"}
    env = os.environ | {f"HEDGEROW_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", f"services.{service}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "device: 'cuda' is not allowed: needs a torch built for CUDA" in done.stdout + done.stderr


@pytest.mark.parametrize(("field", "most"), [("max_budget", 63), ("max_sequences", 64)])
def test_more_than_a_cuda_step_takes_is_refused_at_the_start(field: str, most: int) -> None:
    limits: dict[str, Any] = {field: most + 1}
    config = VerifierServiceConfig(model_path=Path("x"), model_name="m", device="cuda", **limits)
    with pytest.raises(ConfigError, match=rf"HEDGEROW_{field.upper()}.*at most {most} where device is cuda"):
        load(config, Wanted("hidden", ()))


@pytest.mark.parametrize(("device", "factor"), [("cpu", 3.0), ("cuda", 1.8)])
def test_how_much_prompts_may_slow_a_step_down_depends_on_the_device(device: str, factor: float) -> None:
    config = VerifierServiceConfig(model_path=Path("x"), model_name="m", device=device)
    assert config.prefill_factor_used == factor
    assert replace(config, prefill_factor=0.0).prefill_factor_used == 0.0
