"""`python -m benchmarks.accelerator`: what only an accelerator can say, as one table in Markdown.

On one device, the first that JAX finds:

    parity      log-probs of small models of both families in float32 and BF16 beside `transformers`
                in float32 on the CPU, from the same BF16 weights; `holds` if float32 is within 1e-4
                and BF16's median error at most 1.2 times that of `transformers`' own BF16
                (every token goes to every expert: rounding could send it elsewhere, by chance)
    step        a whole update (default arm, AdamW, rematerialized, BF16) of two layers of
                Qwen3.6-35B-A3B, one of each kind, with its widths, experts and vocabulary: 2.2
                billion parameters. Model FLOPs are 6 for each weight that a token is multiplied
                with, the head's and attention's own products not counted; utilization is of the
                vendor's dense BF16 peak where it is known, and of a large product beside it
    encoders    weight_sync's encoders for the device in GB/s of BF16, beside one pass over the
                same bytes; `holds` if their bytes are those of the encoders for the CPU
    loss        head and corrected loss, forward and backward, at the vocabulary of 248,320, beside
                dense jax (`benchmarks.loss` says what each contender is)

`--smoke` runs all of it at small sizes, also on a CPU: it shows that the script works, not how fast
anything is. `--out docs/results/NAME.md` also writes the table there.
"""

from __future__ import annotations

import argparse
import datetime
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from transformers import AutoModelForCausalLM

from benchmarks import convert, harness, loss
from benchmarks.trainer import HYBRID, MOE, positions_and_segments, random_tokens
from benchmarks.update import ROW, WIDTHS, make_trajectory
from contracts.types import TrajectoryGroup
from trainer_jax.advantages import advantages_of
from trainer_jax.batch import Batch, pack
from trainer_jax.hf import load_checkpoint, save_checkpoint
from trainer_jax.loss_config import LossConfig
from trainer_jax.mesh import make_mesh
from trainer_jax.models.config import ATTENTION, DELTANET, ComputeConfig, ModelConfig
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.models.parameters import count_parameters, init_params, parameter_shapes
from trainer_jax.records import RecordRules
from trainer_jax.step import make_update

# dense BF16 TFLOP/s as vendors state them, by how JAX names the chip
PEAK_TFLOPS = {
    "NVIDIA A100": 312, "NVIDIA H100": 989, "NVIDIA H200": 989, "NVIDIA B200": 2250,
    "TPU v4": 275, "TPU v5 lite": 197, "TPU v5": 459, "TPU v6 lite": 918,
}  # fmt: skip

# two layers of Qwen3.6-35B-A3B; the head is tied, which leaves the step's products as they are
SLICE = ModelConfig(
    model_type="qwen3_5_moe", vocab_size=248_320, hidden_size=2048, num_hidden_layers=2,
    layer_types=(DELTANET, ATTENTION), num_attention_heads=16, num_key_value_heads=2, head_dim=256,
    partial_rotary_factor=0.25, rope_theta=1e7, num_experts=256, num_experts_per_tok=8,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4, tie_word_embeddings=True,
)  # fmt: skip


class Sizes(NamedTuple):
    """All that `--smoke` makes small."""

    parity_tokens: int
    parity: tuple[ModelConfig, ...]
    model: ModelConfig
    rows: int  # of a micro-batch
    row_tokens: int
    num_micro: int  # micro-batches of an update
    product: int  # width of the square product
    encoded: convert.Case
    loss: loss.Size


TINY = replace(HYBRID, num_hidden_layers=2, layer_types=(DELTANET, ATTENTION))
FULL = Sizes(
    parity_tokens=1000,
    parity=(replace(MOE, hidden_size=512), replace(HYBRID, hidden_size=512)),
    model=SLICE,
    rows=4,
    row_tokens=8192,
    num_micro=2,
    product=8192,
    encoded=convert.Case(1, 131_072, 2048),
    loss=loss.Size(4096, 64, 248_320, 2048),
)
SMOKE = Sizes(
    parity_tokens=70,
    parity=(replace(MOE, num_hidden_layers=1), TINY),
    model=TINY,
    rows=1,
    row_tokens=256,
    num_micro=1,
    product=256,
    encoded=convert.Case(1, 128, 256),
    loss=loss.SMALL,
)


