"""The GPU image, built from the Dockerfile that users build, serves the bundled model on a CPU.

Slow: 4 GB of packages are installed, and the image is 8 GB. HEDGEROW_GPU_IMAGE=NAME takes one that is there:

    .venv/bin/python -m pytest -m system tests/system/test_gpu_image.py
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, Model
from tests.stack import BUDGET, ROOT
from tests.system.cluster import Cluster
from tests.system.contained import CLOSED, ENGINES, Contained, Podman
from tests.system.test_images import locked

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(3600)]
ROOM = 35e9  # bytes of disk that the build takes at its height
PROMPTS = ("def read_config(path):", "class Queue:\n", "import os\n\ndef walk(")
ABOUT = """
import json, shutil, torch, triton
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": list(torch.cuda.nccl.version()),
    "triton": triton.__version__, "cards": torch.cuda.device_count(), "compiler": shutil.which("gcc"),
}))
"""
# What Triton does with the launcher of each kernel that it has compiled.
LAUNCHER = """
from triton.runtime.build import compile_module_from_src
source = '''
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&module); }
'''
print(compile_module_from_src(source, "probe").__file__)
"""


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    return Podman(tmp_path_factory.mktemp("podman"))


@pytest.fixture(scope="module")
def image(podman: Podman) -> Iterator[str]:
    """Its name. What was built here is removed: it is large."""
    given = os.environ.get("HEDGEROW_GPU_IMAGE")
    if given:
        yield given
        return
    cluster = Cluster()
    store = json.loads(podman.run("info", "--format", "json"))["store"]["graphRoot"]
    if shutil.disk_usage(store).free < ROOM:
        pytest.skip(f"{store} has less than {ROOM / 1e9:.0f} GB for the build")
    name = cluster.build("gpu")
    try:
        yield name
    finally:
        podman.run("image", "rm", "--force", name, timeout=300)


@pytest.fixture(scope="module")
def contained(podman: Podman, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contained]:
    """A whole stack, whose engines are the image."""
    target, drafter = ROOT / "models" / "sapling", ROOT / "models" / "sapling-dflash"
    config = StackConfig(ROOT, target, tmp_path_factory.mktemp("data"), drafter=drafter, budget=BUDGET)
    with Contained(config, podman, image) as running:
        yield running


def test_it_holds_what_is_locked_and_sees_no_card(podman: Podman, image: str) -> None:
    told = json.loads(podman.run("run", "--rm", *CLOSED, "--entrypoint=python3", image, "-c", ABOUT))
    pins = locked("gpu")
    assert told["torch"].partition("+")[0] == pins["torch"]
    assert told["triton"] == pins["triton"]
    assert told["cuda"] == "12.8"
    assert ".".join(map(str, told["nccl"])) == pins["nvidia-nccl-cu12"]
    assert told["cards"] == 0
    assert told["compiler"], "Triton links the launchers of its kernels with it"


async def answers(stack: Stack) -> tuple[list[tuple[int, ...]], Model, int]:
    """Tokens by prompt, the model as the gateway tells of it, and how many tokens were drafted and accepted."""
    async with AsyncClient(stack.addresses("gateway")) as client:
        results = [
            await client.complete(prompt, max_tokens=96, seed=number, temperature=0.8, ignore_eos=True)
            for number, prompt in enumerate(PROMPTS)
        ]
        (model,) = await client.models()
    return [tuple(each.tokens) for each in results], model, sum(each.usage.accepted_draft_tokens for each in results)


async def test_its_engines_serve_the_bundled_model_on_a_cpu(contained: Contained, tmp_path: Path) -> None:
    tokens, model, accepted = await answers(contained)
    assert [len(each) for each in tokens] == [96] * len(PROMPTS)
    assert accepted > len(PROMPTS) * 24, "the drafter's tokens are taken"
    with Stack(dataclasses.replace(contained.config, data=tmp_path / "data")) as here:
        expected, ours, _ = await answers(here)
    print(f"{accepted} of {sum(map(len, tokens))} tokens were drafted; fingerprint {model.fingerprint}")
    assert model.fingerprint == ours.fingerprint, "the compiled engine is the same on torch 2.10"
    assert tokens == expected


@pytest.mark.parametrize("name", ENGINES)
def test_a_container_is_closed_and_healthy(contained: Contained, podman: Podman, name: str) -> None:
    container = contained.container(name)
    told = podman.inspected(container)
    assert isinstance(told["Config"], dict)
    assert told["Config"]["User"] == "10001:10001"
    assert not told["EffectiveCaps"]
    podman.run("exec", container, "python3", "-m", "hedgerow.rpc.probe", contained.admin_address(name))
    with pytest.raises(AssertionError, match="Read-only file system"):
        podman.run("exec", container, "python3", "-c", "open('/app/x', 'w')")
    assert podman.run("exec", container, "python3", "-c", LAUNCHER).startswith("/tmp/triton/")
    found = podman.run("exec", container, "python3", "-c", "from kernels.cpu.build import build; print(build())")
    assert "/app/.hedgerow/engine/prebuilt-" in found
    assert "mla_prefix_wide-" in podman.run("exec", container, "ls", "/app/.hedgerow/cuda")


def test_a_device_that_is_not_there_is_named(podman: Podman, image: str) -> None:
    given = ["--env=HEDGEROW_DEVICE=cuda", "--env=HEDGEROW_MODEL_PATH=/app/models/sapling"]
    given += ["--env=HEDGEROW_MODEL_NAME=sapling", "--env=HEDGEROW_LISTEN=127.0.0.1:0"]
    given += ["--env=HEDGEROW_ADMIN_LISTEN=127.0.0.1:0", "--env=HEDGEROW_METRICS_ADDRESS="]
    told = podman.run("run", "--rm", *CLOSED, *given, image, "services.verifier", status=1)
    assert "needs a CUDA device that torch can see: there is none, or no driver" in told
