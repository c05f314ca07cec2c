"""A folder in K2.6's layout, converted, is served by the whole stack: the tokens of the folder it was made from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.drive import plain
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient
from hedgerow.model.select import load_target
from hedgerow.weights.convert import convert
from hedgerow.weights.published import MINI
from hedgerow.weights.rehearse import write
from tests.stack import ROOT, engine_sampling


@pytest.mark.timeout(240)
async def test_a_converted_folder_is_served_with_its_sources_tokens(tmp_path: Path) -> None:
    """Four layers, the true vocabulary and its special tokens; a chat and a seeded continuation."""
    write(tmp_path / "kimi", "k2.6", dataclasses.replace(MINI, layers=4))
    convert(tmp_path / "kimi", tmp_path / "converted", 1, lambda text: None)
    model = load_target(tmp_path / "kimi", ())
    settings = {"verifier": {"CACHE_PAGES": "64"}}
    config = StackConfig(ROOT, tmp_path / "converted", tmp_path / "data", start_timeout=200, settings=settings)
    with Stack(config) as stack:
        async with AsyncClient(stack.address("gateway")) as client:
            [served] = await client.models()
            assert served.vocab_size == 163840
            for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
                stream = client.generate("def f(x):\n    return 你好", max_tokens=24, ignore_eos=True, **options)  # type: ignore[arg-type]
                result = await stream.result()
                assert stream.started is not None
                prompt = await client.tokenize("def f(x):\n    return 你好")
                expected = plain(model, prompt, engine_sampling(stream.started.sampling), frozenset())
                assert list(result.tokens) == expected
