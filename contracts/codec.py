"""Protobuf messages to the types of `contracts.types` and back.

Owns every conversion; protobuf types stop at the servicer and the client. Arrays are packed as
little-endian bytes (int32 tokens and ids, float32 log-probs, uint16 candidate counts). Decoding
checks lengths, not meaning: `check_completion` does that once, where a record enters.
"""

from __future__ import annotations

import numpy as np

from contracts.errors import BadInputError
from contracts.pb import fleet_pb2, rollout_pb2, weights_pb2
from contracts.types import (
    CandidateSets,
    Completion,
    Ending,
    FileEntry,
    FinishReason,
    GenerateRequest,
    KvFormat,
    Manifest,
    Purpose,
    SamplerInfo,
    SamplingParams,
    Switch,
    TensorEntry,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
    WeightFormat,
)

MAX_CANDIDATES = 65535  # a count travels as uint16


def pack(array: np.ndarray, dtype: str) -> bytes:
    """The array's elements as bytes of a little-endian `dtype` ("<i4", "<f4", "<u2", "u1")."""
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def unpack(data: bytes, dtype: str, field: str) -> np.ndarray:
    """A read-only view of packed bytes; raises BadInputError on a truncated field."""
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise BadInputError(field, expected=f"a multiple of {size} bytes", found=len(data))
    return np.frombuffer(data, dtype=dtype)


def sampling_to_pb(sampling: SamplingParams) -> rollout_pb2.SamplingParams:
    return rollout_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        num_candidates=sampling.num_candidates,
        stop_token_ids=sampling.stop_token_ids,
        seed=sampling.seed,
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
    )


def spans_to_pb(spans: tuple[VersionSpan, ...]) -> list[rollout_pb2.VersionSpan]:
    return [rollout_pb2.VersionSpan(version=s.version, start=s.start, end=s.end) for s in spans]


def _spans_from_pb(messages) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=s.version, start=s.start, end=s.end) for s in messages)


def _counts_bytes(candidates: CandidateSets) -> bytes:
    counts = candidates.counts
    if len(counts) and counts.max() > MAX_CANDIDATES:
        raise BadInputError(
            "candidate set",
            expected=f"at most {MAX_CANDIDATES} ids (lower top_p, or cap it with top_k)",
            found=int(counts.max()),
        )
    return pack(counts, "<u2")


def _candidates_from_pb(message) -> CandidateSets:
    counts = unpack(message.candidate_counts, "<u2", "candidate_counts").astype(np.int64)
    ids = unpack(message.candidate_ids, "<i4", "candidate_ids")
    logp = unpack(message.candidate_logp, "<f4", "candidate_logp")
    if counts.sum() != len(ids) or len(ids) != len(logp):
        raise BadInputError(
            "candidate sets",
            expected=f"{int(counts.sum())} ids and log-probs",
            found=f"{len(ids)} and {len(logp)}",
        )
    return CandidateSets.from_counts(counts, ids, logp)


def chunk_to_pb(chunk: Completion) -> rollout_pb2.CompletionChunk:
    return rollout_pb2.CompletionChunk(
        tokens=pack(chunk.tokens, "<i4"),
        sampler_logp=pack(chunk.sampler_logp, "<f4"),
        candidate_counts=_counts_bytes(chunk.candidates),
        candidate_ids=pack(chunk.candidates.ids, "<i4"),
        candidate_logp=pack(chunk.candidates.logp, "<f4"),
        spans=spans_to_pb(chunk.spans),
        finish_reason=chunk.finish_reason or "",
    )


def chunk_from_pb(message: rollout_pb2.CompletionChunk) -> Completion:
    reason = message.finish_reason
    if reason and reason not in set(FinishReason):
        raise BadInputError("finish_reason", expected=", ".join(FinishReason), found=reason)
    return Completion(
        tokens=unpack(message.tokens, "<i4", "tokens"),
        sampler_logp=unpack(message.sampler_logp, "<f4", "sampler_logp"),
        candidates=_candidates_from_pb(message),
        spans=_spans_from_pb(message.spans),
        finish_reason=FinishReason(reason) if reason else None,
    )


def generate_to_pb(request: GenerateRequest) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(
        request_id=request.request_id,
        session_id=request.session_id,
        tokens=pack(request.tokens, "<i4"),
        sampling=sampling_to_pb(request.sampling),
        min_version=request.min_version,
        purpose=request.purpose,
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
    )


def group_to_pb(group: TrajectoryGroup) -> rollout_pb2.TrajectoryGroup:
    return rollout_pb2.TrajectoryGroup(
        sequence=group.sequence,
        task_id=group.task_id,
        trajectories=[trajectory_to_pb(t) for t in group.trajectories],
    )


def group_from_pb(message: rollout_pb2.TrajectoryGroup) -> TrajectoryGroup:
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
    )


def switch_to_pb(switch: Switch) -> fleet_pb2.Switch:
    return fleet_pb2.Switch(
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
    )


def file_to_pb(entry: FileEntry) -> weights_pb2.FileEntry:
    return weights_pb2.FileEntry(
        name=entry.name, num_bytes=entry.num_bytes, checksum=entry.checksum
    )


def file_from_pb(message: weights_pb2.FileEntry) -> FileEntry:
    return FileEntry(name=message.name, num_bytes=message.num_bytes, checksum=message.checksum)


def manifest_to_pb(manifest: Manifest) -> weights_pb2.Manifest:
    return weights_pb2.Manifest(
        version=manifest.version,
        base_version=manifest.base_version,
        format=manifest.format,
        recipe=manifest.recipe,
        files=[file_to_pb(entry) for entry in manifest.files],
        tensors=[
            weights_pb2.TensorEntry(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                file=entry.file,
                start=entry.start,
                end=entry.end,
                checksum=entry.checksum,
            )
            for entry in manifest.tensors
        ],
    )


def manifest_from_pb(message: weights_pb2.Manifest) -> Manifest:
    return Manifest(
        version=message.version,
        base_version=message.base_version,
        format=WeightFormat(message.format),
        recipe=message.recipe,
        files=tuple(file_from_pb(entry) for entry in message.files),
        tensors=tuple(
            TensorEntry(
                name=entry.name,
                dtype=entry.dtype,
                shape=tuple(entry.shape),
                file=entry.file,
                start=entry.start,
                end=entry.end,
                checksum=entry.checksum,
            )
            for entry in message.tensors
        ),
    )
