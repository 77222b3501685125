#!/usr/bin/env bash
# Brings Chromium, in which tests look at the gateway's page. Does nothing when it is there.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing chromium (the tests of the gateway's page)"
    if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends chromium fonts-dejavu-core >/dev/null; then exit 0; fi
fi
echo "setup: chromium is missing, so the tests of the gateway's page are skipped;" \
    "to run them: sudo apt-get install chromium" >&2
