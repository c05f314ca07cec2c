"""What a verifier, of several ranks above all, takes, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.compiled import CompiledK2
from hedgerow.model.interface import shards
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import CheckpointError
from hedgerow.rpc.config import ConfigError
from kernels.collectives import Ranks
from kernels.linear import MIN_4
from services.verifier.config import VerifierServiceConfig
from services.verifier.convert import fingerprint
from services.verifier.ranks import load_ranks
from tests.tiny import TinyTarget, write_target


def test_ranks_on_gpus_that_are_not_there_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a file is opened. The devices here are pretended; ranks on two are tests/gpu/test_cuda_ranks.py's."""
    given = {"listen": "127.0.0.1:0", "model_path": tmp_path, "model_name": "m", "tensor_parallel": 2, "device": "cuda"}

    def load(**more: object) -> None:
        load_ranks(VerifierServiceConfig(**(given | more)), ())  # type: ignore[arg-type]

    if not torch.cuda.is_available():
        with pytest.raises(InvalidRequest, match=r"device.*cuda.*needs"):
            load()
    monkeypatch.setattr("services.verifier.ranks.cuda_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"HEDGEROW_TENSOR_PARALLEL.*2.*at most 1, the CUDA devices"):
        load()
    with pytest.raises(ConfigError, match=r"HEDGEROW_ENGINE.*compiled.*auto"):
        load(engine="compiled")
    with pytest.raises(ConfigError, match=r"HEDGEROW_GROUP_HOSTS.*2.*must be 1 where device is cuda"):
        load(group_hosts=2, group_listen="127.0.0.1:0", group_secret="0123456789abcdef")


def test_a_model_that_does_not_fit_is_refused_before_a_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("a rank was started")

    write_target(tmp_path, TinyTarget(expert_width=128, dense_width=256))
    monkeypatch.setattr("hedgerow.model.room.free_memory", lambda: 1000)
    monkeypatch.setattr("hedgerow.engine.rank_channels.subprocess.Popen", never)
    given = {"listen": "127.0.0.1:0", "model_path": tmp_path, "model_name": "m", "tensor_parallel": 2}
    with pytest.raises(CheckpointError, match=r"GB of free memory, for the weights alone"):
        load_ranks(VerifierServiceConfig(**given), ())  # type: ignore[arg-type]


@pytest.mark.parametrize("service", ["verifier", "drafter"])
def test_a_configuration_is_read_before_torch_is_loaded(service: str) -> None:
    """What torch reads of the environment is set between the two; a start is refused where it comes too late."""
    code = f"import sys, services.{service}.config\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_number_of_ranks_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """And one process with as many shards has the group's."""
    write_target(tmp_path, TinyTarget(expert_width=128, dense_width=256))
    one, two = (K2Model.load(tmp_path, (), MIN_4, ranks=Ranks(count)) for count in (1, 2))
    assert (shards(one), shards(two)) == (1, 2)
    assert shards(CompiledK2.__new__(CompiledK2)) == 1
    prints = [fingerprint(m.checkpoint_hash, m.kernel_law, m.architecture, "fp32", shards(m)) for m in (one, two)]
    assert [found.tp_size for found in prints] == [1, 2]
    assert prints[0].digest != prints[1].digest
