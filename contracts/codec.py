"""Protobuf messages to the types of `contracts.types` and back.

Owns every conversion; protobuf types stop at the servicer and the client. Arrays are packed as
little-endian bytes (int32 tokens and ids, float32 log-probs, uint16 candidate counts, routed
experts as narrow as their number allows). Decoding
checks lengths, not meaning: `check_completion` does that once, where a record enters.
"""

# layout: both ways of every message, beside each other

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import zstandard
from google.protobuf.message import DecodeError, Message

from contracts.errors import BadInputError, RetryError
from contracts.manifests import manifest_from_text, manifest_to_text
from contracts.pb import fleet_pb2, rollout_pb2, weights_pb2
from contracts.routed import RoutedExperts
from contracts.types import (
    CandidateSets,
    Completion,
    Ending,
    EvaluationSample,
    FileEntry,
    FinishReason,
    Freshness,
    GenerateRequest,
    GroupUpdate,
    KvFormat,
    Manifest,
    Patch,
    Purpose,
    SamplerInfo,
    SamplingParams,
    Switch,
    Trajectory,
    TrajectoryGroup,
    UpdateReport,
    VersionSpan,
    WeightFormat,
)

ZSTD_LEVEL = 3
MAX_GROUP_BYTES = 2**31  # of a group that came packed
MAX_MANIFEST_BYTES = 2**30  # unpacked; 400,000 tensors have 2**26
MAX_CANDIDATES = 65535  # a count travels as uint16


def pack(array: np.ndarray, dtype: str) -> bytes:
    """The array's elements as bytes of a little-endian `dtype` ("<i4", "<f4", "<u2", "u1")."""
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def unpack(data: bytes, dtype: str, field: str) -> np.ndarray:
    """A read-only view of packed bytes; raises BadInputError on a truncated field."""
    try:
        return np.frombuffer(data, dtype)
    except ValueError:
        size = np.dtype(dtype).itemsize
        raise BadInputError(
            field, expected=f"a multiple of {size} bytes", found=len(data)
        ) from None


def sampling_to_pb(sampling: SamplingParams) -> rollout_pb2.SamplingParams:
    return rollout_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        num_candidates=sampling.num_candidates,
        stop_token_ids=sampling.stop_token_ids,
        seed=sampling.seed,
        return_routed_experts=sampling.return_routed_experts,
    )


def sampling_from_pb(message: rollout_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        # float32 on the wire: 0.97 must come back as 0.97 for equality, not for precision
        temperature=round(message.temperature, 6),
        top_p=round(message.top_p, 6),
        top_k=message.top_k,
        max_new_tokens=message.max_new_tokens,
        num_candidates=message.num_candidates,
        stop_token_ids=tuple(message.stop_token_ids),
        seed=message.seed,
        return_routed_experts=message.return_routed_experts,
    )


def spans_to_pb(spans: tuple[VersionSpan, ...]) -> list[rollout_pb2.VersionSpan]:
    return [rollout_pb2.VersionSpan(version=s.version, start=s.start, end=s.end) for s in spans]


def _spans_from_pb(messages) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=s.version, start=s.start, end=s.end) for s in messages)


def _counts_bytes(candidates: CandidateSets) -> bytes:
    counts = candidates.counts
    largest = int(np.maximum.reduce(counts, initial=0))
    if largest > MAX_CANDIDATES:
        raise BadInputError(
            "candidate set",
            expected=f"at most {MAX_CANDIDATES} ids (lower top_p, or cap it with top_k)",
            found=largest,
        )
    return pack(counts, "<u2")


def _candidates_from_pb(message) -> CandidateSets:
    sets = CandidateSets.from_counts(
        unpack(message.candidate_counts, "<u2", "candidate_counts"),
        unpack(message.candidate_ids, "<i4", "candidate_ids"),
        unpack(message.candidate_logp, "<f4", "candidate_logp"),
    )
    num = int(sets.offsets[-1])
    if not num == len(sets.ids) == len(sets.logp):
        raise BadInputError(
            "candidate sets",
            expected=f"{num} ids and log-probs",
            found=f"{len(sets.ids)} and {len(sets.logp)}",
        )
    return sets


