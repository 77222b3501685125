from contracts.pb import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Register(_message.Message):
    __slots__ = ("sampler_id", "group", "accelerator", "weight_format", "kv_format", "max_sessions", "model_fingerprint", "tokenizer_fingerprint", "protocol_version", "version", "formats", "tokens_per_second", "price_per_hour")
    SAMPLER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    sampler_id: str
    group: str
    accelerator: str
    weight_format: str
    kv_format: str
    max_sessions: int
    model_fingerprint: str
    tokenizer_fingerprint: str
    protocol_version: int
    version: int
    formats: _containers.RepeatedScalarFieldContainer[str]
    tokens_per_second: float
    price_per_hour: float
    def __init__(self, sampler_id: _Optional[str] = ..., group: _Optional[str] = ..., accelerator: _Optional[str] = ..., weight_format: _Optional[str] = ..., kv_format: _Optional[str] = ..., max_sessions: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., protocol_version: _Optional[int] = ..., version: _Optional[int] = ..., formats: _Optional[_Iterable[str]] = ..., tokens_per_second: _Optional[float] = ..., price_per_hour: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("num_running", "num_waiting", "version", "tokens_per_second", "kv_used_fraction", "switch")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    KV_USED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    version: int
    tokens_per_second: float
    kv_used_fraction: float
    switch: Switch
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., version: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., kv_used_fraction: _Optional[float] = ..., switch: _Optional[_Union[Switch, _Mapping]] = ...) -> None: ...

