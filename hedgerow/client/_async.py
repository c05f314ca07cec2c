"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc.aio
from google.protobuf.message import Message

from hedgerow.client import _convert
from hedgerow.client._convert import Messages
from hedgerow.client._fields import MESSAGE_LIMIT, check_size, fill
from hedgerow.client._retry import Retry
from hedgerow.client._status import decode
from hedgerow.client._stream import Stream
from hedgerow.client._types import Model, Options, Result, Session
from hedgerow.errors import InvalidRequest
from hedgerow.v1 import gateway_pb2 as pb
from hedgerow.v1.gateway_pb2_grpc import GatewayServiceStub

DEFAULT_ADDRESS = "localhost:7411"
OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # what ends the call in fact: the one above alone waits for ever
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Whether to try again is decided above: a retry of the library's own would repeat a call with its outcome unknown.
    ("grpc.enable_retries", 0),
)
Prompt = str | Sequence[int]
Asked = TypeVar("Asked", bound=Message)


class AsyncClient:
    """A connection to a gateway.

        async with AsyncClient("localhost:7411") as client:
            async for chunk in client.generate("def fibonacci(n):", max_tokens=64):
                print(chunk.text, end="")

    Belongs to the event loop that first uses it. Every method raises errors of `hedgerow.errors`.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, retry: Retry = Retry()) -> None:  # noqa: B008  frozen
        _check_address(address)
        self.address, self.retry = address, retry
        self._channel: grpc.aio.Channel | None = None

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Continue a text, or token ids taken as they are."""
        asked = _convert.request(options)
        _convert.set_prompt(asked, prompt)
        return self._stream(asked, options)

    def chat(
        self,
        messages: Messages,
        *,
        thinking: bool | None = None,
        preserve_thinking: bool | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Answer a conversation. A message is a `Message` or a mapping with its fields."""
        asked = _convert.request(options)
        asked.chat.CopyFrom(_convert.chat(messages, thinking, preserve_thinking))
        return self._stream(asked, options)

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """`generate`, awaited to its end."""
        return await self.generate(prompt, **options).result()

    async def models(self) -> Sequence[Model]:
        """The models that can be asked for."""
        answer = await self._ask("ListModels", pb.ListModelsRequest())
        return [_convert.model(model) for model in answer.models]

    async def tokenize(self, prompt: str | Messages, *, model: str = "", thinking: bool | None = None) -> Sequence[int]:
        """The token ids that a text or a conversation would be."""
        request = pb.TokenizeRequest()
        fill(request, "model", model)
        if isinstance(prompt, str):
            fill(request, "text", prompt, "prompt")
        else:
            request.chat.CopyFrom(_convert.chat(prompt, thinking, None))
        return tuple((await self._ask("Tokenize", request)).tokens)

    async def cancel(self, session_id: str) -> bool:
        """End a session within one step; False: it had ended."""
        request = _of_session(pb.CancelRequest(), session_id)
        return bool((await self._ask("Cancel", request)).was_running)

    async def get_session(self, session_id: str) -> Session:
        """What is recorded of a session."""
        request = _of_session(pb.GetSessionRequest(), session_id)
        return _convert.session(await self._ask("GetSession", request))

    async def delete_session(self, session_id: str) -> bool:
        """Remove a session's prompt and tokens; False: there was none."""
        request = _of_session(pb.DeleteSessionRequest(), session_id)
        return bool((await self._ask("DeleteSession", request)).existed)

    async def aclose(self) -> None:
        """Close the connection; open streams are cancelled."""
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _stub(self) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=OPTIONS)
        return GatewayServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def _stream(self, asked: pb.GenerateRequest, options: Options) -> Stream:
        check_size(asked)
        timeout = options.get("timeout")
        return Stream(lambda request: self._stub().Generate(request, timeout=timeout), asked, self.retry, self.address)

    async def _ask(self, method: str, request: Message) -> Any:
        check_size(request)
        attempt = 1
        while True:
            try:
                return await getattr(self._stub(), method)(request)
            except grpc.aio.AioRpcError as failed:
                error = decode(failed, self.address)
            delay = self.retry.delay(error, attempt)
            if delay is None:
                raise error
            attempt += 1
            await asyncio.sleep(delay)


def _of_session(request: Asked, session_id: str) -> Asked:
    fill(request, "session_id", session_id)
    return request


def _check_address(address: object) -> None:
    """gRPC would find out at the first call, and say it in words of its own."""
    try:
        if isinstance(address, str) and address.encode():
            return
    except UnicodeEncodeError:
        pass
    raise InvalidRequest("address", address, "HOST:PORT, or another gRPC target")
