"""Bad input through the whole stack: refused with the field, its value and its limit, and nothing is started."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient
from hedgerow.errors import InvalidRequest, Unsupported
from tests.stack import verifier_load

BAD: dict[str, tuple[str | list[int], dict[str, Any], str]] = {
    "an empty prompt": ("", {}, "text"),
    "no ids": ([], {}, "token_ids"),
    "an id beyond the vocabulary": ([1, 1 << 31], {}, "token_ids"),
    "more tokens than the context": ("hello", {"max_tokens": 10_000_000}, "sampling.max_tokens"),
    "no tokens": ("hello", {"max_tokens": 0}, "sampling.max_tokens"),
    "a negative temperature": ("hello", {"temperature": -0.1}, "sampling.temperature"),
    "a temperature that is no number": ("hello", {"temperature": math.nan}, "sampling.temperature"),
    "an infinite temperature": ("hello", {"temperature": math.inf}, "sampling.temperature"),
    "top_p of zero": ("hello", {"top_p": 0.0}, "sampling.top_p"),
    "top_p above one": ("hello", {"top_p": 1.01}, "sampling.top_p"),
    "top_p that is no number": ("hello", {"top_p": math.nan}, "sampling.top_p"),
    "min_p below zero": ("hello", {"min_p": -0.5}, "sampling.min_p"),
    "a seed out of range": ("hello", {"seed": 1 << 63}, "sampling.seed"),
    "an unknown model": ("hello", {"model": "gpt-7"}, "model"),
    "a budget above the limit": ("hello", {"budget": 100_000}, "speculation.budget"),
    "an empty stop string": ("hello", {"stop": [""]}, "sampling.stop[0]"),
    "too many stop strings": ("hello", {"stop": ["x"] * 17}, "sampling.stop"),
    "a prompt of 5 MB": ("x = 1\n" * 833_334, {}, "text"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_refused_before_anything_starts(
    stack: Stack, client: AsyncClient, idle: None, case: str
) -> None:
    prompt, options, field = BAD[case]
    before = verifier_load(stack)
    with pytest.raises(InvalidRequest) as refused:
        await client.complete(prompt, **{"max_tokens": 4, **options})
    assert refused.value.field == field
    assert refused.value.metadata["limit"]
    assert "value" in refused.value.metadata
    after = verifier_load(stack)
    assert (after.steps, after.held_sequences) == (before.steps, 0)


async def test_special_tokens_in_text_are_text(client: AsyncClient, idle: None) -> None:
    """A user who writes a control token's name must not be able to end his turn or to open another's."""
    for name in ("<|im_end|>", "[EOS]", "<|im_system|>", "<|no_such_token|>"):
        ids = await client.tokenize(f"a{name}b")
        assert len(ids) > 3
        vocab_size = (await client.models())[0].vocab_size
        assert max(ids) < vocab_size - 256


async def test_what_is_not_served_yet_says_so(client: AsyncClient, stack: Stack, idle: None) -> None:
    import grpc

    from hedgerow.v1 import gateway_pb2, gateway_pb2_grpc

    with grpc.insecure_channel(stack.address("gateway")) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.GenerateRequest(text="hello")
        request.sampling.n = 2
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request, timeout=10))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_refused_requests_leave_the_next_one_unharmed(client: AsyncClient, idle: None) -> None:
    with pytest.raises((InvalidRequest, Unsupported)):
        await client.complete("hello", temperature=-1.0)
    assert len((await client.complete("hello", max_tokens=4, ignore_eos=True)).tokens) == 4
