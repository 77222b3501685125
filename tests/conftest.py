"""Settings of every test, made through the environment so that child processes have them too.

Owns the strictness of JAX, the compilation cache and the number of threads. No fixtures of parts.
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

from hypothesis import settings

faulthandler.enable()
settings.register_profile("untimed", deadline=None)  # no test fails for a slow machine
settings.load_profile("untimed")

CACHE = Path(__file__).resolve().parent.parent / ".cache"

for name, value in {
    "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "GRPC_VERBOSITY": "ERROR",
}.items():
    os.environ.setdefault(name, value)
