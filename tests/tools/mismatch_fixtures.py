"""Trajectories that a tiny model really sampled, and a run, for tests of the mismatch report.

The draws and their records are the engine's own (`sampler_fleet.engines.sampling`); the logits come
from the trainer's model, with weights rounded as a sampler's precision would, and are rounded to
BF16 themselves.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from contracts.runfile import write_resolved
from contracts.types import (
    CandidateSets,
    Ending,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from sampler_fleet.engines.precision import quantize_nvfp4
from sampler_fleet.engines.sampling import draw
from sampler_fleet.episodes.chat import ChatFormat
from tools.mismatch_report import __main__ as mismatch_report
from trainer_jax.checkpoint import Checkpoints, Position
from trainer_jax.hf import save_checkpoint
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.models.parameters import Params, init_params

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo-checkpoint"
MODEL = ModelConfig(
    vocab_size=1024,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    initializer_range=0.2,
)
TOP_P = SamplingParams(top_p=0.97, top_k=64)
NUM_ROWS, NUM_SAMPLED = 24, 40  # a reply is half of it


def make_params(seed: int) -> Params:
    """Random weights: a head sharp enough for small sets, layers that noise doesn't turn over."""
    params = init_params(MODEL, jax.random.key(seed))
    sharp = {"head": params["head"] * 4, "embed": params["embed"] * 4}
    return jax.tree.map(np.asarray, params | sharp)


def rounded(params: Params, how: str) -> Params:
    """The weights as a sampler computes with them: `bf16`, or `nvfp4` in the layers' matrices."""

    def convert(path, leaf: np.ndarray) -> np.ndarray:
        if how == "nvfp4" and path[0].key == "layers" and leaf.ndim > 2:
            values, scale = quantize_nvfp4(torch.tensor(leaf).transpose(-1, -2))
            return (values * scale).transpose(-1, -2).numpy()
        return np.asarray(jnp.asarray(leaf).astype(jnp.bfloat16).astype(jnp.float32))

    return jax.tree_util.tree_map_with_path(convert, params)


@jax.jit
def next_logits(params: Params, tokens_BxT: jax.Array, length: jax.Array) -> jax.Array:
    """Of the token after `length` tokens, [B, V]."""
    positions = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1], dtype=jnp.int32), tokens_BxT.shape)
    segments = (positions < length).astype(jnp.int32)
    hidden = hidden_states(params, MODEL, tokens_BxT, positions, segments)
    last = jnp.take_along_axis(hidden, jnp.full((len(hidden), 1, 1), length - 1), axis=1)[:, 0]
    return last @ head_weight(params).T


@dataclasses.dataclass(frozen=True)
class Raw:
    """Per sampled token of a trajectory: the set's logits, the drawn one's, log-sum-exp."""

    trajectory: Trajectory
    set_logits: np.ndarray  # CSR entries
    logits: np.ndarray
    normalizers: dict[float, np.ndarray]  # by temperature

    def with_record(self, *, temperature: float, over_set: bool) -> Trajectory:
        """The same draws with log-probs of another distribution."""
        sets = self.trajectory.candidates
        owner = np.repeat(np.arange(len(sets)), sets.counts)
        if over_set:
            mass = np.bincount(owner, np.exp(self.set_logits / temperature), minlength=len(sets))
            normalizer = np.log(mass)
        else:
            normalizer = self.normalizers[temperature]
        logp = (self.set_logits / temperature - normalizer[owner]).astype(np.float32)
        return dataclasses.replace(
            self.trajectory,
            sampler_logp=(self.logits / temperature - normalizer).astype(np.float32),
            candidates=CandidateSets(offsets=sets.offsets, ids=sets.ids, logp=logp),
        )


