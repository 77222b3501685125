"""The live page in one piece: HTML with its style and script inside, and the policy it runs under.

Owns which parts make the page. Its content comes later, from `/status.json`, as text.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

_HERE = Path(__file__).parent


def build() -> tuple[bytes, str]:
    """The page, and a Content-Security-Policy under which nothing else can run or be fetched.

    No text can become markup either: Trusted Types are required, and nobody may make any.
    """
    style, script = (_HERE / "page.css").read_text(), (_HERE / "page.js").read_text()
    html = (_HERE / "page.html").read_text()
    html = html.replace("/* page.css */", style).replace("/* page.js */", script)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    return html.encode(), policy


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