class Switch(_message.Message):
    __slots__ = ("base_version", "num_bytes", "fetch_seconds", "apply_seconds", "verify_seconds", "load_seconds", "pause_seconds", "version", "weights_checksum")
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    APPLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    base_version: int
    num_bytes: int
    fetch_seconds: float
    apply_seconds: float
    verify_seconds: float
    load_seconds: float
    pause_seconds: float
    version: int
    weights_checksum: str
    def __init__(self, base_version: _Optional[int] = ..., num_bytes: _Optional[int] = ..., fetch_seconds: _Optional[float] = ..., apply_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., load_seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ..., version: _Optional[int] = ..., weights_checksum: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("request_id", "chunk")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chunk: _rollout_pb2.CompletionChunk
    def __init__(self, request_id: _Optional[str] = ..., chunk: _Optional[_Union[_rollout_pb2.CompletionChunk, _Mapping]] = ...) -> None: ...

class Deltas(_message.Message):
    __slots__ = ("deltas",)
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    def __init__(self, deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("request_id", "reason", "bad_request")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BAD_REQUEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    bad_request: bool
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., bad_request: _Optional[bool] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class SamplerMessage(_message.Message):
    __slots__ = ("register", "heartbeat", "delta", "failed", "leaving", "deltas")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    register: Register
    heartbeat: Heartbeat
    delta: Delta
    failed: RequestFailed
    leaving: Leaving
    deltas: Deltas
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., failed: _Optional[_Union[RequestFailed, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., deltas: _Optional[_Union[Deltas, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_seconds", "weights_address")
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_seconds: float
    weights_address: str
    def __init__(self, heartbeat_seconds: _Optional[float] = ..., weights_address: _Optional[str] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class EndSession(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Expel(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class GatewayMessage(_message.Message):
    __slots__ = ("welcome", "generate", "abort", "end_session", "drain", "expel")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    END_SESSION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    EXPEL_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    generate: _rollout_pb2.GenerateRequest
    abort: Abort
    end_session: EndSession
    drain: Drain
    expel: Expel
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., generate: _Optional[_Union[_rollout_pb2.GenerateRequest, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., end_session: _Optional[_Union[EndSession, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., expel: _Optional[_Union[Expel, _Mapping]] = ...) -> None: ...

class SamplerState(_message.Message):
    __slots__ = ("register", "heartbeat", "state", "num_sessions")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    register: Register
    heartbeat: Heartbeat
    state: str
    num_sessions: int
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., state: _Optional[str] = ..., num_sessions: _Optional[int] = ...) -> None: ...

class Cost(_message.Message):
    __slots__ = ("gpu_hours", "dollars")
    GPU_HOURS_FIELD_NUMBER: _ClassVar[int]
    DOLLARS_FIELD_NUMBER: _ClassVar[int]
    gpu_hours: float
    dollars: float
    def __init__(self, gpu_hours: _Optional[float] = ..., dollars: _Optional[float] = ...) -> None: ...

class GroupState(_message.Message):
    __slots__ = ("group", "purpose", "capacity_share", "sessions_routed", "tokens_sampled", "tokens_per_second", "cost", "num_target", "num_held", "update")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_SHARE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_ROUTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    group: str
    purpose: str
    capacity_share: float
    sessions_routed: int
    tokens_sampled: int
    tokens_per_second: float
    cost: Cost
    num_target: int
    num_held: int
    update: GroupUpdate
    def __init__(self, group: _Optional[str] = ..., purpose: _Optional[str] = ..., capacity_share: _Optional[float] = ..., sessions_routed: _Optional[int] = ..., tokens_sampled: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., cost: _Optional[_Union[Cost, _Mapping]] = ..., num_target: _Optional[int] = ..., num_held: _Optional[int] = ..., update: _Optional[_Union[GroupUpdate, _Mapping]] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("num_queued", "backlog", "taken_per_second", "session_seconds", "staleness", "work")
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    TAKEN_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SESSION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    num_queued: int
    backlog: float
    taken_per_second: float
    session_seconds: float
    staleness: float
    work: float
    def __init__(self, num_queued: _Optional[int] = ..., backlog: _Optional[float] = ..., taken_per_second: _Optional[float] = ..., session_seconds: _Optional[float] = ..., staleness: _Optional[float] = ..., work: _Optional[float] = ...) -> None: ...

class GroupUpdate(_message.Message):
    __slots__ = ("group", "num_trajectories", "num_tokens", "kl", "share_out_of_band")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    SHARE_OUT_OF_BAND_FIELD_NUMBER: _ClassVar[int]
    group: str
    num_trajectories: int
    num_tokens: int
    kl: float
    share_out_of_band: float
    def __init__(self, group: _Optional[str] = ..., num_trajectories: _Optional[int] = ..., num_tokens: _Optional[int] = ..., kl: _Optional[float] = ..., share_out_of_band: _Optional[float] = ...) -> None: ...

class UpdateReport(_message.Message):
    __slots__ = ("step", "version", "seconds", "update_seconds", "num_taken", "sequences", "staleness", "kl", "share_out_of_band", "reward", "groups", "alarms")
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    SHARE_OUT_OF_BAND_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    step: int
    version: int
    seconds: float
    update_seconds: float
    num_taken: int
    sequences: _containers.RepeatedScalarFieldContainer[int]
    staleness: float
    kl: float
    share_out_of_band: float
    reward: float
    groups: _containers.RepeatedCompositeFieldContainer[GroupUpdate]
    alarms: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[int] = ..., version: _Optional[int] = ..., seconds: _Optional[float] = ..., update_seconds: _Optional[float] = ..., num_taken: _Optional[int] = ..., sequences: _Optional[_Iterable[int]] = ..., staleness: _Optional[float] = ..., kl: _Optional[float] = ..., share_out_of_band: _Optional[float] = ..., reward: _Optional[float] = ..., groups: _Optional[_Iterable[_Union[GroupUpdate, _Mapping]]] = ..., alarms: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupTarget(_message.Message):
    __slots__ = ("group", "num_target", "num_held", "problem")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    group: str
    num_target: int
    num_held: int
    problem: str
    def __init__(self, group: _Optional[str] = ..., num_target: _Optional[int] = ..., num_held: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class ReportTargetsRequest(_message.Message):
    __slots__ = ("targets", "problem")
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedCompositeFieldContainer[GroupTarget]
    problem: str
    def __init__(self, targets: _Optional[_Iterable[_Union[GroupTarget, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class ReportTargetsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("samplers", "groups", "episodes_in_flight", "groups_ready", "counters", "last_sequence", "demand", "update", "alarms", "seconds")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SAMPLERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EPISODES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_READY_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    samplers: _containers.RepeatedCompositeFieldContainer[SamplerState]
    groups: _containers.RepeatedCompositeFieldContainer[GroupState]
    episodes_in_flight: int
    groups_ready: int
    counters: _containers.ScalarMap[str, int]
    last_sequence: int
    demand: Demand
    update: UpdateReport
    alarms: _containers.RepeatedScalarFieldContainer[str]
    seconds: float
    def __init__(self, samplers: _Optional[_Iterable[_Union[SamplerState, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupState, _Mapping]]] = ..., episodes_in_flight: _Optional[int] = ..., groups_ready: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., last_sequence: _Optional[int] = ..., demand: _Optional[_Union[Demand, _Mapping]] = ..., update: _Optional[_Union[UpdateReport, _Mapping]] = ..., alarms: _Optional[_Iterable[str]] = ..., seconds: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("sampler_id",)
    SAMPLER_ID_FIELD_NUMBER: _ClassVar[int]
    sampler_id: str
    def __init__(self, sampler_id: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
