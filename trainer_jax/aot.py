"""A run's update, lowered and compiled for a mesh that is not here: no weights, no accelerator.

Owns the abstract batch, the compilation for as many virtual CPU devices as the mesh has, in a
process of its own (JAX fixes their number when it starts), and what is read of the result. Must
not print, or judge: `trainer_jax.plan` does.

What is exact: shapes, shardings, the bytes of arguments, which collectives run along which axes.
Temporaries are those of a CPU program: XLA:CPU holds many bfloat16 arrays as float32 and fuses
less than a GPU's or TPU's compiler, so they are more than an accelerator needs.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from contracts.errors import RetryError, exits_politely
from contracts.rpc import RemoteInputError
from contracts.runfile import write_resolved
from contracts.supervisor import service_environment
from trainer_jax.batch import MIN_SLOTS, Batch, TokenBucket
from trainer_jax.config import RunConfig, load_run
from trainer_jax.hf import load_config
from trainer_jax.hlo import Array, Module, Traffic
from trainer_jax.mesh import make_mesh
from trainer_jax.models.config import ComputeConfig
from trainer_jax.records import RoutingRules
from trainer_jax.step import make_update
from trainer_jax.summary import training_groups

LARGEST = 6
TRAINED = 0.5  # of the tokens of a row; prompts and observations are the others
TIMEOUT_S = 1200.0
_REPLICATED = "Involuntary full rematerialization"  # what XLA's partitioner warns of
# Virtual devices, whatever this machine has; the compiler's threads in one heap take less memory.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "MALLOC_ARENA_MAX": "1"}
# The program is read, never run: optimizing its machine code would be wasted.
_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled function; bytes are those of one device."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # outputs in the memory of donated arguments
    temporary_bytes: int
    largest: tuple[Array, ...]
    traffic: tuple[Traffic, ...]

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What the compiler says of an update."""

    parameter_bytes: int  # of one device, as are the next two
    gradient_bytes: int
    moment_bytes: int  # all of the optimizer's state
    accumulate: Program  # forward, backward, and the sum of gradients, for one micro-batch
    apply: Program  # the optimizer's step
    num_replicated: int  # arrays that the partitioner could only re-shard by replicating them
    seconds: float
    compiler_bytes: int  # the compiling process at its largest

    @property
    def peak_bytes(self) -> int:
        """Of one device, over both programs; moments lie there while gradients are made."""
        return max(self.accumulate.peak_bytes + self.moment_bytes, self.apply.peak_bytes)


