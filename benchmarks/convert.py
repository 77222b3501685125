"""`python -m benchmarks.convert`: encoders in GB/s of BF16 input, and whole checkpoints converted.

Encoders, from memory to memory, with everything that the converter does to a matrix (the scan for
the global scale too), each result dropped as if it were written. On one thread, and on two that
take matrices in turn, as the converter's threads do:

    memcpy              numpy's copy of the input into memory that is there
    nvfp4 modelopt ...  weight_sync's encoders, every format and recipe
    jit nvfp4 ...       weight_sync's encoders for the trainer's device, compiled by jax.jit for the
                        CPU; default recipes only
    modelopt            NVIDIA ModelOpt's own NVFP4QTensor.quantize
    compressed-tensors  its own scales (generate_gparam, calculate_qparams) and compressor
                        (NVFP4PackedCompressor), called as llm-compressor does
    torch fp8-block     the arithmetic of slime's 128 x 128 blocks in eager PyTorch

All contenders take turns on the same matrices in one process, one for each number of threads;
PyTorch is held to one thread within a call, XLA's pool has as many as are measured. Before anything
is timed, the bytes of each peer and of jax.jit are compared with ours of the same recipe. ModelOpt
and compressed-tensors are no dependencies of the project: `pip install -c constraints.txt -e
'.[benchmarks]'` installs them; a result without them says so.

Checkpoint: a Qwen3-MoE of 4 GB (random BF16, a file per layer, per-expert names) through the
command-line tool, in a process of its own, on all cores, with start and fsync. The peer is `cp -r`
and fsync of the same directory. The source is in the page cache for all of them. Of the tool's
memory there are two peaks: VmHWM, which counts pages of the mapped source that the kernel can take
back at any time, and the anonymous part (sampled), which it can't.

CPU seconds (of all threads) stand beside wall seconds: on a machine that does other work, compare
those. With `--quick` everything is small: it shows that the benchmark works, not who is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import harness
from weight_sync import coding, durable
from weight_sync.formats import bf16, device, nvfp4
from weight_sync.layouts import LAYOUTS, RECIPES, Layout, Storage
from weight_sync.safetensors_file import INDEX_NAME, TensorSpec, Writer

THREADS = (1, 2)
INSTALL = "pip install -c constraints.txt -e '.[benchmarks]'"
SAMPLE_EVERY_S = 0.01


class Case(NamedTuple):
    """`num` matrices [N, K], or that many for each thread."""

    num: int
    N: int
    K: int
    per_thread: bool = False


CASES = {
    "[4096, 4096] per thread": Case(1, 4096, 4096, per_thread=True),
    "64 experts [768, 2048]": Case(64, 768, 2048),
}
QUICK = {
    "[256, 256] per thread": Case(1, 256, 256, per_thread=True),
    "4 experts [128, 256]": Case(4, 128, 256),
}


class Model(NamedTuple):
    layers: int
    experts: int
    hidden: int
    expert_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


MODEL = Model(3, 128, 2048, 768, 32, 4, 128, 32_768)
SMALL_MODEL = Model(2, 8, 128, 64, 4, 2, 32, 512)


class Matrix(NamedTuple):
    """One matrix as each contender takes it."""

    bits: np.ndarray
    copy: np.ndarray  # where memcpy puts it
    tensor: torch.Tensor
    array: jax.Array


Call = Callable[[Matrix], Any]


def make_matrices(case: Case, threads: int) -> list[Matrix]:
    rng = np.random.default_rng(0)
    matrices = []
    for _ in range(case.num * (threads if case.per_thread else 1)):
        values = rng.standard_normal((case.N, case.K), dtype=np.float32) * np.float32(0.02)
        bits = bf16.round_from(values)
        tensor = torch.from_numpy(bits).view(torch.bfloat16)
        matrices.append(Matrix(bits, bits.copy(), tensor, jnp.asarray(bits)))
    return matrices


def encode(storage: Storage, matrix: Matrix) -> tuple[np.ndarray, ...]:
    """As the converter calls it."""
    return coding.encode(storage, [matrix.bits], ["w"])[0]


def ours() -> dict[str, Call]:
    """Every format and recipe; `ct` in the layout that it reproduces."""
    calls = {}
    for format, layouts in LAYOUTS.items():
        for recipe in (RECIPES[format] or ("",)) if layouts else ():
            layout = Layout.COMPRESSED_TENSORS if recipe == nvfp4.Recipe.CT else layouts[0]
            storage = Storage(format=format, layout=layout, recipe=recipe)
            calls[f"{format} {recipe}".strip()] = functools.partial(encode, storage)
    return calls


def on_device() -> dict[str, Call]:
    """The encoders under jax.jit, by which of `ours` they reproduce."""
    amax, nvfp4_encode = jax.jit(device.amax), jax.jit(device.encode_nvfp4)

    def encode_nvfp4(matrix: Matrix) -> Any:
        tables = nvfp4.tables(np.float32(amax(matrix.array)), nvfp4.Recipe.MODELOPT)
        return jax.block_until_ready(nvfp4_encode(matrix.array, tables))

    def compiled(function: Callable) -> Call:
        call = jax.jit(function)
        return lambda matrix: jax.block_until_ready(call(matrix.array))

    return {
        "nvfp4 modelopt": encode_nvfp4,
        "fp8-block f32": compiled(device.encode_fp8),
        "fp8-channel": compiled(device.encode_fp8_channel),
        "mxfp8": compiled(device.encode_mxfp8),
    }


def modelopt() -> Call:
    """(packed, block scales, global scale). Raises ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has not been tested with this transformers
        from modelopt.torch.quantization.qtensor import NVFP4QTensor  # pyright: ignore

    def call(matrix: Matrix) -> Any:
        quantized, block_scale, global_scale = NVFP4QTensor.quantize(matrix.tensor, nvfp4.BLOCK)
        return quantized._quantized_data, block_scale, global_scale

    return call


