from hedgerow.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AppendStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    APPEND_STATUS_UNSPECIFIED: _ClassVar[AppendStatus]
    APPEND_STATUS_OK: _ClassVar[AppendStatus]
    APPEND_STATUS_FENCED: _ClassVar[AppendStatus]
    APPEND_STATUS_GAP: _ClassVar[AppendStatus]
    APPEND_STATUS_DIGEST_MISMATCH: _ClassVar[AppendStatus]
    APPEND_STATUS_CONFLICT: _ClassVar[AppendStatus]
    APPEND_STATUS_FINISHED: _ClassVar[AppendStatus]
    APPEND_STATUS_NOT_FOUND: _ClassVar[AppendStatus]
    APPEND_STATUS_GONE: _ClassVar[AppendStatus]
    APPEND_STATUS_FORGOTTEN: _ClassVar[AppendStatus]
    APPEND_STATUS_UNAVAILABLE: _ClassVar[AppendStatus]
APPEND_STATUS_UNSPECIFIED: AppendStatus
APPEND_STATUS_OK: AppendStatus
APPEND_STATUS_FENCED: AppendStatus
APPEND_STATUS_GAP: AppendStatus
APPEND_STATUS_DIGEST_MISMATCH: AppendStatus
APPEND_STATUS_CONFLICT: AppendStatus
APPEND_STATUS_FINISHED: AppendStatus
APPEND_STATUS_NOT_FOUND: AppendStatus
APPEND_STATUS_GONE: AppendStatus
APPEND_STATUS_FORGOTTEN: AppendStatus
APPEND_STATUS_UNAVAILABLE: AppendStatus