class Line(NamedTuple):
    """One row of the table."""

    what: str
    value: str
    beside: str


def parity(config: ModelConfig, num_tokens: int) -> Iterator[Line]:
    tokens_BxT = random_tokens(config, 1, num_tokens)
    rows = (tokens_BxT, *positions_and_segments(tokens_BxT))
    with TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), config, init_params(config, jax.random.key(0)))
        _, params = load_checkpoint(Path(folder))  # rounded to BF16
        exact, theirs = (
            peer_logp(Path(folder), tokens_BxT, dtype) for dtype in (torch.float32, torch.bfloat16)
        )
    with jax.default_matmul_precision("highest"):
        ours32 = our_logp(params, config, rows, ComputeConfig())
    ours16 = our_logp(params, config, rows, ComputeConfig(dtype="bfloat16"))
    off32, off16, their_off16 = (np.abs(logp - exact) for logp in (ours32, ours16, theirs))
    yield Line(
        f"parity, {config.model_type}, float32",
        f"largest error {off32.max():.1e} nats",
        f"holds: {off32.max() < 1e-4}",
    )
    yield Line(
        f"parity, {config.model_type}, BF16",
        f"median error {np.median(off16):.1e} nats, largest {off16.max():.1e}",
        f"`transformers`: {np.median(their_off16):.1e}, {their_off16.max():.1e};"
        f" holds: {np.median(off16) < 1.2 * np.median(their_off16)}",
    )


def our_logp(params, config: ModelConfig, rows, compute: ComputeConfig) -> np.ndarray:
    @jax.jit
    def run(params, *rows) -> jax.Array:
        hidden_BxTxD = hidden_states(params, config, *rows, compute=compute)
        logits_BxTxV = jnp.einsum(
            "btd,vd->btv",
            hidden_BxTxD,
            head_weight(params, compute=compute),
            preferred_element_type=jnp.float32,
        )
        return jax.nn.log_softmax(logits_BxTxV)

    return np.asarray(run(params, *rows))


def peer_logp(folder: Path, tokens_BxT: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens_BxT).long(), use_cache=False).logits
    return logits.float().log_softmax(-1).numpy()


def multiplied_weights(config: ModelConfig) -> int:
    """Weights that a token is multiplied with, without the head: experts count X of E times."""
    total = count_parameters(config) - config.vocab_size * config.hidden_size * (
        1 if config.tie_word_embeddings else 2
    )
    experts = sum(
        int(np.prod(shape))
        for path, shape in parameter_shapes(config).items()
        if path[-1] in ("gate", "up", "down")
    )
    return total - experts + experts * config.num_experts_per_tok // config.num_experts


def make_batches(sizes: Sizes) -> list[Batch]:
    """Rows full of trajectories, of which each is a segment."""
    rng, vocabulary = np.random.default_rng(0), sizes.model.vocab_size
    num = sizes.rows * sizes.row_tokens * sizes.num_micro // ROW
    trajectories = tuple(make_trajectory(rng, vocabulary, float(i % 2)) for i in range(num))
    groups = [TrajectoryGroup(sequence=1, task_id="task", trajectories=trajectories)]
    return pack(
        groups,
        advantages_of(groups, normalize=False),
        row_tokens=sizes.row_tokens,
        rows=sizes.rows,
        candidate_buckets=WIDTHS,
        rules=RecordRules(
            group_names=("sampler",), vocab_size=vocabulary, replay=True, max_candidates=WIDTHS[-1]
        ),
    )


