"""The vocabulary: the values that travel between trainer, weight service and fleet.

Owns the names, shapes and invariants of those values. Must not do I/O, and needs only the
standard library and numpy.

Shape letters: T sampled tokens of a completion, N tokens of a whole buffer, C candidates of all
tokens together (CSR), G trajectories of a prompt.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from contracts.errors import BadInputError
from contracts.routed import RoutedExperts, check_routed

PROTOCOL_VERSION = 2

Bytes = bytes | bytearray | memoryview


class WeightFormat(enum.StrEnum):
    """Weight formats a sampler can load; the value is the name on the wire and in run files."""

    BF16 = "bf16"
    FP8_BLOCK = "fp8-block"
    FP8_CHANNEL = "fp8-channel"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class KvFormat(enum.StrEnum):
    """Precision of a sampler's KV cache."""

    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"  # blocks of 16 along a head


class Purpose(enum.StrEnum):
    """What a session is for. Groups serve one purpose only."""

    TRAIN = "train"
    EVALUATE = "evaluate"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Ending(enum.StrEnum):
    """How an episode ended. Only FAILURE carries no reward."""

    SUBMITTED = "submitted"
    FORMAT_ERRORS = "format_errors"
    TURN_LIMIT = "turn_limit"
    LENGTH = "length"
    TIMEOUT = "timeout"
    FAILURE = "failure"


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) were drawn from policy version `version` (a positive integer)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; the recorded distribution is the one after all of these."""

    temperature: float = 1.0
    top_p: float = 1.0  # in (0, 1]; 1 is off
    top_k: int = 0  # 0 is off
    max_new_tokens: int = 128
    num_candidates: int = 64  # recorded where nothing is truncated
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0  # 0: none chosen, the engine takes one from the session
    return_routed_experts: bool = False  # only a mixture of experts has any

    def __post_init__(self) -> None:
        for rule, good, found in (
            ("temperature > 0", self.temperature > 0, self.temperature),
            ("0 < top_p <= 1", 0 < self.top_p <= 1, self.top_p),
            ("top_k >= 0 (0 is off)", self.top_k >= 0, self.top_k),
            ("max_new_tokens >= 1", self.max_new_tokens >= 1, self.max_new_tokens),
            ("num_candidates >= 1", self.num_candidates >= 1, self.num_candidates),
        ):
            if not good:
                raise BadInputError("sampling parameters", expected=rule, found=found)

    @property
    def truncates(self) -> bool:
        """Whether the distribution drawn from is narrower than the vocabulary."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, kw_only=True)
