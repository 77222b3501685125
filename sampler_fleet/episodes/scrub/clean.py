"""The scrub: takes every leak that the audit finds out of a tree, until it finds none.

Owns the order of things and every change to files. It works in place, because a task's tree may be
a mount point or many gigabytes with hard links and times of their own, and because extra roots
can't be swapped. So each step can be repeated: whoever interrupts it runs it again. Bad input is
refused before anything changes; the repository is replaced by renames, and the old one is there
until the new one is whole.

Nothing outside the tree and the extra roots is touched; no link is followed. Runs inside
containers too: standard library of Python 3.9.
"""

from __future__ import annotations

import os
import shutil
import stat

from sampler_fleet.episodes.scrub.audit import Audit
from sampler_fleet.episodes.scrub.findings import Leak, Refused, Report, Target
from sampler_fleet.episodes.scrub.policy import CLASSES, EDIT, FRESH, REMOVE, UNSHARE
from sampler_fleet.episodes.scrub.repository import Repository, remove

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_MAX_PASSES = 4  # one leak may hide another; real trees need two


def scrub(
    target: Target, *, environment: Mapping[str, str] | None = None, network: bool = False
) -> Report:
    """Cleans, then audits. The report's `leaks` are those that nothing here can mend.

    Raises:
        Refused: bad input; nothing was changed.
    """
    Repository.recover(target.root)
    audit = Audit(target)
    _refuse(audit)
    removed: list[Leak] = []
    for _ in range(_MAX_PASSES):
        leaks = audit.run().leaks
        inside = [leak for leak in leaks if not os.path.isabs(leak.path)]
        mended = [leak for leak in inside if _mend(audit, leak)]
        commit = _make_fresh(audit)  # before extra roots: the old one's objects may be there
        mended += [leak for leak in leaks if os.path.isabs(leak.path) and _mend(audit, leak)]
        removed += [leak for leak in leaks if CLASSES[leak.kind].remedy == FRESH] + mended
        audit = Audit(target)
        if not mended:
            break
    unset = {leak.path for leak in audit.run(environment=environment).leaks
             if leak.kind == "environment"}  # fmt: skip
    kept = {name: value for name, value in (environment or {}).items() if name not in unset}
    report = audit.run(environment=kept, network=network)
    report.removed, report.unset, report.commit = removed, sorted(unset), commit
    return report


def _refuse(audit: Audit) -> None:
    if audit.applied:
        raise Refused(
            "the tree", "without the gold patch", f"{audit.applied[0]} as the patch leaves it"
        )
    if audit.repository is None:
        return
    roots = (audit.target.root, *audit.target.extra_roots)
    for place in map(os.path.realpath, audit.repository.elsewhere()):
        if os.path.exists(place) and not any(f"{place}/".startswith(f"{r}/") for r in roots):
            raise Refused(
                "the tree's repository",
                "all of it in the tree or in an extra root",
                f"a part at {place}",
            )


def _mend(audit: Audit, leak: Leak) -> bool:
    """Does to a leak what the policy says; whether that changed anything."""
    path = os.path.normpath(os.path.join(audit.target.root, leak.path))
    remedy = CLASSES[leak.kind].remedy
    if not os.path.lexists(path):
        return False
    if remedy == REMOVE:
        tracked = leak.kind == "telling-name" and leak.path in audit.tracked
        if tracked or audit.holds_task(path):  # the task needs the name
            return False
        remove(path)
    elif remedy == EDIT:
        _cut_entries(audit, path)
    elif remedy == UNSHARE:
        _replace(path, None)
    else:
        return False
    return True


def _make_fresh(audit: Audit) -> str:
    root = audit.target.root
    tracked = {path for path in audit.tracked if os.path.lexists(os.path.join(root, path))}
    _pin([os.path.join(root, path) for path in tracked])
    return Repository.fresh(root, tracked)


def _pin(paths: Collection[str]) -> None:
    """One time for all: the newest, so that what was built from them doesn't get newer."""
    newest = max((os.lstat(path).st_mtime_ns for path in paths), default=0)
    for path in paths:
        os.utime(path, ns=(newest, newest), follow_symlinks=False)


def _cut_entries(audit: Audit, path: str) -> None:
    """Cuts the entries out of a changelog that hold lines of the patch."""
    with open(path, "rb") as file:
        lines = file.read().splitlines(keepends=True)
    entries: list[list[bytes]] = []
    for line in lines:
        starts = line.lstrip()[:2] in (b"- ", b"* ", b"+ ") or not line.strip()
        if starts or not entries or not entries[-1][-1].strip():
            entries.append([])
        entries[-1].append(line)
    kept = [entry for entry in entries if not audit.scanner.lines(b"".join(entry))]
    _replace(path, b"".join(line for entry in kept for line in entry))


def _replace(path: str, data: bytes | None) -> None:
    """A new file in place of another, with its mode, owner and times; None: with its content."""
    info = os.lstat(path)
    aside = f"{path}.scrub-new"  # an audit takes it for a leak, should it be left behind
    with open(path, "rb") as source, open(aside, "wb") as file:
        if data is None:
            shutil.copyfileobj(source, file)
        else:
            file.write(data)
    if os.geteuid() == 0:
        os.chown(aside, info.st_uid, info.st_gid)
    os.chmod(aside, stat.S_IMODE(info.st_mode))
    os.utime(aside, ns=(info.st_atime_ns, info.st_mtime_ns))
    os.replace(aside, path)
