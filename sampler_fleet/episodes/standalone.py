"""Modules of this package as one program for a bare interpreter in a sandbox.

Owns how such a program is put together: the modules it needs, then the module it is, under their
own names, so that their imports of each other find them. Must not run anything.
"""

from __future__ import annotations

from importlib import resources

_PACKAGE = "sampler_fleet.episodes"
_LOADER = """\
import sys
for name, source in {sources!r}:
    module = sys.modules[name] = type(sys)(name)
    exec(compile(source, name, "exec"), module.__dict__)
sys.exit(module.main())
"""


def standalone(*names: str) -> str:
    """The text for `python -c` that loads modules of this package and calls the last one's main."""
    folder = resources.files(_PACKAGE)
    files = {name: folder / f"{name.replace('.', '/')}.py" for name in names}
    sources = [(f"{_PACKAGE}.{name}", file.read_text()) for name, file in files.items()]
    return _LOADER.format(sources=sources)