class CandidateSets:
    """For each token the candidate ids and the sampler's log-probabilities, in CSR form.

    Token t owns entries offsets[t]:offsets[t+1] of `ids` and `logp`. Where the sampler truncates
    (top-p, top-k) a set is the whole support and its probabilities sum to 1; otherwise it is the
    sampler's top candidates, and the token drawn may lie outside.
    """

    offsets: np.ndarray  # int64 [T+1]
    ids: np.ndarray  # int32 [C]
    logp: np.ndarray  # float32 [C]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """Candidates per token, int64 [T]."""
        return np.diff(self.offsets)

    @staticmethod
    def from_counts(counts: np.ndarray, ids: np.ndarray, logp: np.ndarray) -> CandidateSets:
        """`counts` [T], `ids` and `logp` [sum(counts)]."""
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        return CandidateSets(offsets=offsets, ids=ids, logp=logp)

    @staticmethod
    def empty() -> CandidateSets:
        return CandidateSets.from_counts(
            np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
        )

    @staticmethod
    def concatenate(parts: list[CandidateSets]) -> CandidateSets:
        if not parts:
            return CandidateSets.empty()
        return CandidateSets.from_counts(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.logp for part in parts]),
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled reply, or a part of it while it streams (then `finish_reason` is None).

    Invariants, enforced by `check_completion`: all log-probs finite and <= 0 beyond rounding, the
    token drawn is in its candidate set where the sampler truncates, spans cover 0..T exactly.
    """

    tokens: np.ndarray  # int32 [T]
    sampler_logp: np.ndarray  # float32 [T]
    candidates: CandidateSets  # T sets
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason | None
    routed_experts: tuple[RoutedExperts, ...] = ()  # also of given tokens, in order of computation

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def concatenate(parts: list[Completion]) -> Completion:
        """Joins chunks in order. Adjacent spans of one version become one span."""
        spans: list[VersionSpan] = []
        start = 0
        for part in parts:
            for span in part.spans:
                moved = VersionSpan(
                    version=span.version, start=start + span.start, end=start + span.end
                )
                if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
                    moved = VersionSpan(
                        version=moved.version, start=spans.pop().start, end=moved.end
                    )
                spans.append(moved)
            start += len(part)
        no_tokens = (np.zeros(0, np.int32), np.zeros(0, np.float32))
        return Completion(
            tokens=np.concatenate([p.tokens for p in parts]) if parts else no_tokens[0],
            sampler_logp=np.concatenate([p.sampler_logp for p in parts]) if parts else no_tokens[1],
            candidates=CandidateSets.concatenate([part.candidates for part in parts]),
            spans=tuple(spans),
            finish_reason=parts[-1].finish_reason if parts else None,
            routed_experts=RoutedExperts.join(
                routed for part in parts for routed in part.routed_experts
            ),
        )


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Continue the whole token buffer `tokens` of a session.

    `ends_session` says that no turn follows, so that its place is free afterwards.
    """

    request_id: str
    session_id: str
    tokens: np.ndarray  # int32 [N]
    sampling: SamplingParams
    min_version: int = 0
    purpose: Purpose = Purpose.TRAIN
    ends_session: bool = False


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Changes to a tree, file by file. Paths are as the policy left them: not to be trusted."""

    changed: Mapping[str, bytes]  # changed or new: the whole content
    deleted: tuple[str, ...] = ()
    special: tuple[str, ...] = ()  # links, pipes and the like
    complete: bool = True  # False: the tree had grown over its limits

    def __bool__(self) -> bool:
        return bool(self.changed or self.deleted or self.special or not self.complete)


@dataclass(frozen=True, kw_only=True)
class EvaluationSample:
    """One episode that an evaluation wants: sample `sample` of a task, lost `attempt` times."""

    task_id: str
    sample: int
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode as a growing token buffer with the samplers' records laid over it.

    Example, 3 prompt tokens, a reply of 2, an observation of 1, a reply of 1:
        tokens       5 6 7 | 8 9 | 3 | 8
        loss_mask    0 0 0   1 1   0   1
        sampler_logp         a b       c      float32 [3], only the sampled ones
        candidates           A B       C      3 sets
        spans        (version, 3, 5), (version, 6, 7)   positions in the buffer
    """

    task_id: str
    session_id: str
    group: str  # sampler group
    sampler_ids: tuple[str, ...]
    tokens: np.ndarray  # int32 [N]
    loss_mask: np.ndarray  # bool [N]
    sampler_logp: np.ndarray  # float32 [sum(loss_mask)]
    candidates: CandidateSets  # sum(loss_mask) sets
    spans: tuple[VersionSpan, ...]
    reward: float | None
    ending: Ending
    failure: str = ""
    num_turns: int = 0
    num_format_errors: int = 0
    seconds: float = 0.0
    # of an evaluation only
    sample: int = 0  # which of its task's
    patch: Patch | None = None  # what was submitted
    verdict: str = ""  # the grader's reason
    # only where they were asked for: in order, no position twice; some may be missing
    routed_experts: tuple[RoutedExperts, ...] = ()

    @property
    def version(self) -> np.ndarray:
        """Policy version of each sampled token, int64 [sum(loss_mask)]."""
        parts = [np.full(span.end - span.start, span.version, np.int64) for span in self.spans]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class TrajectoryGroup:
    """The G trajectories of one prompt. `sequence` is its place in the trajectory log, from 1."""

    sequence: int
    task_id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, kw_only=True)
class SamplerInfo:
    """What a sampler says of itself when it joins.

    `tokens_per_second` is what it drew at `max_sessions`, measured before it joined (0: it was
    not). `price_per_hour` (US dollars, all its accelerators) is for those who know better than the
    run file's price table. `formats` are what its engine can load; none: only `weight_format`.
    """

    sampler_id: str
    group: str
    accelerator: str
    weight_format: WeightFormat
    kv_format: KvFormat
    max_sessions: int
    model_fingerprint: str
    tokenizer_fingerprint: str
    version: int
    formats: tuple[WeightFormat, ...] = ()
    tokens_per_second: float = 0.0
    price_per_hour: float | None = None
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True)
class GroupUpdate:
    """One training group in one update. None: it had no token in it."""

    group: str
    num_trajectories: int
    num_tokens: int  # sampled ones
    kl: float | None = None  # sampler against trainer, nats per token
    share_out_of_band: float | None = None