def step(sizes: Sizes, device: Any, runs: int) -> Iterator[Line]:
    config, batches = sizes.model, make_batches(sizes)
    update = make_update(
        config,
        LossConfig(),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.0)),
        make_mesh({"data": 1}),
        group_names=("sampler",),
        compute=ComputeConfig(dtype="bfloat16", remat=True),
    )
    state = update.init(init_params(config, jax.random.key(0)))

    def one_update() -> None:
        nonlocal state
        state, pending = update(state, batches, version=1)
        pending.read()
        jax.block_until_ready(state)

    square = jnp.ones((sizes.product, sizes.product), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    calls: dict[str, Callable[[], object]] = {
        "update": one_update,
        "product": lambda: jax.block_until_ready(product(square)),
    }
    seconds = {name: timing.median_s for name, timing in harness.take_turns(calls, runs).items()}
    num_tokens = sum(batch.tokens_BxR.size for batch in batches)
    rate = 6 * multiplied_weights(config) * num_tokens / seconds["update"]
    reached = 2 * sizes.product**3 / seconds["product"]
    peak = next((x for name, x in PEAK_TFLOPS.items() if device.device_kind.startswith(name)), None)
    of_peak = f"{rate / peak / 1e10:.1f}% of the vendor's {peak}" if peak else "peak not known"
    yield Line(
        f"update, {count_parameters(config) / 1e9:.2f} B parameters, {num_tokens:,} tokens",
        f"{seconds['update']:.3f} s, {num_tokens / seconds['update']:,.0f} tokens/s",
        "",
    )
    yield Line(
        "model-FLOPs utilization",
        f"{rate / 1e12:.4g} TFLOP/s",
        f"{of_peak}; {100 * rate / reached:.1f}% of a product's {reached / 1e12:.4g}",
    )


def encoders(case: convert.Case, runs: int) -> Iterator[Line]:
    (small,) = convert.make_matrices(convert.Case(1, 256, 512), 1)
    (matrix,) = convert.make_matrices(case, 1)
    one_pass = jax.jit(lambda bits: bits + jnp.uint16(1))
    calls: dict[str, Callable[[], object]] = {
        "one pass": lambda: jax.block_until_ready(one_pass(matrix.array))
    }
    exact, holds = convert.ours(), {}
    for name, call in convert.on_device().items():
        holds[name] = same_bytes(call, exact[name], small)
        calls[name] = functools.partial(call, matrix)
    results = harness.compare(calls, num_bytes=matrix.bits.nbytes, peer="one pass", runs=runs)
    for name, result in results.items():
        beside = f"{result['times_one pass']:.2f} of one pass; holds: {holds.get(name)}"
        yield Line(
            f"encoder, {name}" if name in holds else "one pass over the bytes",
            f"{result['gb_per_s']:.4g} GB/s",
            beside if name in holds else "",
        )


def same_bytes(call: convert.Call, exact: convert.Call, matrix: convert.Matrix) -> bool:
    try:
        convert.check_equal(call, exact, matrix)
    except AssertionError:
        return False
    return True


def losses(size: loss.Size, runs: int) -> Iterator[Line]:
    names = (*loss.OURS, "jax dense")
    problems = {replay: loss.make_problem(size, replay=replay) for replay in (True, False)}
    calls = {name: loss.make_call(name, problems[name == "replay"]) for name in names}
    timings = harness.take_turns(calls, runs)
    dense = timings["jax dense"].median_s
    for name, timing in timings.items():
        yield Line(
            f"loss, {name}, {size.T} tokens, V = {size.V:,}",
            f"{1e3 * timing.median_s:.4g} ms, {size.T / timing.median_s:,.0f} tokens/s",
            f"{dense / timing.median_s:.2f} times jax dense" if name != "jax dense" else "",
        )


def all_lines(sizes: Sizes, device: Any, runs: int) -> Iterator[Line]:
    for config in sizes.parity:
        config = replace(config, initializer_range=0.05, num_experts_per_tok=config.num_experts)
        yield from parity(config, sizes.parity_tokens)
    yield from step(sizes, device, runs)
    yield from encoders(sizes.encoded, runs)
    yield from losses(sizes.loss, runs)


def table(lines: list[Line], device: Any, description: dict[str, Any], smoke: bool) -> str:
    """With date, chip and versions."""
    versions = ", ".join(f"{name} {number}" for name, number in description["packages"].items())
    return "\n".join(
        [
            f"# {device.device_kind}, {datetime.date.today()}" + " (smoke: no figures)" * smoke,
            "",
            f"`python -m benchmarks.accelerator{' --smoke' * smoke}`, {device.platform},"
            f" {versions}; host: {description['cpu']}.",
            "",
            *("| | | beside |", "|---|---|---|"),
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the table here")
    parser.add_argument("--smoke", action="store_true", help="small sizes, one run")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    device, sizes = jax.devices()[0], SMOKE if arguments.smoke else FULL
    lines = list(all_lines(sizes, device, 1 if arguments.smoke else arguments.runs))
    description = harness.machine(("jax", "jaxlib", "transformers"))
    text = table(lines, device, description, arguments.smoke)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
