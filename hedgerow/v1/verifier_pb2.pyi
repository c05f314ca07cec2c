from hedgerow.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("model", "fingerprint", "vocab_size", "context_length", "eos_token_ids", "feature_layer_ids", "feature_width", "max_budget", "default_budget", "incarnation", "max_sequences", "default_sampling")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_BUDGET_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_BUDGET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: _common_pb2.Fingerprint
    vocab_size: int
    context_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    feature_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    feature_width: int
    max_budget: int
    default_budget: int
    incarnation: bytes
    max_sequences: int
    default_sampling: _common_pb2.SamplingParams
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., feature_layer_ids: _Optional[_Iterable[int]] = ..., feature_width: _Optional[int] = ..., max_budget: _Optional[int] = ..., default_budget: _Optional[int] = ..., incarnation: _Optional[bytes] = ..., max_sequences: _Optional[int] = ..., default_sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("gateway", "start", "cancel", "committed")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    gateway: bytes
    start: _containers.RepeatedCompositeFieldContainer[StartSequence]
    cancel: _containers.RepeatedCompositeFieldContainer[CancelSequence]
    committed: _containers.RepeatedCompositeFieldContainer[CommittedOffset]
    def __init__(self, gateway: _Optional[bytes] = ..., start: _Optional[_Iterable[_Union[StartSequence, _Mapping]]] = ..., cancel: _Optional[_Iterable[_Union[CancelSequence, _Mapping]]] = ..., committed: _Optional[_Iterable[_Union[CommittedOffset, _Mapping]]] = ...) -> None: ...

class StartSequence(_message.Message):
    __slots__ = ("session_id", "epoch", "attempt", "prompt", "committed", "digest", "sampling", "speculation", "priority", "tenant", "deadline_ms", "trace", "key_split", "return_trees", "mode")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    KEY_SPLIT_FIELD_NUMBER: _ClassVar[int]
    RETURN_TREES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    attempt: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    committed: _containers.RepeatedScalarFieldContainer[int]
    digest: bytes
    sampling: _common_pb2.SamplingParams
    speculation: _common_pb2.SpeculationParams
    priority: int
    tenant: str
    deadline_ms: int
    trace: _common_pb2.TraceContext
    key_split: int
    return_trees: bool
    mode: _common_pb2.ExecutionMode
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., committed: _Optional[_Iterable[int]] = ..., digest: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationParams, _Mapping]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., trace: _Optional[_Union[_common_pb2.TraceContext, _Mapping]] = ..., key_split: _Optional[int] = ..., return_trees: bool = ..., mode: _Optional[_Union[_common_pb2.ExecutionMode, str]] = ...) -> None: ...

class CancelSequence(_message.Message):
    __slots__ = ("session_id", "epoch", "attempt")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    attempt: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class CommittedOffset(_message.Message):
    __slots__ = ("session_id", "epoch", "attempt", "offset")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    attempt: int
    offset: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("step_id", "updates", "timings", "incarnation")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    updates: _containers.RepeatedCompositeFieldContainer[SequenceUpdate]
    timings: _common_pb2.Timings
    incarnation: bytes
    def __init__(self, step_id: _Optional[int] = ..., updates: _Optional[_Iterable[_Union[SequenceUpdate, _Mapping]]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class SequenceUpdate(_message.Message):
    __slots__ = ("session_id", "epoch", "attempt", "offset", "tokens", "finish_reason", "matched_stop", "matched_token", "usage", "stats", "logprobs", "error", "key_split", "timings", "chunks", "cached_prompt_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    KEY_SPLIT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    attempt: int
    offset: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _common_pb2.FinishReason
    matched_stop: str
    matched_token: int
    usage: _common_pb2.Usage
    stats: _common_pb2.StepStats
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    error: SequenceError
    key_split: int
    timings: _common_pb2.Timings
    chunks: _containers.RepeatedCompositeFieldContainer[PrefillChunk]
    cached_prompt_tokens: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., offset: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., matched_stop: _Optional[str] = ..., matched_token: _Optional[int] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., stats: _Optional[_Union[_common_pb2.StepStats, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., error: _Optional[_Union[SequenceError, _Mapping]] = ..., key_split: _Optional[int] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[PrefillChunk, _Mapping]]] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class PrefillChunk(_message.Message):
    __slots__ = ("steps", "prompt_rows", "replayed_rows", "took_ns", "end_unix_ns")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_ROWS_FIELD_NUMBER: _ClassVar[int]
    TOOK_NS_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    prompt_rows: int
    replayed_rows: int
    took_ns: int
    end_unix_ns: int
    def __init__(self, steps: _Optional[int] = ..., prompt_rows: _Optional[int] = ..., replayed_rows: _Optional[int] = ..., took_ns: _Optional[int] = ..., end_unix_ns: _Optional[int] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("reason", "message", "metadata", "retry_after_ms", "held_epoch", "held_attempt")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    HELD_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    retry_after_ms: int
    held_epoch: int
    held_attempt: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., retry_after_ms: _Optional[int] = ..., held_epoch: _Optional[int] = ..., held_attempt: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running", "waiting", "waiting_limit", "free_pages", "total_pages", "steps", "tokens", "refused_trees", "missed_drafts", "held_sequences", "draining", "messages_sent")
    class RefusedTreesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_LIMIT_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TREES_FIELD_NUMBER: _ClassVar[int]
    MISSED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    HELD_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_SENT_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_limit: int
    free_pages: int
    total_pages: int
    steps: int
    tokens: int
    refused_trees: _containers.ScalarMap[str, int]
    missed_drafts: int
    held_sequences: int
    draining: bool
    messages_sent: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_limit: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., refused_trees: _Optional[_Mapping[str, int]] = ..., missed_drafts: _Optional[int] = ..., held_sequences: _Optional[int] = ..., draining: bool = ..., messages_sent: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: int
    def __init__(self, running: _Optional[int] = ...) -> None: ...
