"""What a gateway and a verifier tell each other: a start, its digest, the model's defaults."""

from __future__ import annotations

import json
import struct
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hedgerow import digest
from hedgerow.errors import InvalidRequest, Unsupported
from hedgerow.v1 import common_pb2, verifier_pb2
from services.gateway import convert as gateway
from services.gateway.resolve import Limits, Resolver
from services.gateway.types import Sampling
from services.verifier.convert import description, sampling_from, start_from
from services.verifier.defaults import read_defaults

PROMPT, COMMITTED = [7, 0, 4095], [1, 2, 1 << 31]


def message(**fields: Any) -> verifier_pb2.StartSequence:
    sampling = common_pb2.SamplingParams(max_tokens=8)
    given = {"session_id": "s", "epoch": 1, "attempt": 1, "prompt": PROMPT, "committed": COMMITTED}
    return verifier_pb2.StartSequence(**{**given, "sampling": sampling, **fields})


def test_the_verifier_forms_the_digest_that_the_gateway_forms() -> None:
    theirs = digest.extend(digest.first("s", PROMPT), COMMITTED)
    by_hand = sha256(b"s" + struct.pack("<3I", *PROMPT)).digest()[:16]
    for token in COMMITTED:
        by_hand = sha256(by_hand + struct.pack("<I", token)).digest()[:16]
    assert by_hand == theirs
    start = start_from(message(digest=theirs), b"o", 8)
    assert (start.prompt, start.committed) == (tuple(PROMPT), tuple(COMMITTED))


def test_whose_a_session_is_reaches_the_engine() -> None:
    """Its prompts share pages with no other tenant's."""
    assert [start_from(message(tenant=tenant), b"o", 8).tenant for tenant in ("", "acme")] == ["", "acme"]


@pytest.mark.parametrize(
    "other", [{"session_id": "t"}, {"prompt": PROMPT[:2]}, {"committed": COMMITTED[:2]}, {"committed": COMMITTED[::-1]}]
)
def test_a_start_with_another_text_than_its_digest_is_refused(other: dict[str, Any]) -> None:
    """Nobody looked at it: the verifier would have gone on from a text that is not the session's."""
    theirs = digest.extend(digest.first("s", PROMPT), COMMITTED)
    with pytest.raises(InvalidRequest) as refused:
        start_from(message(digest=theirs, **other), b"o", 8)
    assert (refused.value.field, refused.value.value) == ("digest", theirs.hex())


@pytest.mark.parametrize("mode", [common_pb2.EXECUTION_MODE_BEST_EFFORT, 99])
def test_a_mode_that_is_not_served_is_refused(mode: int) -> None:
    with pytest.raises(Unsupported):
        start_from(message(mode=mode), b"o", 8)
    start_from(message(mode=common_pb2.EXECUTION_MODE_EXACT), b"o", 8)


@pytest.mark.parametrize(("epoch", "attempt", "most"), [(1, 1, 8), (2, 1, 4096), (1, 2, 4096)])
def test_a_session_that_goes_on_is_refused_only_for_a_budget_that_no_group_admits(
    epoch: int, attempt: int, most: int
) -> None:
    """A million was cut in silence; nine, where eight are allowed, may have been admitted elsewhere."""
    asked = message(epoch=epoch, attempt=attempt, speculation=common_pb2.SpeculationParams(budget=most))
    assert start_from(asked, b"o", 8).budget == most, "the engine cuts it"
    asked.speculation.budget = most + 1
    with pytest.raises(InvalidRequest, match=rf"speculation\.budget: {most + 1} is not allowed: at most {most}"):
        start_from(asked, b"o", 8)


# Defaults


def written(folder: Path, **keys: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(keys))
    return folder


def described(folder: Path) -> verifier_pb2.DescribeResponse:
    """A verifier's answer to Describe, as it goes over the wire."""
    model: Any = SimpleNamespace(
        checkpoint_hash="c", kernel_law="k", architecture="a", feature_layers=(), feature_width=0,
        config=SimpleNamespace(vocab_size=4096, eos_token_ids=(1,)),
    )  # fmt: skip
    limits = SimpleNamespace(max_budget=8, default_budget=8, max_sequences=4)
    engine: Any = SimpleNamespace(max_context=100, config=limits)
    said = description("m", model, engine, b"i" * 16, read_defaults(folder))
    return verifier_pb2.DescribeResponse.FromString(said.SerializeToString())


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == {}


def test_describe_says_the_models_own_sampling(tmp_path: Path) -> None:
    """DescribeResponse.default_sampling was never set: every model was greedy unless told otherwise."""
    keys = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "max_new_tokens": 77, "max_length": 4096}
    said = described(written(tmp_path, **keys)).default_sampling
    assert said == common_pb2.SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, max_tokens=77)
    assert not said.HasField("seed")
    assert described(written(tmp_path, eos_token_id=[1])).default_sampling == common_pb2.SamplingParams()


def test_do_sample_false_is_greedy_whatever_else_the_file_says(tmp_path: Path) -> None:
    assert read_defaults(written(tmp_path, do_sample=False, temperature=0.6))["temperature"] == 0.0
    assert read_defaults(written(tmp_path, do_sample=True, temperature=0.6))["temperature"] == 0.6


async def test_resolved_defaults_reach_store_and_verifier_bit_by_bit(tmp_path: Path) -> None:
    """0.6 and 0.95 are no float32: what draws the tokens must be what the session says."""
    keys = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 77}
    model = gateway.described(described(written(tmp_path, **keys)))
    resolver = Resolver(SimpleNamespace(tokenizer=SimpleNamespace()), Limits(1000, 256))  # type: ignore[arg-type]
    asked = gateway.generation(gateway_request(top_k=5))
    resolved = (await resolver.resolve(asked, model)).sampling
    single = struct.unpack("<ff", struct.pack("<ff", 0.6, 0.95))
    assert (resolved.temperature, resolved.top_p) == single
    assert (resolved.top_k, resolved.max_tokens) == (5, 77), "what is asked for wins over the default"
    stored = gateway.sampling(common_pb2.SamplingParams.FromString(gateway.sampling_pb(resolved).SerializeToString()))
    assert stored == resolved
    drawn = sampling_from(gateway.sampling_pb(stored))
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.max_tokens) == (*single, 5, 77)
    assert isinstance(asked.sampling, Sampling)
    assert asked.sampling.temperature is None, "as given stays as given"


def gateway_request(**sampling: Any) -> Any:
    from hedgerow.v1 import gateway_pb2

    params = common_pb2.SamplingParams(**sampling)
    return gateway_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=PROMPT), sampling=params)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1), ("temperature", "hot"), ("temperature", 1e308), ("temperature", True),
        ("top_p", 0), ("top_p", 1.5), ("top_k", -1), ("top_k", 0.5), ("min_p", 2), ("max_new_tokens", 0),
        ("max_new_tokens", 10.0),
    ],
)  # fmt: skip
def test_a_default_out_of_its_limits_stops_the_start_with_file_key_and_limit(
    tmp_path: Path, key: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_defaults(written(tmp_path, **{key: value}))
    assert refused.value.field == f"{key} of {tmp_path / 'generation_config.json'}"
    assert refused.value.limit


@pytest.mark.parametrize("text", ["", "[]", "{", '{"temperature": NaN}', '{"top_p": 1, "top_p": 1}'])
def test_a_file_that_is_no_object_stops_the_start_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(InvalidRequest, match="generation_config"):
        read_defaults(tmp_path)
