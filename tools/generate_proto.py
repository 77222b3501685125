"""`python -m tools.generate_proto [--check]`: contracts/pb from proto/, or a diff if it is stale.

Owns the protoc call. The virtual path `contracts/pb/` makes the generated imports absolute, so
proto/ itself is never an importable package.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "contracts" / "pb"


def generate(into: Path) -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py for every proto below `into`/contracts/pb."""
    well_known = resources.files("grpc_tools") / "_proto"
    names = [f"contracts/pb/{path.name}" for path in sorted((ROOT / "proto").glob("*.proto"))]
    status = protoc.main(
        [
            "protoc",
            f"-Icontracts/pb={ROOT / 'proto'}",
            f"-I{well_known}",
            f"--python_out={into}",
            f"--pyi_out={into}",
            f"--grpc_python_out={into}",
            *names,
        ]
    )
    if status:
        sys.exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if contracts/pb is stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / "contracts" / "pb"
        names = {path.name for path in fresh.iterdir()} | {p.name for p in TARGET.glob("*_pb2*")}
        stale = sorted(
            name
            for name in names
            if not (fresh / name).exists()
            or not (TARGET / name).exists()
            or not filecmp.cmp(fresh / name, TARGET / name, shallow=False)
        )
    if stale:
        sys.exit(f"contracts/pb is stale ({', '.join(stale)}): run `make proto`")


if __name__ == "__main__":
    main()