def _routed_to_pb(parts: tuple[RoutedExperts, ...]) -> list[rollout_pb2.RoutedExperts]:
    return [
        rollout_pb2.RoutedExperts(
            start=part.start,
            num_layers=part.ids.shape[1],
            num_per_token=part.ids.shape[2],
            ids=pack(part.ids, part.ids.dtype.newbyteorder("<").str),
            wide=part.ids.dtype == np.uint16,
        )
        for part in parts
    ]


def _routed_from_pb(
    messages: Iterable[rollout_pb2.RoutedExperts],
) -> tuple[RoutedExperts, ...]:
    parts = []
    for message in messages:
        ids = unpack(message.ids, "<u2" if message.wide else "u1", "routed experts")
        row = message.num_layers, message.num_per_token
        size = row[0] * row[1]
        if min(row) < 1 or len(ids) % size:
            raise BadInputError(
                "routed experts",
                expected=f"whole tokens of {row[0]} layers x {row[1]} ids",
                found=len(ids),
            )
        parts.append(RoutedExperts(start=message.start, ids=ids.reshape(-1, *row)))
    return tuple(parts)


def chunk_to_pb(chunk: Completion) -> rollout_pb2.CompletionChunk:
    return rollout_pb2.CompletionChunk(
        tokens=pack(chunk.tokens, "<i4"),
        sampler_logp=pack(chunk.sampler_logp, "<f4"),
        candidate_counts=_counts_bytes(chunk.candidates),
        candidate_ids=pack(chunk.candidates.ids, "<i4"),
        candidate_logp=pack(chunk.candidates.logp, "<f4"),
        spans=spans_to_pb(chunk.spans),
        finish_reason=chunk.finish_reason or "",
        routed_experts=_routed_to_pb(chunk.routed_experts),
    )


def chunk_from_pb(message: rollout_pb2.CompletionChunk) -> Completion:
    return Completion(
        tokens=unpack(message.tokens, "<i4", "tokens"),
        sampler_logp=unpack(message.sampler_logp, "<f4", "sampler_logp"),
        candidates=_candidates_from_pb(message),
        spans=_spans_from_pb(message.spans),
        finish_reason=_finish_reason(message.finish_reason),
        routed_experts=_routed_from_pb(message.routed_experts),
    )


def _finish_reason(name: str) -> FinishReason | None:
    try:
        return FinishReason(name) if name else None
    except ValueError:
        raise BadInputError("finish_reason", expected=", ".join(FinishReason), found=name) from None


def generate_to_pb(request: GenerateRequest) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(
        request_id=request.request_id,
        session_id=request.session_id,
        tokens=pack(request.tokens, "<i4"),
        sampling=sampling_to_pb(request.sampling),
        min_version=request.min_version,
        purpose=request.purpose,
        ends_session=request.ends_session,
    )


def generate_from_pb(message: rollout_pb2.GenerateRequest) -> GenerateRequest:
    if message.purpose not in set(Purpose):
        raise BadInputError("purpose", expected=", ".join(Purpose), found=message.purpose)
    return GenerateRequest(
        request_id=message.request_id,
        session_id=message.session_id,
        tokens=unpack(message.tokens, "<i4", "tokens"),
        sampling=sampling_from_pb(message.sampling),
        min_version=message.min_version,
        purpose=Purpose(message.purpose),
        ends_session=message.ends_session,
    )


