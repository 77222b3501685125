from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens", "num_candidates", "stop_token_ids", "seed", "return_routed_experts")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    num_candidates: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    return_routed_experts: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., num_candidates: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., return_routed_experts: _Optional[bool] = ...) -> None: ...

class CompletionChunk(_message.Message):
    __slots__ = ("tokens", "sampler_logp", "candidate_counts", "candidate_ids", "candidate_logp", "spans", "finish_reason", "routed_experts")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_LOGP_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_IDS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_LOGP_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    sampler_logp: bytes
    candidate_counts: bytes
    candidate_ids: bytes
    candidate_logp: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: str
    routed_experts: _containers.RepeatedCompositeFieldContainer[RoutedExperts]
    def __init__(self, tokens: _Optional[bytes] = ..., sampler_logp: _Optional[bytes] = ..., candidate_counts: _Optional[bytes] = ..., candidate_ids: _Optional[bytes] = ..., candidate_logp: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., routed_experts: _Optional[_Iterable[_Union[RoutedExperts, _Mapping]]] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("start", "num_layers", "num_per_token", "ids", "wide")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    WIDE_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_layers: int
    num_per_token: int
    ids: bytes
    wide: bool
    def __init__(self, start: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_per_token: _Optional[int] = ..., ids: _Optional[bytes] = ..., wide: _Optional[bool] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "session_id", "tokens", "sampling", "min_version", "purpose", "ends_session")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    ENDS_SESSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session_id: str
    tokens: bytes
    sampling: SamplingParams
    min_version: int
    purpose: str
    ends_session: bool
    def __init__(self, request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., tokens: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., min_version: _Optional[int] = ..., purpose: _Optional[str] = ..., ends_session: _Optional[bool] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("task_id", "session_id", "group", "sampler_ids", "tokens", "loss_mask", "sampler_logp", "candidate_counts", "candidate_ids", "candidate_logp", "spans", "reward", "failure", "ending", "num_turns", "num_format_errors", "seconds", "sample", "patch", "verdict", "routed_experts")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_LOGP_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_IDS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_LOGP_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORMAT_ERRORS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PATCH_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    session_id: str
    group: str
    sampler_ids: _containers.RepeatedScalarFieldContainer[str]
    tokens: bytes
    loss_mask: bytes
    sampler_logp: bytes
    candidate_counts: bytes
    candidate_ids: bytes
    candidate_logp: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    reward: float
    failure: str
    ending: str
    num_turns: int
    num_format_errors: int
    seconds: float
    sample: int
    patch: Patch
    verdict: str
    routed_experts: _containers.RepeatedCompositeFieldContainer[RoutedExperts]
    def __init__(self, task_id: _Optional[str] = ..., session_id: _Optional[str] = ..., group: _Optional[str] = ..., sampler_ids: _Optional[_Iterable[str]] = ..., tokens: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., sampler_logp: _Optional[bytes] = ..., candidate_counts: _Optional[bytes] = ..., candidate_ids: _Optional[bytes] = ..., candidate_logp: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., reward: _Optional[float] = ..., failure: _Optional[str] = ..., ending: _Optional[str] = ..., num_turns: _Optional[int] = ..., num_format_errors: _Optional[int] = ..., seconds: _Optional[float] = ..., sample: _Optional[int] = ..., patch: _Optional[_Union[Patch, _Mapping]] = ..., verdict: _Optional[str] = ..., routed_experts: _Optional[_Iterable[_Union[RoutedExperts, _Mapping]]] = ...) -> None: ...

class Patch(_message.Message):
    __slots__ = ("changed", "deleted", "special", "complete")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedCompositeFieldContainer[PatchFile]
    deleted: _containers.RepeatedScalarFieldContainer[bytes]
    special: _containers.RepeatedScalarFieldContainer[bytes]
    complete: bool
    def __init__(self, changed: _Optional[_Iterable[_Union[PatchFile, _Mapping]]] = ..., deleted: _Optional[_Iterable[bytes]] = ..., special: _Optional[_Iterable[bytes]] = ..., complete: _Optional[bool] = ...) -> None: ...

class PatchFile(_message.Message):
    __slots__ = ("path", "content")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    path: bytes
    content: bytes
    def __init__(self, path: _Optional[bytes] = ..., content: _Optional[bytes] = ...) -> None: ...

class TrajectoryGroup(_message.Message):
    __slots__ = ("sequence", "task_id", "trajectories", "zstd")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    ZSTD_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    task_id: str
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    zstd: bytes
    def __init__(self, sequence: _Optional[int] = ..., task_id: _Optional[str] = ..., trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ..., zstd: _Optional[bytes] = ...) -> None: ...

class StreamGroupsRequest(_message.Message):
    __slots__ = ("after", "zstd")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ZSTD_FIELD_NUMBER: _ClassVar[int]
    after: int
    zstd: bool
    def __init__(self, after: _Optional[int] = ..., zstd: _Optional[bool] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class EndSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("every_seconds",)
    EVERY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    every_seconds: float
    def __init__(self, every_seconds: _Optional[float] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("last_sequence", "groups_ready", "episodes_in_flight", "episodes_completed", "episodes_failed")
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_READY_FIELD_NUMBER: _ClassVar[int]
    EPISODES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    EPISODES_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FAILED_FIELD_NUMBER: _ClassVar[int]
    last_sequence: int
    groups_ready: int
    episodes_in_flight: int
    episodes_completed: int
    episodes_failed: int
    def __init__(self, last_sequence: _Optional[int] = ..., groups_ready: _Optional[int] = ..., episodes_in_flight: _Optional[int] = ..., episodes_completed: _Optional[int] = ..., episodes_failed: _Optional[int] = ...) -> None: ...

class AckGroupsRequest(_message.Message):
    __slots__ = ("sequence", "taken", "freshness")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    FRESHNESS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    taken: int
    freshness: Freshness
    def __init__(self, sequence: _Optional[int] = ..., taken: _Optional[int] = ..., freshness: _Optional[_Union[Freshness, _Mapping]] = ...) -> None: ...

class Freshness(_message.Message):
    __slots__ = ("version", "groups_per_update", "num_collected", "staleness_limit")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_UPDATE_FIELD_NUMBER: _ClassVar[int]
    NUM_COLLECTED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_LIMIT_FIELD_NUMBER: _ClassVar[int]
    version: int
    groups_per_update: int
    num_collected: int
    staleness_limit: int
    def __init__(self, version: _Optional[int] = ..., groups_per_update: _Optional[int] = ..., num_collected: _Optional[int] = ..., staleness_limit: _Optional[int] = ...) -> None: ...

class AckGroupsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("split", "num_tasks", "num_samples", "min_version", "sampling", "samples")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    split: str
    num_tasks: int
    num_samples: int
    min_version: int
    sampling: SamplingParams
    samples: _containers.RepeatedCompositeFieldContainer[EvaluationSample]
    def __init__(self, split: _Optional[str] = ..., num_tasks: _Optional[int] = ..., num_samples: _Optional[int] = ..., min_version: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[EvaluationSample, _Mapping]]] = ...) -> None: ...

class EvaluationSample(_message.Message):
    __slots__ = ("task_id", "sample", "attempt")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    sample: int
    attempt: int
    def __init__(self, task_id: _Optional[str] = ..., sample: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...
