from hedgerow.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FeatureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_KIND_UNSPECIFIED: _ClassVar[FeatureKind]
    FEATURE_KIND_HIDDEN: _ClassVar[FeatureKind]
    FEATURE_KIND_PROJECTED: _ClassVar[FeatureKind]
    FEATURE_KIND_TOKENS: _ClassVar[FeatureKind]
FEATURE_KIND_UNSPECIFIED: FeatureKind
FEATURE_KIND_HIDDEN: FeatureKind
FEATURE_KIND_PROJECTED: FeatureKind
FEATURE_KIND_TOKENS: FeatureKind

class DrafterServiceDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterServiceDescribeResponse(_message.Message):
    __slots__ = ("model", "checkpoint_hash", "vocab_size", "feature_layer_ids", "feature_width", "block_size", "max_budget", "incarnation", "max_sequences", "target_head_hash", "feature_kind", "hidden_size", "mask_token_id", "num_target_layers", "rope_theta", "max_positions", "probe")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BUDGET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TARGET_HEAD_HASH_FIELD_NUMBER: _ClassVar[int]
    FEATURE_KIND_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROPE_THETA_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    model: str
    checkpoint_hash: str
    vocab_size: int
    feature_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    feature_width: int
    block_size: int
    max_budget: int
    incarnation: bytes
    max_sequences: int
    target_head_hash: str
    feature_kind: FeatureKind
    hidden_size: int
    mask_token_id: int
    num_target_layers: int
    rope_theta: float
    max_positions: int
    probe: AcceptanceProbe
    def __init__(self, model: _Optional[str] = ..., checkpoint_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., feature_layer_ids: _Optional[_Iterable[int]] = ..., feature_width: _Optional[int] = ..., block_size: _Optional[int] = ..., max_budget: _Optional[int] = ..., incarnation: _Optional[bytes] = ..., max_sequences: _Optional[int] = ..., target_head_hash: _Optional[str] = ..., feature_kind: _Optional[_Union[FeatureKind, str]] = ..., hidden_size: _Optional[int] = ..., mask_token_id: _Optional[int] = ..., num_target_layers: _Optional[int] = ..., rope_theta: _Optional[float] = ..., max_positions: _Optional[int] = ..., probe: _Optional[_Union[AcceptanceProbe, _Mapping]] = ...) -> None: ...

class AcceptanceProbe(_message.Message):
    __slots__ = ("prompt", "tokens", "budget", "tokens_per_step", "topk_cap")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    TOPK_CAP_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    budget: int
    tokens_per_step: float
    topk_cap: int
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., budget: _Optional[int] = ..., tokens_per_step: _Optional[float] = ..., topk_cap: _Optional[int] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("step_id", "sequences", "features", "release", "verifier", "drafter", "traces")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    sequences: _containers.RepeatedCompositeFieldContainer[DraftSequence]
    features: _common_pb2.Tensor
    release: _containers.RepeatedScalarFieldContainer[int]
    verifier: bytes
    drafter: bytes
    traces: _containers.RepeatedCompositeFieldContainer[_common_pb2.TraceContext]
    def __init__(self, step_id: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[DraftSequence, _Mapping]]] = ..., features: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., release: _Optional[_Iterable[int]] = ..., verifier: _Optional[bytes] = ..., drafter: _Optional[bytes] = ..., traces: _Optional[_Iterable[_Union[_common_pb2.TraceContext, _Mapping]]] = ...) -> None: ...

class DraftSequence(_message.Message):
    __slots__ = ("sequence", "feature_position", "feature_rows", "anchor", "anchor_position", "budget", "topk_cap", "prefix_hash", "trace")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_POSITION_FIELD_NUMBER: _ClassVar[int]
    FEATURE_ROWS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_POSITION_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    TOPK_CAP_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    feature_position: int
    feature_rows: int
    anchor: int
    anchor_position: int
    budget: int
    topk_cap: int
    prefix_hash: bytes
    trace: _common_pb2.TraceContext
    def __init__(self, sequence: _Optional[int] = ..., feature_position: _Optional[int] = ..., feature_rows: _Optional[int] = ..., anchor: _Optional[int] = ..., anchor_position: _Optional[int] = ..., budget: _Optional[int] = ..., topk_cap: _Optional[int] = ..., prefix_hash: _Optional[bytes] = ..., trace: _Optional[_Union[_common_pb2.TraceContext, _Mapping]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("step_id", "trees", "incarnation", "forward_ns", "build_ns")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    BUILD_NS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    trees: _containers.RepeatedCompositeFieldContainer[DraftTree]
    incarnation: bytes
    forward_ns: int
    build_ns: int
    def __init__(self, step_id: _Optional[int] = ..., trees: _Optional[_Iterable[_Union[DraftTree, _Mapping]]] = ..., incarnation: _Optional[bytes] = ..., forward_ns: _Optional[int] = ..., build_ns: _Optional[int] = ...) -> None: ...

class DraftTree(_message.Message):
    __slots__ = ("sequence", "tokens", "parents", "logprobs", "features_from")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FROM_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    features_from: int
    def __init__(self, sequence: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., features_from: _Optional[int] = ...) -> None: ...