def compressed_tensors() -> Call:
    """(packed, block scales, inverse global scale). Raises ImportError."""
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor  # pyright: ignore
    from compressed_tensors.quantization import QuantizationScheme  # pyright: ignore
    from compressed_tensors.quantization.quant_scheme import NVFP4A16  # pyright: ignore
    from compressed_tensors.quantization.utils import (  # pyright: ignore
        calculate_qparams,
        generate_gparam,
    )

    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)

    def call(matrix: Matrix) -> Any:
        w = matrix.tensor
        global_scale = generate_gparam(*torch.aminmax(w))
        low, high = torch.aminmax(w.unflatten(-1, (-1, nvfp4.BLOCK)), dim=-1)
        scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=global_scale)
        state = {"weight": w, "weight_scale": scale, "weight_global_scale": global_scale}
        done = NVFP4PackedCompressor.compress(state, scheme)
        return done["weight_packed"], done["weight_scale"], done["weight_global_scale"]

    return call


def torch_fp8_block(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales), eager. Shapes divide evenly here."""
    N, K = matrix.tensor.shape
    x = matrix.tensor.float().reshape(N // 128, 128, K // 128, 128)
    scale = x.abs().amax(dim=(1, 3), keepdim=True) / 448
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(N, K), scale.reshape(N // 128, K // 128)


PEERS: dict[str, tuple[str, Callable[[], Call]]] = {  # with the one of `ours` of the same bytes
    "modelopt": ("nvfp4 modelopt", modelopt),
    "compressed-tensors": ("nvfp4 ct", compressed_tensors),
    "torch fp8-block": ("fp8-block f32", lambda: torch_fp8_block),
}


def check_equal(theirs: Call, own: Call, matrix: Matrix) -> None:
    """The bytes of all arrays that a peer gives."""
    for found, expected in zip(theirs(matrix), own(matrix), strict=False):
        if isinstance(found, torch.Tensor):
            found = found.reshape(-1).view(torch.uint8).numpy()
        assert np.asarray(found).tobytes() == expected.tobytes()


def contenders(matrix: Matrix) -> tuple[dict[str, Call], dict[str, str]]:
    """All that can run here, compared and compiled; and what is missing."""
    own, calls, missing = ours(), {}, {}
    calls["memcpy"] = lambda matrix: np.copyto(matrix.copy, matrix.bits)
    calls |= own
    for name, call in on_device().items():
        check_equal(call, own[name], matrix)
        calls[f"jit {name}"] = call
    for name, (same, make) in PEERS.items():
        try:
            calls[name] = make()
        except ImportError as error:
            missing[name] = f"not installed ({error}); {INSTALL}"
            continue
        check_equal(calls[name], own[same], matrix)
    return calls, missing


def measure_encoders(case: Case, threads: int, runs: int) -> dict[str, Any]:
    """In this process, whose environment says how many threads XLA may have."""
    torch.set_num_threads(1)
    matrices = make_matrices(case, threads)
    calls, missing = contenders(matrices[0])
    cpu_s: dict[str, list[float]] = {name: [] for name in calls}
    with ThreadPoolExecutor(threads) as pool:

        def over_all(name: str) -> None:
            def one(matrix: Matrix) -> None:
                calls[name](matrix)  # the result is dropped here

            start = time.process_time()
            if threads == 1:
                for matrix in matrices:
                    one(matrix)
            else:
                list(pool.map(one, matrices))
            cpu_s[name].append(time.process_time() - start)

        results = harness.compare(
            {name: functools.partial(over_all, name) for name in calls},
            num_bytes=sum(matrix.bits.nbytes for matrix in matrices),
            peer="memcpy",
            runs=runs,
        )
    for name, result in results.items():
        result["cpu_s"] = round(statistics.median(cpu_s[name][1:]), 6)  # the first warms up
    for name in ours():
        for peer, (same, _) in PEERS.items():
            if peer in results and same.split()[0] == name.split()[0]:
                times = results[peer]["median_s"] / results[name]["median_s"]
                results[name][f"times_{peer.split()[0]}"] = round(times, 2)
    return results | missing


def measure_encoders_apart(name: str, threads: int, arguments: argparse.Namespace) -> Any:
    """In a fresh process."""
    command = [sys.executable, "-m", "benchmarks.convert", "--case", name]
    command += ["--threads", str(threads), "--runs", str(arguments.runs)]
    command += ["--quick"] if arguments.quick else []
    limits = {"NPROC": str(threads), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | limits, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def shapes(model: Model) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of each file of a checkpoint."""
    D, F = model.hidden, model.expert_width
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocabulary, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (model.vocabulary, D),
    }
    num_files = model.layers + 1
    files = {f"model-00001-of-{num_files:05}.safetensors": ends}
    for layer in range(model.layers):
        attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
        own: dict[str, tuple[int, ...]] = {
            f"{attention}.q_proj.weight": (model.heads * model.head_dim, D),
            f"{attention}.k_proj.weight": (model.kv_heads * model.head_dim, D),
            f"{attention}.v_proj.weight": (model.kv_heads * model.head_dim, D),
            f"{attention}.o_proj.weight": (D, model.heads * model.head_dim),
            f"{attention}.q_norm.weight": (model.head_dim,),
            f"{attention}.k_norm.weight": (model.head_dim,),
            f"model.layers.{layer}.input_layernorm.weight": (D,),
            f"model.layers.{layer}.post_attention_layernorm.weight": (D,),
            f"{mlp}.gate.weight": (model.experts, D),
        }
        for expert in range(model.experts):
            for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
                own[f"{mlp}.experts.{expert}.{part}_proj.weight"] = shape
        files[f"model-{layer + 2:05}-of-{num_files:05}.safetensors"] = own
    return files


