"""`python -m benchmarks.update`: trained tokens/s of one whole GRPO update on a small Qwen3-MoE.

Forward, corrected loss (the default arm, sc+mis, with mask replay), backward, clipping, AdamW; in
float32, on all cores, from trajectories in memory. Our side includes checking and packing their
records, and reading the metrics. Each core is a device of the data axis, as XLA computes much of a
small model on one thread per device.

The peer in the same run is the same maths on the same rows in PyTorch with `transformers`' model.
It is not TRL's trainer, because TRL can hardly express this batch: it takes one log-prob per
sampled token, and neither candidate sets (so no centering and no mask replay) nor rewards of
trajectories that already exist. The peer is kept as fast as PyTorch's users can have it: logits of
trained positions alone, softmax over the candidates alone, fused AdamW, rows without padding (all
trajectories fill theirs), the faster of the two ways that `transformers` computes experts on a CPU.

Gradient norms of the first update are compared before anything is timed.

Each contender lives in a process of its own, so that thread pools don't meet, and waits there for
its turn.

With `--quick` everything is small: it shows that the benchmark works, not who is faster.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch
from transformers import Qwen3MoeForCausalLM

from benchmarks import harness
from benchmarks.torch_loss import TorchRecord, corrected_objective
from contracts.types import CandidateSets, Ending, Trajectory, TrajectoryGroup, VersionSpan
from trainer_jax.advantages import advantages_of
from trainer_jax.batch import pack
from trainer_jax.hf import load_checkpoint, save_checkpoint
from trainer_jax.loss_config import LossConfig
from trainer_jax.mesh import make_mesh
from trainer_jax.models.config import ComputeConfig, ModelConfig
from trainer_jax.models.parameters import Params, init_params
from trainer_jax.records import RecordRules
from trainer_jax.step import make_update

PEERS = ("torch eager", "torch grouped_mm")  # by transformers' ways to compute experts
VOCABULARIES = (2_048, 151_936)
GROUPS, GROUP_SIZE, ROW, PROMPT = 4, 4, 256, 32
MICRO_ROWS = 8
WIDTHS = (8, 64)  # candidate sets: nine of ten are small, as under top-p
LR, BETAS, CLIP = 1e-6, (0.9, 0.98), 1.0


def model_of(vocabulary: int) -> ModelConfig:
    """The demo's policy with another vocabulary."""
    return ModelConfig(
        vocab_size=vocabulary, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64,
    )  # fmt: skip


