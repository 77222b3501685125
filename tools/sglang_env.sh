#!/usr/bin/env bash
# Makes the environment in which SGLang runs on a plain CPU, in a cache folder outside the checkout,
# and prints the path of its Python. Does nothing more when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cached_env.sh
pins=tests/sglang/requirements.txt
kernels=tests/sglang/sgl_kernel.py

if begin_env sglang "$pins" "$kernels" tools/sglang_env.sh; then
    echo "sglang: installing into $env (3.3 GB; several minutes the first time)" >&2
    "${pip[@]}" --constraint "$pins" torch >&2
    "${pip[@]}" --no-deps --requirement "$pins" >&2
    site="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # PyPI's torchvision is built for CUDA; its operators do not register with torch for CPUs
    : >"$site/torchvision/_meta_registrations.py"
    cp "$kernels" "$site/sgl_kernel.py"
    end_env
fi
echo "$env/bin/python"
