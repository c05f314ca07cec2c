"""The asynchronous client."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

from google.protobuf.message import Message

from hedgerow.certificates import Tls
from hedgerow.client import _conversation, _convert, _environment
from hedgerow.client._conversation import Messages, Tools
from hedgerow.client._fields import check_size, fill, seconds
from hedgerow.client._gateways import Gateways, check_tenant
from hedgerow.client._retry import Retry
from hedgerow.client._stream import Stream
from hedgerow.client._types import Model, Options, Result, Running, Session, Stored
from hedgerow.client._wire import Wire
from hedgerow.errors import InvalidRequest
from hedgerow.v1 import gateway_pb2 as pb

DEFAULT_ADDRESS = "localhost:7411"
TIMEOUT = 30.0  # seconds
PAGE = 200  # sessions in one answer
Prompt = str | Sequence[int]
Asked = TypeVar("Asked", bound=Message)


class AsyncClient:
    """A connection to a gateway, or to one of several.

        async with AsyncClient("localhost:7411") as client:
            async for chunk in client.generate("def fibonacci(n):", max_tokens=64):
                print(chunk.text, end="")

    `address`: a text, with commas between several, or a list. Calls are spread over them, and each goes on at the next
    one when its gateway fails; `retry` says how often and how long. `tenant` is sent with every call. `timeout`, in
    seconds, is that of the calls with one answer, retries included; generations have their own. `tls`: a
    `Tls` with the files to use (InvalidRequest says what is wrong with them), or True for the usual authorities.
    `api_key`: what a gateway with keys wants to see, which decides the tenant; not given, it is the environment's
    HEDGEROW_API_KEY. Send it over TLS.
    Belongs to the event loop that first uses it. Every method raises errors of `hedgerow.errors`.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        retry: Retry = Retry(),  # noqa: B008  frozen
        tenant: str = "",
        timeout: float = TIMEOUT,
        tls: bool | Tls | None = None,
        api_key: str | None = None,
    ) -> None:
        self._gateways = Gateways(address, retry, tenant, tls, _environment.api_key(api_key))
        within = seconds("timeout", timeout)
        self._timeout = TIMEOUT if within is None else within

    @property
    def addresses(self) -> Sequence[str]:
        """The gateways, as given."""
        return self._gateways.addresses

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Continue a text, or token ids taken as they are."""
        asked = _convert.request(options)
        _convert.set_prompt(asked, prompt)
        return self._stream(asked, options)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        thinking: bool | None = None,
        preserve_thinking: bool | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Answer a conversation. A message is a `Message` or a mapping with its fields.

        `tools` is OpenAI's array of declarations, or that as JSON. Chunks tell reasoning, content and calls apart;
        `Answer` puts them together.
        """
        asked = _convert.request(options)
        asked.chat.CopyFrom(_conversation.chat(messages, tools, thinking, preserve_thinking))
        return self._stream(asked, options)

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """`generate`, awaited to its end."""
        return await self.generate(prompt, **options).result()

    def resume(
        self,
        session_id: str,
        token_offset: int = 0,
        digest: bytes = b"",
        text_offset: int = 0,
        *,
        timeout: float | None = None,
        detach: bool = True,
        leave_running: bool = False,
    ) -> Stream:
        """Go on with a session from where a stream of it was left: `client.resume(*stream.position)`.

        With the session id alone it comes from its beginning. `text_offset` alone, in UTF-8 bytes: from that text on.
        Raises, from the loop, NotFound where there is no such session and LostSuffix where the store has less of it
        than the caller and cannot make it again. Options are those of `generate`.
        """
        asked = _convert.resume(session_id, token_offset, digest, text_offset, detach)
        return self._wired(asked, {"timeout": timeout, "leave_running": leave_running})

    async def models(self) -> Sequence[Model]:
        """The models that can be asked for."""
        answer = await self._ask("ListModels", pb.ListModelsRequest())
        return [_convert.model(model) for model in answer.models]

    async def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str = "",
        tools: Tools | None = None,
        thinking: bool | None = None,
        preserve_thinking: bool | None = None,
    ) -> Sequence[int]:
        """The token ids that a text, or a conversation with these tools, would be."""
        request = pb.TokenizeRequest()
        fill(request, "model", model)
        if isinstance(prompt, str):
            fill(request, "text", prompt, "prompt")
        else:
            request.chat.CopyFrom(_conversation.chat(prompt, tools, thinking, preserve_thinking))
        return tuple((await self._ask("Tokenize", request)).tokens)

    async def cancel(self, session_id: str) -> bool:
        """End a session within one step; False: it had ended."""
        request = _of_session(pb.CancelRequest(), session_id)
        return bool((await self._ask("Cancel", request)).was_running)

    async def get_session(self, session_id: str) -> Session:
        """What is recorded of a session."""
        request = _of_session(pb.GetSessionRequest(), session_id)
        return _convert.session(await self._ask("GetSession", request))

    async def sessions(self, *, most: int = 1000) -> Sequence[Running]:
        """The tenant's sessions that run on the gateways of this client, each asked in turn; at most `most`.

        What has ended, or waits paused for a Resume, is not among them: see `stored_sessions`. Raises
        Unavailable where a gateway does not answer.
        """
        self._gateways.check_open()
        found: dict[str, Running] = {}
        for address in self._gateways.addresses:
            request = pb.ListSessionsRequest()
            while len(found) < most:
                request.limit = min(PAGE, most - len(found))
                answer = await self._gateways.ask_this("ListSessions", request, address, self._timeout)
                found |= {each.session_id: _convert.running(each, address) for each in answer.sessions}
                request.cursor = answer.cursor
                if not request.cursor:
                    break
        return list(found.values())

    async def stored_sessions(self, *, most: int = 1000) -> Sequence[Stored]:
        """The tenant's sessions that are retained, wherever they run and also when they have ended; at most `most`, the
        newest first. One that is being made meanwhile may be missing.
        """
        found: dict[str, Stored] = {}
        request = pb.ListStoredSessionsRequest()
        while len(found) < most:
            request.limit = min(PAGE, most - len(found))
            answer = await self._ask("ListStoredSessions", request)
            found |= {each.session_id: _convert.stored(each, answer.tenant) for each in answer.sessions}
            request.cursor = answer.cursor
            if not request.cursor:
                break
        return list(found.values())

    async def delete_session(self, session_id: str) -> bool:
        """Remove a session's prompt and tokens; False: there was none, or an answer got lost and it was repeated."""
        request = _of_session(pb.DeleteSessionRequest(), session_id)
        return bool((await self._ask("DeleteSession", request)).existed)

    async def aclose(self) -> None:
        """Cancel the sessions of open streams, and close the connections; takes a few seconds at most."""
        await self._gateways.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _stream(self, asked: pb.GenerateRequest, options: Options) -> Stream:
        named, ours = asked.tenant and check_tenant(asked.tenant), self._gateways.tenant
        if named and ours and named != ours:
            raise InvalidRequest("tenant", named, f"that of the client, {ours!r}, or none")
        asked.tenant = named or ours
        return self._wired(asked, options)

    def _wired(self, asked: pb.GenerateRequest | pb.ResumeRequest, options: Options | dict[str, Any]) -> Stream:
        check_size(asked)
        leave_running = False if options.get("leave_running") is None else options["leave_running"]
        if not isinstance(leave_running, bool) or (leave_running and not asked.detach):
            raise InvalidRequest("leave_running", leave_running, "True or False, and not True beside detach=False")
        timeout = seconds("timeout", options.get("timeout"))
        tenant = asked.tenant if isinstance(asked, pb.GenerateRequest) else ""
        return Stream(Wire(self._gateways, asked, timeout=timeout, leave_running=leave_running, tenant=tenant))

    async def _ask(self, method: str, request: Message) -> Any:
        self._gateways.check_open()
        return await self._gateways.ask(method, request, self._timeout)


def _of_session(request: Asked, session_id: str) -> Asked:
    if session_id is None:
        raise InvalidRequest("session_id", session_id, "the id of a session")
    fill(request, "session_id", session_id)
    return request
