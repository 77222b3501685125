"""A container's tree made ready: at its base commit, set up, and cleaned of the answer.

Owns the order of these steps and what their failure means. Must not know runtimes.
"""

from __future__ import annotations

import shlex

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Checkout, SandboxError
from sampler_fleet.episodes.containers.base import Container
from sampler_fleet.episodes.containers.launch import ContainerLimits
from sampler_fleet.episodes.scrub.findings import Target
from sampler_fleet.episodes.scrub.ship import scrub_inside
from sampler_fleet.episodes.supervised import GRACE_S, SNAPSHOT_S

# Images with commits of their own on top of the base stay as they are, and so do those whose
# history was cleaned and doesn't have it.
_TO_BASE = """
base={base}
git() {{ command git -c safe.directory='*' "$@"; }}
if git rev-parse -q --verify "$base^{{commit}}" >/dev/null 2>&1 &&
   ! git merge-base --is-ancestor "$base" HEAD
then git checkout -q -f "$base"
fi
"""
# Where nobody knows the fix, the scrub looks for no lines of it.
_NO_PATCH = """\
--- /dev/null
+++ b/no-known-fix
@@ -0,0 +1 @@
+the fix of this task is not known to anybody who runs it
"""


async def set_up(container: Container, checkout: Checkout, limits: ContainerLimits) -> None:
    """The tree at its base commit, after the task's setup script; hidden tests are still there.

    Raises:
        SandboxError: a step failed.
    """
    seconds = limits.setup_seconds
    if checkout.base_commit != "HEAD":
        base = _TO_BASE.format(base=shlex.quote(checkout.base_commit))
        await run_step(container, "checkout of the base commit", base, seconds)
    if checkout.setup:
        await run_step(container, "the task's setup script", checkout.setup, seconds)


async def hide(container: Container, checkout: Checkout, limits: ContainerLimits) -> list[str]:
    """Removes hidden paths, history and other leaks; returns environment variables that tell.

    Raises as `set_up`.
    """
    if checkout.hidden_paths:
        paths = shlex.join(checkout.hidden_paths)
        await run_step(container, "removal of hidden paths", f"rm -rf -- {paths}", 60.0)
    root = (await run_step(container, "pwd", "pwd -P", 60.0)).strip()
    patch = checkout.fix_patch or checkout.test_patch or _NO_PATCH
    try:
        report = await scrub_inside(container, Target(root, patch), timeout_s=limits.setup_seconds)
    except BadInputError as error:
        raise SandboxError(f"the scrub failed: {error}") from error
    if not report.clean:
        leak = report.leaks[0]
        raise SandboxError(
            f"the scrub left {len(report.leaks)} leaks, the first in {leak.path}: {leak.kind}"
        )
    return report.unset


async def record(container: Container, unset: list[str]) -> None:
    """The tree is now what a patch is against, and the environment is without those variables.

    Raises:
        SandboxError: git could not record it.
    """
    try:
        await container.ask("unset", unset)
        await container.ask("record", timeout_s=SNAPSHOT_S + GRACE_S)
    except OSError as error:
        raise SandboxError(f"the tree was not recorded: {error}") from error


async def run_step(
    container: Container, what: str, command: str, seconds: float, stdin: bytes = b""
) -> str:
    """The output of a command that has to succeed. SandboxError: it did not."""
    result = await container.exec(command, timeout_s=seconds, stdin=stdin)
    if result.returncode:
        how = "took too long" if result.timed_out else f"ended with status {result.returncode}"
        raise SandboxError(f"{what} {how}: {result.output.strip()[-300:]}")
    return result.output
