"""The blocking client: AsyncClient on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

from hedgerow.client._async import DEFAULT_ADDRESS, AsyncClient, Prompt
from hedgerow.client._convert import Messages
from hedgerow.client._retry import Retry
from hedgerow.client._stream import Stream
from hedgerow.client._types import Chunk, Event, Finished, Model, Options, Result, Session, Started
from hedgerow.errors import Cancelled

Answer = TypeVar("Answer")


class _Loop:
    """An event loop in a daemon thread, which other threads wait for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hedgerow-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Wait for `work`. An interrupt of the waiting thread cancels it. Raises Cancelled after `close`."""
        if self._loop.is_closed():
            work.close()
            raise Cancelled("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncStream:
    """Chunks of one generation: `for chunk in stream`. See `Stream`, whose rules hold here too."""

    def __init__(self, stream: Stream, loop: _Loop) -> None:
        self._stream, self._loop = stream, loop

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

    def events(self) -> Iterator[Event]:
        """Everything, the first and last event too."""
        with self:
            while (event := self._loop.run(self._stream._next())) is not None:
                yield event

    def result(self) -> Result:
        """Wait for the end; the whole of it."""
        return self._loop.run(self._stream.result())

    def close(self) -> None:
        """Cancel the session unless it has ended."""
        self._loop.run(self._stream.aclose())

    def __iter__(self) -> SyncStream:
        return self

    def __next__(self) -> Chunk:
        chunk = self._loop.run(self._stream._next_chunk())
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
    """A connection to a gateway, for code that waits.

        with Client("localhost:7411") as client:
            for chunk in client.generate("def fibonacci(n):", max_tokens=64):
                print(chunk.text, end="")

    Methods are those of `AsyncClient`. May be used by several threads.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, retry: Retry = Retry()) -> None:  # noqa: B008  frozen
        self._client = AsyncClient(address, retry=retry)
        self._loop = _Loop()
        self._open = True

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> SyncStream:
        """Continue a text, or token ids taken as they are."""
        return SyncStream(self._client.generate(prompt, **options), self._loop)

    def chat(
        self,
        messages: Messages,
        *,
        thinking: bool | None = None,
        preserve_thinking: bool | None = None,
        **options: Unpack[Options],
    ) -> SyncStream:
        """Answer a conversation."""
        stream = self._client.chat(messages, thinking=thinking, preserve_thinking=preserve_thinking, **options)
        return SyncStream(stream, self._loop)

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """`generate`, waited for to its end."""
        return self.generate(prompt, **options).result()

    def models(self) -> Sequence[Model]:
        """The models that can be asked for."""
        return self._loop.run(self._client.models())

    def tokenize(self, prompt: str | Messages, *, model: str = "", thinking: bool | None = None) -> Sequence[int]:
        """The token ids that a text or a conversation would be."""
        return self._loop.run(self._client.tokenize(prompt, model=model, thinking=thinking))

    def cancel(self, session_id: str) -> bool:
        """End a session within one step; False: it had ended."""
        return self._loop.run(self._client.cancel(session_id))

    def get_session(self, session_id: str) -> Session:
        """What is recorded of a session."""
        return self._loop.run(self._client.get_session(session_id))

    def delete_session(self, session_id: str) -> bool:
        """Remove a session's prompt and tokens; False: there was none."""
        return self._loop.run(self._client.delete_session(session_id))

    def close(self) -> None:
        """Close the connection; open streams are cancelled."""
        if self._open:
            self._open = False
            self._loop.run(self._client.aclose())
            self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
