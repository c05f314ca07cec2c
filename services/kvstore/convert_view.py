"""What clients asked to see of their tokens, between the wire and the log: there it is one opaque string a chunk."""

from __future__ import annotations

from collections.abc import Sequence

from hedgerow.v1 import kvstore_pb2
from services.kvstore.records import Chunk, Session
from services.kvstore.tail import bounded


def packed(wire: kvstore_pb2.AppendEntry) -> bytes:
    """An AppendEntry that has nothing else."""
    if not wire.logprobs and not wire.committed_steps:
        return b""
    return kvstore_pb2.AppendEntry(logprobs=wire.logprobs, committed_steps=wire.committed_steps).SerializeToString()


def steps(chunks: Sequence[Chunk]) -> list[kvstore_pb2.CommittedStep]:
    """The steps that end with a token of the chunks. A chunk's view may have steps of tokens before it: those are in
    the chunk before, where their append was applied first.
    """
    found = []
    for chunk in chunks:
        if chunk.view:
            view = kvstore_pb2.AppendEntry.FromString(chunk.view)
            found += [step for step in view.committed_steps if chunk.offset < step.end <= chunk.end]
    return found


def session_steps(session: Session) -> tuple[list[kvstore_pb2.CommittedStep], int]:
    """As many steps as one answer may have, and the offset from which there are more; 0: these are all."""
    some = bounded(session.chunks)
    return steps(some), some[-1].end if len(some) < len(session.chunks) else 0
