"""What every benchmark shares: fair timing, the machine's description, one JSON form.

Contenders of one comparison take turns within the same run, so that a noisy machine is noisy to
all of them; results are ratios against a named peer. Owns no workload.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Wall seconds over several runs."""

    median_s: float
    best_s: float
    worst_s: float
    num_runs: int


def take_turns(contenders: Mapping[str, Callable[[], object]], runs: int) -> dict[str, Timing]:
    """Times each contender `runs` times, one after the other in rounds, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(runs):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: Timing(
            median_s=statistics.median(times),
            best_s=min(times),
            worst_s=max(times),
            num_runs=runs,
        )
        for name, times in seconds.items()
    }


def compare(
    contenders: Mapping[str, Callable[[], object]], *, num_bytes: int, peer: str, runs: int
) -> dict[str, Any]:
    """GB/s of `num_bytes` for each contender, and how often faster than `peer` it is."""
    timings = take_turns(contenders, runs)
    return {
        name: {
            "gb_per_s": round(num_bytes / timing.median_s / 1e9, 4),
            f"times_{peer}": round(timings[peer].median_s / timing.median_s, 4),
            **asdict(timing),
        }
        for name, timing in timings.items()
    }


def machine(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Where the numbers come from. `packages`: distributions whose versions matter."""
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def report(name: str, results: Mapping[str, Any], description: dict[str, Any], out: Path | None):
    """Prints the result as JSON, and writes it to `out` if given."""
    text = json.dumps({"benchmark": name, "machine": description, "results": results}, indent=2)
    print(text)
    if out:
        out.write_text(text + "\n")
