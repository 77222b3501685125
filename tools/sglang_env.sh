#!/usr/bin/env bash
# Makes the environment in which SGLang runs on a plain CPU, in a cache folder outside the checkout,
# and prints the path of its Python. Does nothing more when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
pins=tests/sglang/requirements.txt
kernels=tests/sglang/sgl_kernel.py
env="${XDG_CACHE_HOME:-$HOME/.cache}/mixed-samplers/sglang"
stamp="$env/.installed"

mkdir -p "$(dirname "$env")"
exec 9>"$env.lock"
flock 9
wanted="$(cat "$pins" "$kernels" tools/sglang_env.sh | sha256sum | cut -d' ' -f1)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "sglang: installing into $env (3.3 GB; several minutes the first time)" >&2
    [ -x "$env/bin/python" ] || "$python" -m venv "$env"
    pip=("$env/bin/python" -m pip install --quiet --quiet --disable-pip-version-check)
    "${pip[@]}" --constraint "$pins" torch >&2
    "${pip[@]}" --no-deps --requirement "$pins" >&2
    site="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # PyPI's torchvision is built for CUDA; its operators do not register with torch for CPUs
    : >"$site/torchvision/_meta_registrations.py"
    cp "$kernels" "$site/sgl_kernel.py"
    echo "$wanted" >"$stamp"
fi
echo "$env/bin/python"