@dataclass(frozen=True, kw_only=True)
class Freshness:
    """Where a trainer is that refuses groups more than `staleness_limit` versions old: its next
    update starts from `version` and has `num_collected` of its `groups_per_update` groups."""

    version: int
    groups_per_update: int
    num_collected: int
    staleness_limit: int

    def oldest_version(self, num_ahead: int) -> int | None:
        """The oldest version that a group begun now may be drawn from, if `num_ahead` others are
        trained on before it; None: it would be too old whatever it is drawn from.

        As in AReaL (arXiv 2505.24298, section 5.1), but by the groups still to come, so that
        groups which are refused don't count.
        """
        updates = (self.num_collected + num_ahead) // self.groups_per_update
        if updates > self.staleness_limit:
            return None
        return max(self.version + updates - self.staleness_limit, 0)


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """What the trainer says to the gateway after an update. Seconds; staleness in versions.

    `num_taken` counts the trajectories taken since the report before, also those dropped;
    `update_seconds` is the part of `seconds` in which it computed; `sequences` are of the groups it
    trained on.
    """

    step: int
    version: int
    seconds: float
    update_seconds: float
    num_taken: int
    sequences: tuple[int, ...] = ()
    staleness: float | None = None
    kl: float | None = None
    share_out_of_band: float | None = None
    reward: float | None = None
    groups: tuple[GroupUpdate, ...] = ()
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a checkpoint file; `start` and `end` are absolute byte offsets in `file`."""

    name: str
    dtype: str  # safetensors: BF16, F32, U8, F8_E4M3
    shape: tuple[int, ...]
    file: str
    start: int
    end: int
    checksum: str  # xxh3-128, 32 hex digits


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint directory, name relative to it."""

    name: str
    num_bytes: int
    checksum: str  # xxh3-128


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All bytes of one policy version in one format."""

    version: int
    format: WeightFormat
    recipe: str = ""
    base_version: int = 0  # 0: a full snapshot
    files: tuple[FileEntry, ...] = field(default=())
    tensors: tuple[TensorEntry, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A version at hand, and what it took to get it here."""

    directory: Path
    base_version: int = 0  # of the deltas it was made with; 0: it came in full, or was here
    num_bytes: int = 0  # over the wire
    fetch_s: float = 0.0
    apply_s: float = 0.0  # deltas to a copy of the base
    verify_s: float = 0.0  # checksums, and moving into place


@dataclass(frozen=True, kw_only=True)
class Switch:
    """What it took a sampler to switch to a version.

    `weights_checksum` is of what its engine holds since; those of one group agree. "": not known.
    """

    version: int
    base_version: int
    num_bytes: int
    fetch_s: float
    apply_s: float
    verify_s: float
    load_s: float  # into the engine, while it decodes
    pause_s: float  # of decoding
    weights_checksum: str = ""


def check_completion(
    completion: Completion, *, sampler_id: str, truncates: bool, num_given: int | None = None
) -> None:
    """Refuses a record that the loss cannot use, naming its sampler.

    `num_given`: tokens of the buffer before the completion's first, where they are known.

    Raises:
        BadInputError: a length mismatch, a non-finite or positive log-prob, a candidate set without
            the token drawn (only where the sampler truncates), spans with a gap or overlap, routed
            experts of no token before the last, or one of them twice.
    """
    rule = f"record from sampler {sampler_id}"
    num = len(completion.tokens)
    if len(completion.sampler_logp) != num or len(completion.candidates) != num:
        raise BadInputError(
            rule,
            expected=f"{num} log-probs and candidate sets for {num} tokens",
            found=f"{len(completion.sampler_logp)} and {len(completion.candidates)}",
        )
    for name, logp in (
        ("sampler_logp", completion.sampler_logp),
        ("candidate log-probs", completion.candidates.logp),
    ):
        bad = ~np.isfinite(logp) | (logp > 1e-3)
        if bad.any():
            where = int(np.argmax(bad))
            raise BadInputError(
                rule, expected=f"{name} finite and <= 0", found=f"{logp[where]} at entry {where}"
            )
    if len(completion.candidates.ids) != completion.candidates.offsets[-1] or len(
        completion.candidates.logp
    ) != len(completion.candidates.ids):
        raise BadInputError(
            rule,
            expected=f"{int(completion.candidates.offsets[-1])} candidate ids and log-probs",
            found=f"{len(completion.candidates.ids)} and {len(completion.candidates.logp)}",
        )
    if truncates:
        owner = np.repeat(np.arange(num), completion.candidates.counts)
        hits = np.zeros(num, bool)
        hits[owner[completion.candidates.ids == completion.tokens[owner]]] = True
        if not hits.all():
            where = int(np.argmin(hits))
            raise BadInputError(
                rule,
                expected="the token drawn in its candidate set",
                found=f"token {int(completion.tokens[where])} at {where} missing from its set",
            )
    position = 0
    for span in completion.spans:
        if span.start != position or span.end <= span.start or span.version < 1:
            raise BadInputError(
                rule,
                expected=f"version spans that cover 0..{num} in order, versions from 1",
                found=f"{span} after position {position}",
            )
        position = span.end
    if position != num:
        raise BadInputError(
            rule, expected=f"version spans up to {num}", found=f"they end at {position}"
        )
    for routed in completion.routed_experts:
        check_routed(routed, rule, None if num_given is None else num_given + num)
