"""How the tests of SWE-bench's relatives are run in their images: the repositories' commands.

Owns what no row says and each set's harness knows: the environment in the image, and the runners
that are not pytest. Must not run anything.

Tests are given as in the rows: by ids, and by the patch that brings them. Ids of pytest have `::`;
a repository without them that is not known here can't be graded.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from sampler_fleet.episodes.base import Judge

_ACTIVATE = """\
if [ -f /opt/miniconda3/bin/activate ]; then
  source /opt/miniconda3/bin/activate && conda activate testbed || exit 1
fi
"""
_PYTEST = "pytest -rA --tb=short -p no:cacheprovider"
_DJANGO = 'python "$WITNESS" tests/runtests.py --verbosity 2'
_DJANGO_ENVIRONMENT = (
    "export LANG=en_US.UTF-8 LC_ALL=en_US.UTF-8 LANGUAGE=en_US:en PYTHONIOENCODING=utf8\n"
)
_SYMPY = "PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning bin/test -C --verbose"
_PYTHON_FILE = re.compile(r"^\+\+\+ b/(.+?\.py)\t?$", re.MULTILINE)


def test_command(
    repo: str, version: str, test_ids: Sequence[str], test_patch: str, pytest: str = _PYTEST
) -> tuple[str, Judge]:
    """(bash, what judges its outcome); ("", TESTS) where nobody here knows how. `pytest` is the
    command for it, where a row has one."""
    files = dict.fromkeys(_PYTHON_FILE.findall(test_patch))
    if repo == "django/django" and files:
        modules = (
            file.removesuffix(".py").removeprefix("tests/").replace("/", ".") for file in files
        )
        how = "" if version == "1.9" else " --settings=test_sqlite --parallel 1"
        command = f"{_DJANGO_ENVIRONMENT}{_DJANGO}{how} {shlex.join(modules)}"
        return _ACTIVATE + command, Judge.WITNESS
    if repo == "sympy/sympy" and files:
        return f"{_ACTIVATE}{_SYMPY} {shlex.join(files)}", Judge.LOG
    paths = dict.fromkeys(name.partition("::")[0] for name in test_ids if "::" in name)
    if not paths:
        return "", Judge.TESTS
    if repo == "python/mypy":  # its files hold thousands
        names = dict.fromkeys(name.rpartition("::")[2] for name in test_ids)
        pytest = f"{pytest} -k {shlex.quote(' or '.join(names))}"
    return f"{_ACTIVATE}{pytest} {shlex.join(paths)}", Judge.WITNESS
