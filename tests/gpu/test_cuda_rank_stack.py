"""`hedgerow up --device cuda --tensor-parallel 2`: the tokens of one process with two shards; a rank is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.drive import plain
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, Options, Retry
from hedgerow.engine.types import Sampling
from hedgerow.model.cuda_ranked import RankedK2
from kernels.collectives import Ranks
from tests.cuda_group import BUNDLED, LAYERS
from tests.integration.test_tensor_parallel import alive, ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
ROOT, COUNT = Path(__file__).resolve().parents[2], 80
PROMPT = [(7 * i + 3) % 256 for i in range(90)]
LAWS: list[Options] = [{"temperature": 0.0, "seed": 3}, {"temperature": 0.8, "top_p": 0.95, "seed": 5}]
VERIFIER = {"TENSOR_PARALLEL": "2", "DEVICE": "cuda", "MAX_SEQUENCES": "4", "MAX_BUDGET": "16", "PREFILL_ROWS": "128"}
REST: Options = {"max_tokens": COUNT, "ignore_eos": True}


@pytest.mark.timeout(400)
def test_two_gpus_serve_the_tokens_of_one_and_survive_a_killed_rank(tmp_path: Path) -> None:
    """Greedy and seeded, plain and with trees. The group is out of service within 10 s, and comes back as a whole."""
    one = RankedK2.of(BUNDLED, LAYERS, torch.device("cuda", 0), Ranks(2))
    expected = [plain(one, PROMPT, Sampling(max_tokens=COUNT, ignore_eos=True, **law), frozenset()) for law in LAWS]
    settings = {"verifier": VERIFIER, "drafter": {"DEVICE": "cuda"}}
    config = StackConfig(
        ROOT, ROOT / BUNDLED, tmp_path, drafter=ROOT / f"{BUNDLED}-dflash", budget=16, settings=settings,
        start_timeout=180,
    )  # fmt: skip
    with Stack(config) as stack:
        served = asyncio.run(_served(stack))
        assert served == [tokens for tokens in expected for _ in range(2)]
        print(*(_devices(pid) for pid in (stack.pid("verifier"), *ranks(stack.pid("verifier")))), sep="\n")
        found, took = asyncio.run(_killed(stack))
        assert found == expected[1]
        assert took < 10, took
        stack.wait_ready("verifier", 180)
        assert len(ranks(stack.pid("verifier"))) == 1
        assert asyncio.run(_served(stack)) == served
        assert any("a rank of the group is lost" in line for line in stack.logs("verifier"))


async def _served(stack: Stack) -> list[list[int]]:
    async with AsyncClient(stack.address("gateway"), retry=Retry(total=200)) as client:
        return [
            list((await client.complete(PROMPT, budget=budget, **law, **REST)).tokens)
            for law in LAWS
            for budget in (0, 16)
        ]


async def _killed(stack: Stack) -> tuple[list[int], float]:
    """The tokens of a stream whose verifier loses a rank, and how long the verifier was there without it."""
    verifier, found, took = stack.pid("verifier"), list[int](), 0.0
    (lost,) = ranks(verifier)
    async with AsyncClient(stack.address("gateway"), retry=Retry(total=200)) as client:
        async for chunk in client.generate(PROMPT, budget=16, **LAWS[1], **REST):
            if not found:
                begun = time.monotonic()
                os.kill(lost, signal.SIGKILL)
                while alive(verifier):
                    assert time.monotonic() - begun < 60
                    await asyncio.sleep(0.02)
                took = time.monotonic() - begun
            found += chunk.tokens
    return found, took


def _devices(pid: int) -> str:
    """What of a driver a process holds."""
    held = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return f"{pid}: {sum(link.startswith('/dev/nvidia') for link in held)} files of the driver"