def make_trajectory(rng: np.random.Generator, vocabulary: int, reward: float) -> Trajectory:
    """A prompt and a reply that fill a row; the sampler is nearly uniform, as is a new policy."""
    num = ROW - PROMPT
    counts = np.where(rng.random(num) < 0.9, rng.integers(1, 9, num), rng.integers(9, 65, num))
    width = int(counts.max())
    ids_TxK = rng.integers(0, vocabulary // width, (num, width)) * width + np.arange(width)
    is_in_TxK = np.arange(width) < counts[:, None]
    logits_TxK = np.where(is_in_TxK, 0.5 * rng.standard_normal((num, width)), -np.inf)
    logp_TxK = logits_TxK - np.log(np.exp(logits_TxK).sum(1, keepdims=True))
    slot_T = rng.integers(0, counts)
    drawn_T = ids_TxK[np.arange(num), slot_T]
    return Trajectory(
        task_id="task",
        session_id="session",
        group="sampler",
        sampler_ids=("sampler-0",),
        tokens=np.concatenate([rng.integers(0, vocabulary, PROMPT), drawn_T]).astype(np.int32),
        loss_mask=np.arange(ROW) >= PROMPT,
        sampler_logp=logp_TxK[np.arange(num), slot_T].astype(np.float32),
        candidates=CandidateSets.from_counts(
            counts, ids_TxK[is_in_TxK].astype(np.int32), logp_TxK[is_in_TxK].astype(np.float32)
        ),
        spans=(VersionSpan(version=1, start=PROMPT, end=ROW),),
        reward=reward,
        ending=Ending.SUBMITTED,
    )


def make_groups(vocabulary: int) -> list[TrajectoryGroup]:
    """Half of each group's trajectories have reward 1."""
    rng = np.random.default_rng(0)
    return [
        TrajectoryGroup(
            sequence=g + 1,
            task_id="task",
            trajectories=tuple(
                make_trajectory(rng, vocabulary, float(i % 2)) for i in range(GROUP_SIZE)
            ),
        )
        for g in range(GROUPS)
    ]


def ours(config: ModelConfig, params: Params, groups: list[TrajectoryGroup]) -> Callable[[], float]:
    """One update per call; returns the norm of its gradient."""
    loss = LossConfig()
    assert loss.replay and loss.center and loss.importance == "masked"
    rules = RecordRules(
        group_names=("sampler",), vocab_size=config.vocab_size, replay=True, max_candidates=64
    )
    adam = optax.adamw(LR, b1=BETAS[0], b2=BETAS[1], weight_decay=0.0)
    update = make_update(
        config,
        loss,
        optax.chain(optax.clip_by_global_norm(CLIP), adam),
        make_mesh({"data": jax.device_count()}),
        group_names=("sampler",),
        compute=ComputeConfig(dtype="float32"),
    )
    state = update.init(params)

    def call() -> float:
        nonlocal state
        batches = pack(
            groups,
            advantages_of(groups, normalize=False),
            row_tokens=ROW,
            rows=MICRO_ROWS,
            candidate_buckets=WIDTHS,
            rules=rules,
            num_shards=update.num_shards,
        )
        state, pending = update(state, batches, version=1)
        metrics = pending.read()
        jax.block_until_ready(state)
        return metrics["grad_norm"]

    return call


def record_of(trajectory: Trajectory, advantage: float, width: int) -> TorchRecord:
    sets = trajectory.candidates
    is_in_TxK = np.arange(width) < sets.counts[:, None]
    ids_TxK = np.full(is_in_TxK.shape, -1, np.int64)
    logp_TxK = np.full(is_in_TxK.shape, -np.inf, np.float32)
    ids_TxK[is_in_TxK], logp_TxK[is_in_TxK] = sets.ids, sets.logp
    return TorchRecord(
        torch.from_numpy(ids_TxK),
        torch.from_numpy(logp_TxK),
        torch.from_numpy(trajectory.tokens[trajectory.loss_mask].astype(np.int64)),
        torch.from_numpy(trajectory.sampler_logp),
        torch.full((len(ids_TxK),), advantage),
    )


def peer(folder: Path, groups: list[TrajectoryGroup], experts: str) -> Callable[[], float]:
    """The same as `ours`, in PyTorch."""
    model: Any = Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=experts
    ).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True
    )
    pairs = [
        (trajectory, float(advantage))
        for group, values in zip(groups, advantages_of(groups, normalize=False), strict=True)
        for trajectory, advantage in zip(group.trajectories, values, strict=True)
    ]
    num_tokens = sum(len(trajectory.sampler_logp) for trajectory, _ in pairs)

    def call() -> float:
        for start in range(0, len(pairs), MICRO_ROWS):
            rows = pairs[start : start + MICRO_ROWS]
            records = [record_of(trajectory, a, WIDTHS[-1]) for trajectory, a in rows]
            record = TorchRecord(*(torch.cat(parts) for parts in zip(*records, strict=True)))
            tokens_BxR = np.stack([trajectory.tokens for trajectory, _ in rows]).astype(np.int64)
            hidden_BxRxD = model.model(torch.from_numpy(tokens_BxR), use_cache=False)[0]
            is_trained_BxR = np.stack([trajectory.loss_mask for trajectory, _ in rows])
            before = torch.from_numpy(np.roll(is_trained_BxR, -1, axis=1))
            logits_TxV = model.lm_head(hidden_BxRxD[before])
            objective = corrected_objective(logits_TxV, record, replay=True)
            (-objective / num_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return call


def serve(turns: Connection, name: str, vocabulary: int, folder: Path) -> None:
    """A contender's process: one update per message, until told to stop."""
    groups = make_groups(vocabulary)
    if name == "ours":
        jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
        call = ours(*load_checkpoint(folder), groups)
    else:
        torch.set_num_threads(os.cpu_count() or 1)
        call = peer(folder, groups, name.split()[1])
    while turns.recv():
        turns.send(call())


def measure(vocabulary: int, folder: Path, runs: int) -> dict[str, dict[str, Any]]:
    config = model_of(vocabulary)
    save_checkpoint(folder, config, init_params(config, jax.random.key(0)), dtype="float32")
    spawn = multiprocessing.get_context("spawn")
    ends: dict[str, Any] = {}
    for name in ("ours", *PEERS):
        ends[name], other = spawn.Pipe()
        spawn.Process(target=serve, args=(other, name, vocabulary, folder), daemon=True).start()

    def take_turn(name: str) -> float:
        ends[name].send(True)
        return ends[name].recv()

    norms = {name: take_turn(name) for name in ends}
    for norm in norms.values():
        np.testing.assert_allclose(norm, norms["ours"], rtol=1e-3)
    calls = {name: functools.partial(take_turn, name) for name in ends}
    timings = harness.take_turns(calls, runs)
    for end in ends.values():
        end.send(False)
    num_tokens = GROUPS * GROUP_SIZE * (ROW - PROMPT)
    best = min(timings[name].median_s for name in PEERS)
    return {
        name: {
            "tokens_per_s": round(num_tokens / timing.median_s, 1),
            "times_best_peer": round(best / timing.median_s, 2),
            **asdict(timing),
        }
        for name, timing in timings.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="a small vocabulary, one run")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    results = {}
    for vocabulary in VOCABULARIES[:1] if arguments.quick else VOCABULARIES:
        with tempfile.TemporaryDirectory() as folder:
            results[f"vocabulary {vocabulary}"] = measure(
                vocabulary, Path(folder), 1 if arguments.quick else arguments.runs
            )
    description = harness.machine(("jax", "jaxlib", "torch", "transformers"))
    description |= {"model": asdict(model_of(VOCABULARIES[0]))}
    harness.report("update", results, description, arguments.out)


if __name__ == "__main__":
    main()
