"""Certificates for tests, made by the very commands that docs/operations.md gives.

Owns no assertion. `gateway` is certified for localhost, `weights` for another host.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from contracts.credentials import Tls, read_tls

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def run_guide(directory: Path, section: str) -> None:
    """Runs the first bash block of a section of the guide in `directory`, its gateway being
    localhost."""
    if not (shutil.which("openssl") and shutil.which("bash")):
        pytest.skip("needs bash and openssl")
    text = GUIDE.read_text().partition(f"\n## {section}\n")[2]
    script = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    script = script.replace("gateway.example", "localhost")
    command = ["bash", "-euo", "pipefail", "-c", script]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=60)


def make_certificates(directory: Path) -> Path:
    """The directory, made, with ca.pem, and NAME.pem and NAME.key of each process of the guide."""
    directory.mkdir()
    run_guide(directory, "Certificates")
    return directory


def tls(certificates: Path, name: str = "", *, ca: bool = True) -> Tls | None:
    """TLS with the certificate of that name, and with the CA or without."""
    return read_tls(
        ca=certificates / "ca.pem" if ca else None,
        certificate=certificates / f"{name}.pem" if name else None,
        key=certificates / f"{name}.key" if name else None,
    )
