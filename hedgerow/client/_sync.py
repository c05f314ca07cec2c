"""The blocking client: AsyncClient on an event loop in a thread of its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Unpack

from hedgerow.certificates import Tls
from hedgerow.client._async import DEFAULT_ADDRESS, TIMEOUT, AsyncClient, Prompt
from hedgerow.client._conversation import Messages, Tools
from hedgerow.client._loop import Loop
from hedgerow.client._retry import Retry
from hedgerow.client._stream import Stream
from hedgerow.client._types import (
    Chunk,
    Event,
    Finished,
    Model,
    Options,
    Position,
    Result,
    Running,
    Session,
    Started,
    Stored,
)


class SyncStream:
    """Chunks of one generation: `for chunk in stream`. See `Stream`, whose rules hold here too."""

    def __init__(self, stream: Stream, loop: Loop, client: Client) -> None:
        self._stream, self._loop = stream, loop
        self._client = client  # which closes the loop when nobody refers to it
        self._position = stream.position

    @property
    def started(self) -> Started | None:
        """The first event, None before it came."""
        return self._stream.started

    @property
    def finished(self) -> Finished | None:
        """The last event, None before it came."""
        return self._stream.finished

    @property
    def session_id(self) -> str:
        """Empty before the session has started."""
        return self._stream.session_id

    @property
    def position(self) -> Position:
        """Where the stream goes on behind the last event that it gave; its session id is empty before the first."""
        return self._position

    def events(self) -> Iterator[Event]:
        """Everything, the first and last event too."""
        with self:
            while (event := self._loop.run(self._stream._next())) is not None:
                self._position = self._stream.position
                yield event

    def result(self) -> Result:
        """Wait for the end; the whole of it."""
        try:
            return self._loop.run(self._stream.result())
        finally:
            self._position = self._stream.position

    def detach(self) -> Position:
        """End the stream and leave its session going on; see `Stream.detach`."""
        self._loop.run(self._stream.detach())
        if not self._position.session_id:
            self._position = self._stream.position
        return self._position

    def close(self) -> None:
        """Cancel the session unless it has ended or `leave_running` was asked for."""
        self._loop.run(self._stream.aclose())

    def __iter__(self) -> SyncStream:
        return self

    def __next__(self) -> Chunk:
        chunk = self._loop.run(self._stream._next_chunk())
        self._position = self._stream.position
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A connection to a gateway, or to one of several, for code that waits.

        with Client("localhost:7411") as client:
            for chunk in client.generate("def fibonacci(n):", max_tokens=64):
                print(chunk.text, end="")

    Arguments and methods are those of `AsyncClient`. May be used by several threads.
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
        self._client = AsyncClient(address, retry=retry, tenant=tenant, timeout=timeout, tls=tls, api_key=api_key)
        self._loop = Loop()
        # Also when nobody refers to it any more, and when the program ends: sessions of open streams are cancelled.
        self._closer = weakref.finalize(self, self._loop.close, self._client.aclose)

    @property
    def addresses(self) -> Sequence[str]:
        """The gateways, as given."""
        return self._client.addresses

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> SyncStream:
        """Continue a text, or token ids taken as they are."""
        return self._stream(self._client.generate(prompt, **options))

    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        thinking: bool | None = None,
        preserve_thinking: bool | None = None,
        **options: Unpack[Options],
    ) -> SyncStream:
        """Answer a conversation."""
        answer = self._client.chat(
            messages, tools=tools, thinking=thinking, preserve_thinking=preserve_thinking, **options
        )
        return self._stream(answer)

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """`generate`, waited for to its end."""
        return self.generate(prompt, **options).result()

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
    ) -> SyncStream:
        """Go on with a session from where a stream of it was left: `client.resume(*stream.position)`."""
        stream = self._client.resume(
            session_id, token_offset, digest, text_offset, timeout=timeout, detach=detach, leave_running=leave_running
        )
        return self._stream(stream)

    def models(self) -> Sequence[Model]:
        """The models that can be asked for."""
        return self._loop.run(self._client.models())

    def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str = "",
        tools: Tools | None = None,
        thinking: bool | None = None,
        preserve_thinking: bool | None = None,
    ) -> Sequence[int]:
        """The token ids that a text, or a conversation with these tools, would be."""
        asked = self._client.tokenize(
            prompt, model=model, tools=tools, thinking=thinking, preserve_thinking=preserve_thinking
        )
        return self._loop.run(asked)

    def cancel(self, session_id: str) -> bool:
        """End a session within one step; False: it had ended."""
        return self._loop.run(self._client.cancel(session_id))

    def get_session(self, session_id: str) -> Session:
        """What is recorded of a session."""
        return self._loop.run(self._client.get_session(session_id))

    def sessions(self, *, most: int = 1000) -> Sequence[Running]:
        """The tenant's sessions that run on the gateways of this client; see `AsyncClient.sessions`."""
        return self._loop.run(self._client.sessions(most=most))

    def stored_sessions(self, *, most: int = 1000) -> Sequence[Stored]:
        """The tenant's sessions that are retained; see `AsyncClient.stored_sessions`."""
        return self._loop.run(self._client.stored_sessions(most=most))

    def delete_session(self, session_id: str) -> bool:
        """Remove a session's prompt and tokens; False: there was none, or an answer got lost and it was repeated."""
        return self._loop.run(self._client.delete_session(session_id))

    def close(self) -> None:
        """Cancel the sessions of open streams, and close the connections; takes a few seconds at most.

        Threads that read a stream of this client get Cancelled.
        """
        self._closer()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, stream: Stream) -> SyncStream:
        return SyncStream(stream, self._loop, self)