def trajectory_to_pb(trajectory: Trajectory) -> rollout_pb2.Trajectory:
    return rollout_pb2.Trajectory(
        task_id=trajectory.task_id,
        session_id=trajectory.session_id,
        group=trajectory.group,
        sampler_ids=trajectory.sampler_ids,
        tokens=pack(trajectory.tokens, "<i4"),
        loss_mask=pack(trajectory.loss_mask, "u1"),
        sampler_logp=pack(trajectory.sampler_logp, "<f4"),
        candidate_counts=_counts_bytes(trajectory.candidates),
        candidate_ids=pack(trajectory.candidates.ids, "<i4"),
        candidate_logp=pack(trajectory.candidates.logp, "<f4"),
        spans=spans_to_pb(trajectory.spans),
        reward=trajectory.reward,
        failure=trajectory.failure,
        ending=trajectory.ending,
        num_turns=trajectory.num_turns,
        num_format_errors=trajectory.num_format_errors,
        seconds=trajectory.seconds,
        sample=trajectory.sample,
        patch=None if trajectory.patch is None else _patch_to_pb(trajectory.patch),
        verdict=trajectory.verdict,
        routed_experts=_routed_to_pb(trajectory.routed_experts),
    )


def _patch_to_pb(patch: Patch) -> rollout_pb2.Patch:
    return rollout_pb2.Patch(
        changed=[
            rollout_pb2.PatchFile(path=_path_bytes(path), content=content)
            for path, content in patch.changed.items()
        ],
        deleted=[_path_bytes(path) for path in patch.deleted],
        special=[_path_bytes(path) for path in patch.special],
        complete=patch.complete,
    )


def _patch_from_pb(message: rollout_pb2.Patch) -> Patch:
    return Patch(
        changed={_path(file.path): file.content for file in message.changed},
        deleted=tuple(_path(path) for path in message.deleted),
        special=tuple(_path(path) for path in message.special),
        complete=message.complete,
    )


def _path_bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogatepass")