def make_checkpoint(folder: Path, model: Model) -> int:
    """Writes a checkpoint of random weights; returns its bytes."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": model.hidden, "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim, "num_experts": model.experts, "num_experts_per_tok": 8,
        "moe_intermediate_size": model.expert_width, "vocab_size": model.vocabulary,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    files = shapes(model)
    largest = max(int(np.prod(shape)) for own in files.values() for shape in own.values())
    # Weights are cut out of the same numbers, each somewhere else: values don't change the time.
    numbers = bf16.round_from(rng.standard_normal(largest + 4096, np.float32) * np.float32(0.02))
    weight_map = {}
    for file, own in files.items():
        specs = [
            TensorSpec(name=name, dtype="BF16", shape=shape, file=file)
            for name, shape in own.items()
        ]
        with contextlib.closing(Writer(folder / file, specs)) as writer:
            for spec in specs:
                start = int(rng.integers(4096))
                writer.write(spec.name, numbers[start : start + spec.num_bytes // 2])
                weight_map[spec.name] = file
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    durable.flush_tree(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


class Run(NamedTuple):
    """One child process."""

    seconds: float
    cpu_s: float
    peak_bytes: dict[str, int]  # by the key of /proc/PID/status


def run(command: list[str], then: Callable[[], object] = lambda: None) -> Run:
    """A command and what belongs to it. Memory is Linux's to tell."""
    peaks = {"VmHWM": 0, "RssAnon": 0}

    def watch(process: subprocess.Popen) -> None:
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                    key, _, value = line.partition(":")
                    if key in peaks:
                        peaks[key] = max(peaks[key], int(value.split()[0]) * 1024)
            time.sleep(SAMPLE_EVERY_S)

    before, start = _cpu_s(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    watching = threading.Thread(target=watch, args=(process,))
    watching.start()
    watching.join()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    then()
    return Run(time.perf_counter() - start, _cpu_s() - before, peaks)


def _cpu_s() -> float:
    """Of the children that have ended; what fsync costs in this process is little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_checkpoint(model: Model, runs: int) -> dict[str, Any]:
    threads = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary) / "source", Path(temporary) / "target"
        num_bytes = make_checkpoint(source, model)
        tool = [sys.executable, "-m", "tools.convert_checkpoint", str(source), str(target)]
        tool += ["--threads", str(threads)]
        turns = {
            "cp": lambda: run(
                ["cp", "-r", str(source), str(target)], lambda: durable.flush_tree(target)
            ),
            "start": lambda: run([*tool, "--format", "nvfp4", "--dry-run"]),
            "nvfp4": lambda: run([*tool, "--format", "nvfp4"]),
            "fp8-block": lambda: run([*tool, "--format", "fp8-block"]),
        }
        done: dict[str, list[Run]] = {name: [] for name in turns}
        for _ in range(runs + 1):
            for name, turn in turns.items():
                done[name].append(turn())
                if target.exists():
                    shutil.rmtree(target)
    results: dict[str, Any] = {
        "source_bytes": num_bytes,
        "threads": threads,
        "start_of_tool_s": round(statistics.median(r.seconds for r in done.pop("start")[1:]), 4),
    }
    return results | _describe_runs(done, num_bytes)


def _describe_runs(done: Mapping[str, list[Run]], num_bytes: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (_, *counted) in done.items():  # the first warms up
        seconds = [each.seconds for each in counted]
        results[name] = {
            "gb_per_s": round(num_bytes / statistics.median(seconds) / 1e9, 4),
            "median_s": round(statistics.median(seconds), 4),
            "best_s": round(min(seconds), 4),
            "worst_s": round(max(seconds), 4),
            "cpu_s": round(statistics.median(each.cpu_s for each in counted), 4),
            "num_runs": len(counted),
        }
        if name != "cp":
            times = results["cp"]["median_s"] / results[name]["median_s"]
            results[name]["times_cp"] = round(times, 4)
            for key in ("VmHWM", "RssAnon"):
                peak = max(each.peak_bytes[key] for each in counted)
                results[name][f"peak_{key}_mb"] = round(peak / 1e6, 1)
    return results


def describe_machine() -> dict[str, Any]:
    description = harness.machine(("numpy", "numba", "torch", "jax"))
    for name in ("nvidia-modelopt", "compressed-tensors"):
        with contextlib.suppress(PackageNotFoundError):
            description["packages"][name] = version(name)
    return description


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="small matrices, a small checkpoint")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--case", choices=(*CASES, *QUICK), help="one alone, on --threads")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    cases = QUICK if arguments.quick else CASES
    if arguments.case:
        case = cases[arguments.case]
        return print(json.dumps(measure_encoders(case, arguments.threads, arguments.runs)))
    description = describe_machine()
    results: dict[str, Any] = {}
    for name in cases:
        for threads in THREADS:
            key = f"{name}, {threads} thread{'s' * (threads > 1)}"
            results[key] = measure_encoders_apart(name, threads, arguments)
    model = SMALL_MODEL if arguments.quick else MODEL
    results["checkpoint"] = measure_checkpoint(model, min(arguments.runs, 3))
    return harness.report("convert", results, description, arguments.out)


if __name__ == "__main__":
    main()
