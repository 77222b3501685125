#!/usr/bin/env bash
# Makes the environment of the agents that the OpenAI endpoint is tested with, in a cache folder
# outside the checkout, and prints the path of its Python. Does nothing more when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cached_env.sh
pins=tests/sampler_fleet/openai/requirements.txt

if begin_env agents "$pins" tools/agents_env.sh; then
    echo "agents: installing into $env (750 MB)" >&2
    "${pip[@]}" --requirement "$pins" >&2
    end_env
fi
echo "$env/bin/python"