def _path(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise BadInputError("path of a patch", expected="UTF-8", found=data) from None


def samples_to_pb(samples: Iterable[EvaluationSample]) -> list[rollout_pb2.EvaluationSample]:
    return [
        rollout_pb2.EvaluationSample(task_id=s.task_id, sample=s.sample, attempt=s.attempt)
        for s in samples
    ]


def samples_from_pb(
    messages: Iterable[rollout_pb2.EvaluationSample],
) -> tuple[EvaluationSample, ...]:
    return tuple(
        EvaluationSample(task_id=m.task_id, sample=m.sample, attempt=m.attempt) for m in messages
    )


def trajectory_from_pb(message: rollout_pb2.Trajectory) -> Trajectory:
    tokens = unpack(message.tokens, "<i4", "tokens")
    loss_mask = unpack(message.loss_mask, "u1", "loss_mask").astype(bool)
    sampler_logp = unpack(message.sampler_logp, "<f4", "sampler_logp")
    candidates = _candidates_from_pb(message)
    sampled = int(loss_mask.sum())
    if len(loss_mask) != len(tokens) or len(sampler_logp) != sampled or len(candidates) != sampled:
        raise BadInputError(
            f"trajectory {message.session_id}",
            expected=f"{len(tokens)} mask entries, {sampled} log-probs and candidate sets",
            found=f"{len(loss_mask)}, {len(sampler_logp)} and {len(candidates)}",
        )
    return Trajectory(
        task_id=message.task_id,
        session_id=message.session_id,
        group=message.group,
        sampler_ids=tuple(message.sampler_ids),
        tokens=tokens,
        loss_mask=loss_mask,
        sampler_logp=sampler_logp,
        candidates=candidates,
        spans=_spans_from_pb(message.spans),
        reward=message.reward if message.HasField("reward") else None,
        failure=message.failure,
        ending=Ending(message.ending),
        num_turns=message.num_turns,
        num_format_errors=message.num_format_errors,
        seconds=message.seconds,
        sample=message.sample,
        patch=_patch_from_pb(message.patch) if message.HasField("patch") else None,
        verdict=message.verdict,
        routed_experts=_routed_from_pb(message.routed_experts),
    )


def group_to_pb(group: TrajectoryGroup) -> rollout_pb2.TrajectoryGroup:
    return rollout_pb2.TrajectoryGroup(
        sequence=group.sequence,
        task_id=group.task_id,
        trajectories=[trajectory_to_pb(t) for t in group.trajectories],
    )


def compressed(message: rollout_pb2.TrajectoryGroup) -> rollout_pb2.TrajectoryGroup:
    """The same group with its trajectories packed by zstd; `group_from_pb` reads both."""
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(message.SerializeToString())
    return rollout_pb2.TrajectoryGroup(
        sequence=message.sequence, task_id=message.task_id, zstd=packed
    )


def _decompressed(message: rollout_pb2.TrajectoryGroup) -> rollout_pb2.TrajectoryGroup:
    rule = f"group {message.sequence}, zstd"
    try:
        size = zstandard.frame_content_size(message.zstd)
        if not 0 <= size <= MAX_GROUP_BYTES:
            raise BadInputError(rule, expected=f"at most {MAX_GROUP_BYTES} bytes", found=size)
        data = zstandard.ZstdDecompressor().decompress(message.zstd)
        return rollout_pb2.TrajectoryGroup.FromString(data)
    except (zstandard.ZstdError, DecodeError) as error:
        raise BadInputError(rule, expected="a packed group", found=error) from None


def group_from_pb(message: rollout_pb2.TrajectoryGroup) -> TrajectoryGroup:
    if message.zstd:
        message = _decompressed(message)
    return TrajectoryGroup(
        sequence=message.sequence,
        task_id=message.task_id,
        trajectories=tuple(trajectory_from_pb(t) for t in message.trajectories),
    )


def sampler_to_pb(info: SamplerInfo) -> fleet_pb2.Register:
    return fleet_pb2.Register(
        sampler_id=info.sampler_id,
        group=info.group,
        accelerator=info.accelerator,
        weight_format=info.weight_format,
        kv_format=info.kv_format,
        max_sessions=info.max_sessions,
        model_fingerprint=info.model_fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        protocol_version=info.protocol_version,
        version=info.version,
        formats=info.formats,
        tokens_per_second=info.tokens_per_second,
        price_per_hour=info.price_per_hour,
    )


def switch_to_pb(switch: Switch) -> fleet_pb2.Switch:
    return fleet_pb2.Switch(
        version=switch.version,
        weights_checksum=switch.weights_checksum,
        base_version=switch.base_version,
        num_bytes=switch.num_bytes,
        fetch_seconds=switch.fetch_s,
        apply_seconds=switch.apply_s,
        verify_seconds=switch.verify_s,
        load_seconds=switch.load_s,
        pause_seconds=switch.pause_s,
    )


def switch_from_pb(message: fleet_pb2.Switch) -> Switch:
    return Switch(
        version=message.version,
        weights_checksum=message.weights_checksum,
        base_version=message.base_version,
        num_bytes=message.num_bytes,
        fetch_s=message.fetch_seconds,
        apply_s=message.apply_seconds,
        verify_s=message.verify_seconds,
        load_s=message.load_seconds,
        pause_s=message.pause_seconds,
    )


def sampler_from_pb(message: fleet_pb2.Register) -> SamplerInfo:
    for field, kinds in (("weight_format", WeightFormat), ("kv_format", KvFormat)):
        if getattr(message, field) not in set(kinds):
            raise BadInputError(
                f"sampler {message.sampler_id}, {field}",
                expected=", ".join(kinds),
                found=getattr(message, field),
            )
    known = set(WeightFormat)  # one this side has never heard of is of no use to it
    return SamplerInfo(
        sampler_id=message.sampler_id,
        group=message.group,
        accelerator=message.accelerator,
        weight_format=WeightFormat(message.weight_format),
        kv_format=KvFormat(message.kv_format),
        max_sessions=message.max_sessions,
        model_fingerprint=message.model_fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        protocol_version=message.protocol_version,
        version=message.version,
        formats=tuple(WeightFormat(name) for name in message.formats if name in known),
        tokens_per_second=message.tokens_per_second,
        price_per_hour=_optional(message, "price_per_hour"),
    )


def freshness_to_pb(freshness: Freshness) -> rollout_pb2.Freshness:
    return rollout_pb2.Freshness(
        version=freshness.version,
        groups_per_update=freshness.groups_per_update,
        num_collected=freshness.num_collected,
        staleness_limit=freshness.staleness_limit,
    )


def freshness_from_pb(message: rollout_pb2.Freshness) -> Freshness:
    for name, least in (
        ("version", 0),
        ("groups_per_update", 1),
        ("num_collected", 0),
        ("staleness_limit", 0),
    ):
        if getattr(message, name) < least:
            raise BadInputError(
                f"freshness, {name}", expected=f"at least {least}", found=getattr(message, name)
            )
    return Freshness(
        version=message.version,
        groups_per_update=message.groups_per_update,
        num_collected=message.num_collected,
        staleness_limit=message.staleness_limit,
    )


def update_to_pb(report: UpdateReport) -> fleet_pb2.UpdateReport:
    return fleet_pb2.UpdateReport(
        step=report.step,
        version=report.version,
        seconds=report.seconds,
        update_seconds=report.update_seconds,
        num_taken=report.num_taken,
        sequences=report.sequences,
        staleness=report.staleness,
        kl=report.kl,
        share_out_of_band=report.share_out_of_band,
        reward=report.reward,
        groups=[
            fleet_pb2.GroupUpdate(
                group=group.group,
                num_trajectories=group.num_trajectories,
                num_tokens=group.num_tokens,
                kl=group.kl,
                share_out_of_band=group.share_out_of_band,
            )
            for group in report.groups
        ],
        alarms=report.alarms,
    )


def update_from_pb(message: fleet_pb2.UpdateReport) -> UpdateReport:
    return UpdateReport(
        step=message.step,
        version=message.version,
        seconds=message.seconds,
        update_seconds=message.update_seconds,
        num_taken=message.num_taken,
        sequences=tuple(message.sequences),
        staleness=_optional(message, "staleness"),
        kl=_optional(message, "kl"),
        share_out_of_band=_optional(message, "share_out_of_band"),
        reward=_optional(message, "reward"),
        groups=tuple(
            GroupUpdate(
                group=group.group,
                num_trajectories=group.num_trajectories,
                num_tokens=group.num_tokens,
                kl=_optional(group, "kl"),
                share_out_of_band=_optional(group, "share_out_of_band"),
            )
            for group in message.groups
        ),
        alarms=tuple(message.alarms),
    )


def _optional(message: Message, field: str) -> float | None:
    return getattr(message, field) if message.HasField(field) else None


def file_to_pb(entry: FileEntry) -> weights_pb2.FileEntry:
    return weights_pb2.FileEntry(
        name=entry.name, num_bytes=entry.num_bytes, checksum=entry.checksum
    )


def file_from_pb(message: weights_pb2.FileEntry) -> FileEntry:
    return FileEntry(name=message.name, num_bytes=message.num_bytes, checksum=message.checksum)


def manifest_to_pb(manifest: Manifest) -> weights_pb2.Manifest:
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(manifest_to_text(manifest))
    return weights_pb2.Manifest(content=packed)


def manifest_from_pb(message: weights_pb2.Manifest) -> Manifest:
    """Raises RetryError unless every bit is that of the manifest sent."""
    try:
        size = zstandard.frame_content_size(message.content)
        if not 0 <= size <= MAX_MANIFEST_BYTES:
            raise RetryError(f"a manifest of {size} bytes, where {MAX_MANIFEST_BYTES} are the most")
        return manifest_from_text(zstandard.ZstdDecompressor().decompress(message.content))
    except zstandard.ZstdError:
        raise RetryError("a manifest that does not unpack") from None
