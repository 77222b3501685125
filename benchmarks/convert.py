"""`python -m benchmarks.convert`: encoder throughput in GB/s of BF16 input, on one thread.

Peers in the same run: memcpy of the input, and the plain PyTorch form of the same arithmetic. The
bytes of both sides are compared before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks import harness
from weight_sync.formats import bf16, fp8, nvfp4

CASES = {"one [1024, 1024]": (1, 1024, 1024), "64 experts [768, 2048]": (64, 768, 2048)}


def torch_nvfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ModelOpt's arithmetic, eager: (packed, block scales)."""
    x = w.float().reshape(-1, 16)
    s2 = x.abs().amax() / 2688
    s = (x.abs().amax(dim=1, keepdim=True) / (6 * s2)).clamp(2.0**-9, 448)
    sf = s.to(torch.float8_e4m3fn)
    v = x / (sf.float() * s2)
    a = v.abs()
    index = (a > 0.25).to(torch.uint8)
    for reached in (a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5):
        index += reached
    index |= (v < 0).to(torch.uint8) << 3
    return index[:, 0::2] | (index[:, 1::2] << 4), sf


def torch_fp8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """128 x 128 blocks, eager: (codes, scales). Shapes divide evenly here."""
    N, K = w.shape
    x = w.float().reshape(N // 128, 128, K // 128, 128)
    scale = x.abs().amax(dim=(1, 3), keepdim=True) / 448
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(N, K), scale.reshape(N // 128, K // 128)


def encode_nvfp4(bits: np.ndarray, recipe: nvfp4.Recipe) -> nvfp4.NvFp4:
    """As the converter does it: the scan for the global scale included."""
    return nvfp4.encode(bits, amax=bf16.amax(bits, "w"), recipe=recipe, name="w")


def check_equal(bits: np.ndarray, w: torch.Tensor) -> None:
    ours, (packed, scales) = encode_nvfp4(bits, nvfp4.Recipe.MODELOPT), torch_nvfp4(w)
    assert np.array_equal(ours.packed.ravel(), packed.numpy().ravel())
    assert np.array_equal(ours.block_scale.ravel(), scales.view(torch.uint8).numpy().ravel())
    block, (codes, block_scales) = fp8.encode(bits, name="w"), torch_fp8(w)
    assert np.array_equal(block.codes, codes.view(torch.uint8).numpy())
    assert np.array_equal(block.scale_inv, block_scales.numpy())


def contenders(
    weights: list[np.ndarray], tensors: list[torch.Tensor]
) -> dict[str, Callable[[], object]]:
    copies = [np.empty_like(bits) for bits in weights]
    recipes = {
        f"nvfp4 {recipe}": lambda recipe=recipe: [encode_nvfp4(bits, recipe) for bits in weights]
        for recipe in nvfp4.Recipe
    }
    return {
        "memcpy": lambda: [
            np.copyto(copy, bits) for copy, bits in zip(copies, weights, strict=True)
        ],
        **recipes,
        "nvfp4 torch": lambda: [torch_nvfp4(w) for w in tensors],
        "fp8-block": lambda: [fp8.encode(bits, name="w") for bits in weights],
        "fp8-block torch": lambda: [torch_fp8(w) for w in tensors],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    results = {}
    for name, (num, N, K) in CASES.items():
        weights = [
            bf16.round_from(rng.standard_normal((N, K), dtype=np.float32) * np.float32(0.02))
            for _ in range(num)
        ]
        tensors = [torch.from_numpy(bits).view(torch.bfloat16) for bits in weights]
        check_equal(weights[0], tensors[0])
        results[name] = harness.compare(
            contenders(weights, tensors),
            num_bytes=sum(bits.nbytes for bits in weights),
            peer="memcpy",
            runs=arguments.runs,
        )
        for ours in ("nvfp4 modelopt", "fp8-block"):
            peer = f"{ours.split()[0]} torch"
            ratio = results[name][peer]["median_s"] / results[name][ours]["median_s"]
            results[name][ours]["times_torch"] = round(ratio, 2)
    harness.report("convert", results, harness.machine(("numpy", "torch")), arguments.out)


if __name__ == "__main__":
    main()