def compile_ahead(config: RunConfig) -> Ahead:
    """Compiles the update of a run in a process of its own.

    Raises:
        RemoteInputError: the sentence that it refuses with.
        RetryError: it takes too long.
    """
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "config.json"
        write_resolved(record, config.sections)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "trainer_jax.aot", str(record)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                env={**service_environment(), **_ENVIRONMENT},
            )
        except subprocess.TimeoutExpired:
            raise RetryError(f"the update did not compile within {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["the compilation ended without a word"]
        raise RemoteInputError(said[-1].removeprefix("error: "))
    facts = json.loads(done.stdout)
    for name in ("accumulate", "apply"):
        facts[name]["largest"] = tuple(Array(**array) for array in facts[name]["largest"])
        facts[name]["traffic"] = tuple(
            Traffic(**{**traffic, "axes": tuple(traffic["axes"])})
            for traffic in facts[name]["traffic"]
        )
        facts[name] = Program(**facts[name])
    return Ahead(**facts, num_replicated=done.stderr.count(_REPLICATED))


def compile_here(config: RunConfig) -> dict[str, Any]:
    """The fields of `Ahead` that this process knows, which has the mesh's devices."""
    start = time.monotonic()
    mesh = make_mesh(config.mesh.model_dump())
    model = load_config(config.model.checkpoint)
    update = make_update(
        model,
        config.loss,
        config.optimizer.build(),
        mesh,
        group_names=training_groups(config.sections),
        temperature=config.sections.get("sampling", {}).get("temperature", 1.0),
        compute=_on_cpu(config.model.compute),
        freeze_router=config.optimizer.freeze_router,
        masters=config.optimizer.masters,
    )
    batch = abstract_batch(
        config.train.micro_rows,
        config.train.row_tokens,
        config.train.candidate_buckets,
        num_shards=update.num_shards,
        routing=RoutingRules.of(model) if config.replays_routing else None,
    )
    state = update.abstract_state()
    programs = {
        name: read_program(lowered.compile(compiler_options=_OPTIONS), dict(mesh.shape))
        for name, lowered in update.lower(batch).items()
    }
    return {
        "parameter_bytes": device_bytes(state.params),
        "gradient_bytes": device_bytes(state.params, dtype=jnp.float32),
        "moment_bytes": device_bytes(state.opt_state),
        **{name: asdict(program) for name, program in programs.items()},
        "seconds": time.monotonic() - start,
        "compiler_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _on_cpu(compute: ComputeConfig) -> ComputeConfig:
    """What an accelerator's own forms are planned by: the nearest that a CPU compiles.

    The ragged dispatch has the buffers of the all-to-all one; a kernel has none of its own.
    """
    nearest = {"ffn": {"tokamax": "auto"}, "dispatch": {"ragged": "all-to-all"}}
    chosen = {key: names.get(getattr(compute, key)) for key, names in nearest.items()}
    return compute.model_copy(update={key: name for key, name in chosen.items() if name})


def abstract_batch(
    rows: int,
    row_tokens: int,
    widths: Iterable[int],
    *,
    num_shards: int,
    routing: RoutingRules | None = None,
) -> Batch:
    """The shapes of a full micro-batch: one trajectory a row, half its tokens trained, as many in
    every bucket.
    """
    widths = tuple(widths)
    trained = int(TRAINED * rows * row_tokens / num_shards / len(widths))
    array: Any = jax.ShapeDtypeStruct
    row = array((rows, row_tokens), np.int32)

    def bucket(K: int) -> TokenBucket:
        slots = num_shards, max(trained, MIN_SLOTS)
        integers, floats = array(slots, np.int32), array(slots, np.float32)
        return TokenBucket(
            position_SxN=integers,
            sampled_SxN=integers,
            sampler_logp_SxN=floats,
            candidate_ids_SxNxK=array((*slots, K), np.int32),
            candidate_sampler_logp_SxNxK=array((*slots, K), np.float32),
            advantage_SxN=floats,
            mask_SxN=array(slots, np.bool_),
            group_SxN=integers,
            version_SxN=integers,
            trajectory_SxN=integers,
        )

    return Batch(
        tokens_BxR=row,
        positions_BxR=row,
        segments_BxR=row,
        num_trained_M=array((rows,), np.float32),
        origin_M=array((rows,), np.int32),
        buckets=tuple(map(bucket, widths)),
        routed_experts_BxRxLxX=array((*row.shape, *routing[:2]), np.int16) if routing else None,
    )


def device_bytes(tree: Any, dtype: Any = None) -> int:
    """Of abstract arrays with shardings, on one device."""

    def size(leaf: Any) -> int:
        return (
            int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
            * jnp.dtype(dtype or leaf.dtype).itemsize
        )

    return sum(map(size, jax.tree.leaves(tree)))


def read_program(compiled: jax.stages.Compiled, mesh: dict[str, int]) -> Program:
    """The figures of a compiled function on a mesh of these sizes."""
    sizes: Any = compiled.memory_analysis()
    module = Module(compiled.as_text() or "")
    return Program(
        argument_bytes=sizes.argument_size_in_bytes,
        output_bytes=sizes.output_size_in_bytes,
        alias_bytes=sizes.alias_size_in_bytes,
        temporary_bytes=sizes.temp_size_in_bytes,
        largest=tuple(module.largest(LARGEST)),
        traffic=tuple(module.traffic(mesh)),
    )


@exits_politely
def main() -> None:
    config = load_run(sys.argv[1])
    num_devices = math.prod(config.mesh.model_dump().values())
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_enable_compilation_cache", False)  # sizes come from a compilation
    sys.stdout.write(json.dumps(compile_here(config)))


if __name__ == "__main__":
    main()