class SessionRecord(_message.Message):
    __slots__ = ("session_id", "birth", "model", "tenant", "prompt", "requested", "resolved", "fingerprint", "mode", "key_split", "created_unix_ms", "speculation", "detach", "deadline_unix_ms", "priority", "return_steps", "return_trees", "trace")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    KEY_SPLIT_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETURN_STEPS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TREES_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    birth: bytes
    model: str
    tenant: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    requested: _common_pb2.SamplingParams
    resolved: _common_pb2.SamplingParams
    fingerprint: _common_pb2.Fingerprint
    mode: _common_pb2.ExecutionMode
    key_split: int
    created_unix_ms: int
    speculation: _common_pb2.SpeculationParams
    detach: bool
    deadline_unix_ms: int
    priority: int
    return_steps: bool
    return_trees: bool
    trace: _common_pb2.TraceContext
    def __init__(self, session_id: _Optional[str] = ..., birth: _Optional[bytes] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., requested: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., resolved: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., mode: _Optional[_Union[_common_pb2.ExecutionMode, str]] = ..., key_split: _Optional[int] = ..., created_unix_ms: _Optional[int] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationParams, _Mapping]] = ..., detach: bool = ..., deadline_unix_ms: _Optional[int] = ..., priority: _Optional[int] = ..., return_steps: bool = ..., return_trees: bool = ..., trace: _Optional[_Union[_common_pb2.TraceContext, _Mapping]] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("record", "owner", "digest", "ttl_ms", "replaces")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    record: SessionRecord
    owner: bytes
    digest: bytes
    ttl_ms: int
    replaces: bytes
    def __init__(self, record: _Optional[_Union[SessionRecord, _Mapping]] = ..., owner: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., replaces: _Optional[bytes] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("created", "lease", "existing")
    CREATED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EXISTING_FIELD_NUMBER: _ClassVar[int]
    created: bool
    lease: _common_pb2.Lease
    existing: SessionState
    def __init__(self, created: bool = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., existing: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("epoch", "owner", "length", "digest", "finish_reason", "usage", "cancel_marked", "matched_stop", "matched_token", "best_effort_from")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_MARKED_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BEST_EFFORT_FROM_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    owner: bytes
    length: int
    digest: bytes
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    cancel_marked: bool
    matched_stop: str
    matched_token: int
    best_effort_from: int
    def __init__(self, epoch: _Optional[int] = ..., owner: _Optional[bytes] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., cancel_marked: bool = ..., matched_stop: _Optional[str] = ..., matched_token: _Optional[int] = ..., best_effort_from: _Optional[int] = ...) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("session_id", "owner", "epoch_floor", "birth", "only_expired", "record", "digest", "ttl_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FLOOR_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    ONLY_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    owner: bytes
    epoch_floor: int
    birth: bytes
    only_expired: bool
    record: SessionRecord
    digest: bytes
    ttl_ms: int
    def __init__(self, session_id: _Optional[str] = ..., owner: _Optional[bytes] = ..., epoch_floor: _Optional[int] = ..., birth: _Optional[bytes] = ..., only_expired: bool = ..., record: _Optional[_Union[SessionRecord, _Mapping]] = ..., digest: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class AcquireLeaseResponse(_message.Message):
    __slots__ = ("lease", "state")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    lease: _common_pb2.Lease
    state: SessionState
    def __init__(self, lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class RenewOwnerRequest(_message.Message):
    __slots__ = ("owner", "ttl_ms")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    ttl_ms: int
    def __init__(self, owner: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RenewOwnerResponse(_message.Message):
    __slots__ = ("cancelled_sessions",)
    CANCELLED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    cancelled_sessions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cancelled_sessions: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("session_id", "lease", "birth")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease: _common_pb2.Lease
    birth: bytes
    def __init__(self, session_id: _Optional[str] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., birth: _Optional[bytes] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: SessionState
    def __init__(self, state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class ListExpiredRequest(_message.Message):
    __slots__ = ("limit", "cursor")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    limit: int
    cursor: str
    def __init__(self, limit: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class ExpiredSession(_message.Message):
    __slots__ = ("session_id", "state", "detach", "deadline_unix_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    state: SessionState
    detach: bool
    deadline_unix_ms: int
    def __init__(self, session_id: _Optional[str] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ..., detach: bool = ..., deadline_unix_ms: _Optional[int] = ...) -> None: ...

class ListExpiredResponse(_message.Message):
    __slots__ = ("sessions", "cursor")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[ExpiredSession]
    cursor: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[ExpiredSession, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class KvStoreServiceListSessionsRequest(_message.Message):
    __slots__ = ("tenant", "limit", "cursor")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limit: int
    cursor: str
    def __init__(self, tenant: _Optional[str] = ..., limit: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class SessionSummary(_message.Message):
    __slots__ = ("session_id", "model", "prompt_tokens", "max_tokens", "created_unix_ms", "deadline_unix_ms", "detach", "mode")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    created_unix_ms: int
    deadline_unix_ms: int
    detach: bool
    mode: _common_pb2.ExecutionMode
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., created_unix_ms: _Optional[int] = ..., deadline_unix_ms: _Optional[int] = ..., detach: bool = ..., mode: _Optional[_Union[_common_pb2.ExecutionMode, str]] = ...) -> None: ...

class ListedSession(_message.Message):
    __slots__ = ("summary", "state", "owner_lives")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OWNER_LIVES_FIELD_NUMBER: _ClassVar[int]
    summary: SessionSummary
    state: SessionState
    owner_lives: bool
    def __init__(self, summary: _Optional[_Union[SessionSummary, _Mapping]] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ..., owner_lives: bool = ...) -> None: ...

class KvStoreServiceListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "cursor")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[ListedSession]
    cursor: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[ListedSession, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class WatchCancelsRequest(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    def __init__(self, owner: _Optional[bytes] = ...) -> None: ...

class WatchCancelsResponse(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("batch_id", "entries", "traces")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    entries: _containers.RepeatedCompositeFieldContainer[AppendEntry]
    traces: _containers.RepeatedCompositeFieldContainer[_common_pb2.TraceContext]
    def __init__(self, batch_id: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[AppendEntry, _Mapping]]] = ..., traces: _Optional[_Iterable[_Union[_common_pb2.TraceContext, _Mapping]]] = ...) -> None: ...

class AppendEntry(_message.Message):
    __slots__ = ("session_id", "lease", "birth", "offset", "tokens", "digest_before", "digest_after", "finish_reason", "usage", "matched_stop", "matched_token", "logprobs", "steps", "token_digests", "best_effort_from", "committed_steps", "spent")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_AFTER_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    BEST_EFFORT_FROM_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease: _common_pb2.Lease
    birth: bytes
    offset: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    digest_before: bytes
    digest_after: bytes
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    matched_stop: str
    matched_token: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    steps: _containers.RepeatedCompositeFieldContainer[_common_pb2.StepStats]
    token_digests: _containers.RepeatedScalarFieldContainer[bytes]
    best_effort_from: int
    committed_steps: _containers.RepeatedCompositeFieldContainer[CommittedStep]
    spent: _common_pb2.Usage
    def __init__(self, session_id: _Optional[str] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., birth: _Optional[bytes] = ..., offset: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., digest_before: _Optional[bytes] = ..., digest_after: _Optional[bytes] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., matched_stop: _Optional[str] = ..., matched_token: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[_common_pb2.StepStats, _Mapping]]] = ..., token_digests: _Optional[_Iterable[bytes]] = ..., best_effort_from: _Optional[int] = ..., committed_steps: _Optional[_Iterable[_Union[CommittedStep, _Mapping]]] = ..., spent: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class CommittedStep(_message.Message):
    __slots__ = ("stats", "end", "timings")
    STATS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    stats: _common_pb2.StepStats
    end: int
    timings: _common_pb2.Timings
    def __init__(self, stats: _Optional[_Union[_common_pb2.StepStats, _Mapping]] = ..., end: _Optional[int] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("batch_id", "results")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    results: _containers.RepeatedCompositeFieldContainer[AppendResult]
    def __init__(self, batch_id: _Optional[int] = ..., results: _Optional[_Iterable[_Union[AppendResult, _Mapping]]] = ...) -> None: ...

class AppendResult(_message.Message):
    __slots__ = ("session_id", "status", "state")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    status: AppendStatus
    state: SessionState
    def __init__(self, session_id: _Optional[str] = ..., status: _Optional[_Union[AppendStatus, str]] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class KvStoreServiceGetSessionRequest(_message.Message):
    __slots__ = ("session_id", "from_offset", "state_only")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    from_offset: int
    state_only: bool
    def __init__(self, session_id: _Optional[str] = ..., from_offset: _Optional[int] = ..., state_only: bool = ...) -> None: ...

class KvStoreServiceGetSessionResponse(_message.Message):
    __slots__ = ("record", "state", "tokens", "steps", "more_steps_from")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MORE_STEPS_FROM_FIELD_NUMBER: _ClassVar[int]
    record: SessionRecord
    state: SessionState
    tokens: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedCompositeFieldContainer[CommittedStep]
    more_steps_from: int
    def __init__(self, record: _Optional[_Union[SessionRecord, _Mapping]] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[_Union[CommittedStep, _Mapping]]] = ..., more_steps_from: _Optional[int] = ...) -> None: ...

class TailRequest(_message.Message):
    __slots__ = ("session_id", "from_offset")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_OFFSET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    from_offset: int
    def __init__(self, session_id: _Optional[str] = ..., from_offset: _Optional[int] = ...) -> None: ...

class TailResponse(_message.Message):
    __slots__ = ("offset", "tokens", "digest", "state", "steps")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    digest: bytes
    state: SessionState
    steps: _containers.RepeatedCompositeFieldContainer[CommittedStep]
    def __init__(self, offset: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., digest: _Optional[bytes] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[CommittedStep, _Mapping]]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "lease", "birth", "finish_reason", "usage")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease: _common_pb2.Lease
    birth: bytes
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    def __init__(self, session_id: _Optional[str] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., birth: _Optional[bytes] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: SessionState
    def __init__(self, state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class MarkCancelRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class MarkCancelResponse(_message.Message):
    __slots__ = ("was_running", "owner")
    WAS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    was_running: bool
    owner: bytes
    def __init__(self, was_running: bool = ..., owner: _Optional[bytes] = ...) -> None: ...

class KvStoreServiceDeleteSessionRequest(_message.Message):
    __slots__ = ("session_id", "birth")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    birth: bytes
    def __init__(self, session_id: _Optional[str] = ..., birth: _Optional[bytes] = ...) -> None: ...

class KvStoreServiceDeleteSessionResponse(_message.Message):
    __slots__ = ("existed",)
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    existed: bool
    def __init__(self, existed: bool = ...) -> None: ...

class PutPrefixesRequest(_message.Message):
    __slots__ = ("verifier", "block_hashes", "ttl_ms")
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    verifier: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    ttl_ms: int
    def __init__(self, verifier: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PutPrefixesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindPrefixRequest(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FindPrefixResponse(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[PrefixHolder]
    def __init__(self, holders: _Optional[_Iterable[_Union[PrefixHolder, _Mapping]]] = ...) -> None: ...

class PrefixHolder(_message.Message):
    __slots__ = ("verifier", "blocks")
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    verifier: str
    blocks: int
    def __init__(self, verifier: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...