def sample(
    params: Params,
    sampling: SamplingParams = TOP_P,
    *,
    group: str = "a",
    sampler: str = "a-0",
    seed: int = 0,
    chat: ChatFormat | None = None,
    version: int = 1,
) -> list[Raw]:
    """Trajectories of two replies with an observation between, drawn by a policy."""
    chat = chat or ChatFormat.load(DEMO)
    rng = np.random.default_rng(seed)
    prompt = chat.start("Fix it.", f"Mistake {seed} in add(): the sum of 1 and 2 is 4")
    seen = chat.observe("nothing here")
    given = [prompt, np.r_[chat.stop_token_ids[0], seen].astype(np.int32)]
    half = NUM_SAMPLED // 2
    mask = np.concatenate([np.arange(len(part) + half) >= len(part) for part in given])
    tokens = np.zeros((NUM_ROWS, -(-len(mask) // 32) * 32), np.int32)
    for start, part in zip((0, len(prompt) + half), given, strict=True):
        tokens[:, start : start + len(part)] = part
    placed = jax.tree.map(jnp.asarray, params)
    steps: list[tuple[Any, np.ndarray]] = []
    for at in np.flatnonzero(mask):
        exact = next_logits(placed, jnp.asarray(tokens), jnp.int32(at))
        logits = np.array(exact.astype(jnp.bfloat16).astype(jnp.float32))
        out = draw(torch.from_numpy(logits), [sampling] * NUM_ROWS, rng.random(NUM_ROWS))
        tokens[:, at] = out.tokens_B
        steps.append((out, logits))
    return [
        _raw(row, steps, tokens[row, : len(mask)], mask, sampling, group, sampler, seed, version)
        for row in range(NUM_ROWS)
    ]


def _raw(row, steps, tokens, mask, sampling, group, sampler, seed, version) -> Raw:
    counts = np.array([out.counts_B[row] for out, _ in steps])
    ids = [out.ids_BxC[row, :n] for (out, _), n in zip(steps, counts, strict=True)]
    logp = [out.logp_BxC[row, :n] for (out, _), n in zip(steps, counts, strict=True)]
    logits = [of_step[row] for _, of_step in steps]
    starts = np.flatnonzero(np.diff(mask.astype(int)) == 1) + 1
    trajectory = Trajectory(
        task_id=f"task-{seed}",
        session_id=f"{sampler}/{seed}.{row}",
        group=group,
        sampler_ids=(sampler,),
        tokens=tokens.copy(),
        loss_mask=mask,
        sampler_logp=np.array([out.logp_B[row] for out, _ in steps], np.float32),
        candidates=CandidateSets.from_counts(counts, np.concatenate(ids), np.concatenate(logp)),
        spans=tuple(
            VersionSpan(version=version, start=int(s), end=int(s) + len(steps) // 2) for s in starts
        ),
        reward=float(row % 2),
        ending=Ending.SUBMITTED,
        num_turns=2,
    )
    return Raw(
        trajectory=trajectory,
        set_logits=np.concatenate([z[i] for z, i in zip(logits, ids, strict=True)]).astype(float),
        logits=np.array([z[t] for z, t in zip(logits, tokens[mask], strict=True)], float),
        normalizers={
            t: np.array([np.logaddexp.reduce(z.astype(float) / t) for z in logits])
            for t in {sampling.temperature, 1.0}
        },
    )


def groups_of(*parts: list[Trajectory]) -> list[TrajectoryGroup]:
    """One trajectory group per list."""
    return [
        TrajectoryGroup(sequence=i, task_id=part[0].task_id, trajectories=tuple(part))
        for i, part in enumerate(parts, 1)
    ]


def save_model(path: Path, params: Params) -> Path:
    """A checkpoint directory with the demo's tokenizer."""
    save_checkpoint(path, MODEL, params, copy_from=DEMO)
    return path


def runner(monkeypatch, capsys):
    """Runs the tool; returns its exit status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mismatch_report", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            mismatch_report.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def earlier_params() -> Params:
    """A policy that training left behind: near enough to look like noise."""
    news, others = make_params(0), make_params(9)
    return jax.tree.map(lambda new, other: new + 0.25 * (other - new), news, others)


def make_run(tmp_path: Path) -> Path:
    """A run whose gateway is at work, with two groups of one precision; one missed an update."""
    directory = tmp_path / "run"
    start = save_model(tmp_path / "start", earlier_params())
    fleet = [
        {"name": name, "weight_format": "bf16", "split_k": k}
        for name, k in (("bf16", 1), ("late", 2))
    ]
    write_resolved(
        directory_file(directory),
        {
            "run": {"name": "tiny"},
            "model": {"checkpoint": str(start)},
            "loss": {"arm": "sc+mis+top-p", "bands": {"late": {"ratio_low": 0.5, "ratio_high": 2}}},
            "sampling": {"top_p": TOP_P.top_p, "top_k": TOP_P.top_k},
            "fleet": {"groups": fleet},
        },
    )
    checkpoints = Checkpoints(directory, keep=1)
    position = Position(run="tiny", step=2, version=3, sequence=0, seed=0, elapsed_seconds=1.0)
    checkpoints.save({"params": make_params(0), "step": np.int32(2)}, position)
    checkpoints.close()
    return directory


def directory_file(directory: Path) -> Path:
    """The config.json of a new directory."""
    directory.mkdir()
    return directory / "config.json"
