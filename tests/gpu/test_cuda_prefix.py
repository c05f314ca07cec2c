"""On a GPU too a page of another prompt is the page that a prompt would have computed: latents and tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.drive import Job, drive_now, plain
from bench.subjects import Subjects
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.step import NoDrafter, step
from hedgerow.engine.types import Sampling
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.model.cuda_cache import CudaCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS = 96


@pytest.fixture(scope="module")
def subjects() -> Subjects:
    models = Path("models")
    return Subjects.read(
        models / "sapling", models / "sapling-dflash", models / "heldout/heads.jsonl", most_tokens=60, device="cuda"
    )


def run(
    subjects: Subjects, sharing: str, jobs: list[Job], before: Job
) -> dict[str, tuple[torch.Tensor, list[int], int]]:
    """Of each job the latents in the middle of its output, its tokens, and how much of its prompt hit."""
    config = EngineConfig(max_sequences=8, prefill_rows=100, prefix_cache=sharing)
    engine = VerifierEngine(subjects.model, config, subjects.vocabulary, subjects.eos)
    drive_now(engine, NoDrafter(), [before])
    found, drafter = dict[str, tuple[torch.Tensor, list[int], int]](), subjects.drafter()
    for job in jobs:
        engine.start(job.start())
    while engine.has_work():
        asyncio.run(step(engine, drafter))
        for job in jobs:
            held = engine.sequence(job.name)
            if held is not None and len(held.output) > TOKENS // 2 and job.name not in found:
                slots = [held.pages[at // 64] * 64 + at % 64 for at in range(len(job.prompt))]
                assert isinstance(engine.cache, CudaCache)
                found[job.name] = engine.cache.read(slots), list(held.output), held.found
    engine.check()
    return found


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.95)], ids=["greedy", "seeded"])
def test_what_hits_has_the_bits_of_what_is_computed(subjects: Subjects, sampling: Sampling) -> None:
    text = [token for prompt in subjects.prompts[:8] for token in prompt]
    settings = [
        Sampling(sampling.temperature, top_p=sampling.top_p, seed=n, max_tokens=TOKENS, ignore_eos=True)
        for n in range(5)
    ]
    jobs = [
        Job(f"s{n}", [*text[: 64 * n + 1], *subjects.prompts[20 + n][: n % 2 * 30]], settings[n], (0, 7, 16, 63, 8)[n])
        for n in range(5)
    ]
    before = Job("before", text, settings[0], 0)
    computed, shared = run(subjects, "off", jobs, before), run(subjects, "shared", jobs, before)
    for n, job in enumerate(jobs):
        latents, tokens, hit = shared[job.name]
        assert (computed[job.name][2], hit) == (0, 64 * n)
        assert torch.equal(latents.view(torch.int16), computed[job.name][0].view(torch.int16)), job.name
        assert tokens == plain(subjects.model, job.prompt, job.sampling, subjects.eos)[: len(tokens)]
