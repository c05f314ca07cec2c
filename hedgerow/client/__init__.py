"""Hedgerow's Python SDK: `AsyncClient`, and `Client` for code that waits.

Errors are those of `hedgerow.errors`.
"""

from hedgerow.certificates import Tls
from hedgerow.client._admin import ProcessStatus, process_status
from hedgerow.client._async import AsyncClient
from hedgerow.client._chat import (
    Answer,
    ContentDelta,
    Delta,
    Message,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
)
from hedgerow.client._environment import API_KEY
from hedgerow.client._retry import Retry
from hedgerow.client._stream import Stream
from hedgerow.client._sync import Client, SyncStream
from hedgerow.client._types import (
    Chunk,
    Event,
    Finished,
    FinishReason,
    Model,
    Options,
    Position,
    Result,
    Running,
    Sampling,
    Session,
    SessionStatus,
    Started,
    Step,
    Stored,
    Timings,
    Usage,
)

__all__ = [
    "API_KEY",
    "Answer",
    "AsyncClient",
    "Chunk",
    "Client",
    "ContentDelta",
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "Message",
    "Model",
    "Options",
    "Position",
    "ProcessStatus",
    "ReasoningDelta",
    "Result",
    "Retry",
    "Running",
    "Sampling",
    "Session",
    "SessionStatus",
    "Started",
    "Step",
    "Stored",
    "Stream",
    "SyncStream",
    "Timings",
    "Tls",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "process_status",
]
