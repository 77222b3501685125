"""How SGLang is started: the launch flags per accelerator and precision, and the process itself.

Owns the table (each entry with its source) and the life of a server that this process starts. Must
not speak to the server beyond asking whether it is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from contracts.errors import BadInputError, DirtyProcessError
from contracts.types import KvFormat, WeightFormat

log = logging.getLogger(__name__)

_POLL_S = 0.5
_STOP_S = 5.0  # between SIGTERM and SIGKILL
_SPARE_TOKENS = 8  # of the context, which the server keeps for itself

# Ends with the process that starts it; the server's own children end with the server.
_STARTER = (
    "import os, sys; from sampler_fleet.process import die_with_parent; "
    "die_with_parent(); os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Flags that depend on the accelerator and on the format of the weights."""

    flags: tuple[str, ...]
    source: str
    environment: Mapping[str, str] = field(default_factory=dict)


def _gpu(attention: str, moe: str = "", *others: str, memory: str = "0.7") -> tuple[str, ...]:
    runner = ("--moe-runner-backend", moe) if moe else ()
    return (
        *("--attention-backend", attention, *runner, *others),
        *("--mem-fraction-static", memory, "--chunked-prefill-size", "8192"),
        *("--mamba-ssm-dtype", "bfloat16"),
    )


_BLACKWELL_NVFP4 = Kernels(
    flags=_gpu("trtllm_mha", "flashinfer_cutedsl", "--quantization", "modelopt_fp4"),
    environment={"SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16": "1"},
    source="the published run, groups B200 and B300 NVFP4 (4-bit weights, BF16 activations); "
    "SGLang 0.5.23 layers/quantization/modelopt_quant.py reads the variable",
)
_HOPPER_FP8 = Kernels(
    flags=_gpu("fa3"),
    source="the published run, groups H100 and H200 FP8; the format is read from config.json",
)
# (accelerator, weight format); the number format of the KV cache is a flag of its own
TABLE: Mapping[tuple[str, WeightFormat], Kernels] = {
    ("b200", WeightFormat.NVFP4): _BLACKWELL_NVFP4,
    ("b300", WeightFormat.NVFP4): _BLACKWELL_NVFP4,
    ("h100", WeightFormat.FP8_BLOCK): _HOPPER_FP8,
    ("h200", WeightFormat.FP8_BLOCK): _HOPPER_FP8,
    ("h100", WeightFormat.BF16): Kernels(
        flags=_gpu("fa3", "triton"),
        source="the published run, group H100 BF16, two per engine",
    ),
    ("h200", WeightFormat.BF16): Kernels(
        flags=_gpu("fa3", "triton"), source="the published run, group H200 BF16"
    ),
    ("a100", WeightFormat.BF16): Kernels(
        flags=_gpu("flashinfer", "triton", "--linear-attn-backend", "triton", memory="0.65"),
        source="the published run, group A100-80GB BF16, two per engine; FlashInfer's linear "
        "attention needs SM90",
    ),
    ("rtx-pro-6000", WeightFormat.BF16): Kernels(
        flags=_gpu("flashinfer", "triton"),
        source="the published run, group RTX PRO 6000 BF16, two per engine; trtllm_mha rejects an "
        "FP8 KV cache on SM120",
    ),
    ("cpu", WeightFormat.BF16): Kernels(
        flags=(
            *("--device", "cpu", "--attention-backend", "torch_native"),
            *("--max-total-tokens", "16384", "--disable-cuda-graph"),
        ),
        environment={"SGLANG_USE_CPU_ENGINE": "1"},
        source="tests/sglang, which run it; a plain CPU without AMX",
    ),
}
_KV_FLAGS = {KvFormat.FP8: "fp8_e4m3", KvFormat.BF16: "bf16", KvFormat.NVFP4: "nvfp4"}


def kernels_for(accelerator: str, weight_format: WeightFormat) -> Kernels:
    """The table's entry; BadInputError names those there are."""
    found = TABLE.get((accelerator.lower(), weight_format))
    if found is None:
        known = ", ".join(f"{name} {format}" for name, format in TABLE)
        raise BadInputError(
            "launch flags of SGLang", expected=known, found=f"{accelerator} {weight_format}"
        )
    return found


class LocalServer:
    """An SGLang server that this process starts, once, and that ends with it.

    Args:
        kernels: see `kernels_for`.
        python: of the environment that has SGLang; empty: this one.
        arguments: further flags; they win over those of the table.
        start_s: how long it may take until it answers.
    """

    def __init__(
        self,
        *,
        kernels: Kernels,
        kv_format: KvFormat,
        max_sessions: int,
        max_context_tokens: int,
        num_accelerators: int = 1,
        python: str = "",
        arguments: tuple[str, ...] = (),
        start_s: float = 1800.0,
    ) -> None:
        self._kernels = kernels
        self._flags = (
            *kernels.flags,
            *("--tp-size", str(num_accelerators)),
            *("--kv-cache-dtype", _KV_FLAGS[kv_format]),
            *("--max-running-requests", str(max_sessions + 1)),  # the engine's own prompt
            *("--context-length", str(max_context_tokens + _SPARE_TOKENS)),
            *("--dtype", "bfloat16", "--grammar-backend", "none"),
            *("--skip-tokenizer-init", "--incremental-streaming-output"),
            *arguments,
        )
        self._python = python or sys.executable
        self._start_s = start_s
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""  # once started

    @property
    def ended(self) -> bool:
        """Whether it was started and is no more."""
        return self._process is not None and self._process.returncode is not None

    def command(self, directory: Path, version: int, port: int) -> tuple[str, ...]:
        """The command line that serves a checkpoint directory under a version's label."""
        return (
            *(self._python, "-m", "sglang.launch_server", "--model-path", str(directory)),
            *("--weight-version", str(version), "--host", "127.0.0.1", "--port", str(port)),
            *self._flags,
        )

    async def start(self, directory: Path, version: int) -> None:
        """Returns when it answers.

        Raises:
            DirtyProcessError: it ended, or took too long; its own output says why.
        """
        assert self._process is None, "started once"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        command = self.command(directory, version, port)
        log.info("starting %s", " ".join(command))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _STARTER, *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # beside our own log
            env={
                **os.environ,
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the spare tokens
                **self._kernels.environment,
            },
            process_group=0,
        )
        self.address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + self._start_s
        async with aiohttp.ClientSession() as session:
            while not await _answers(session, f"{self.address}/health"):
                if self.ended or time.monotonic() > deadline:
                    await self.stop()
                    raise DirtyProcessError(
                        f"SGLang did not come up (status {self._process.returncode}); "
                        "its output is above"
                    )
                await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Ends it and whatever it started. Repeatable."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            log.warning("SGLang did not end within %.0f s of SIGTERM", _STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
