"""The page in one piece: HTML with its style, script and data inside, and nothing to fetch.

Owns which parts make the page and how data stands in it. What is shown comes from `content`; the
page's script makes text of it, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def render(content: Mapping[str, Any]) -> str:
    """The page, as HTML."""
    style, script = (_HERE / "page.css").read_text(), (_HERE / "page.js").read_text()
    # a token's text may spell the end of a script
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    parts = {"POLICY": policy, "/* page.css */": style, "/* page.js */": script, "DATA": data}
    html = (_HERE / "page.html").read_text()
    for place, part in parts.items():
        before, after = html.split(place, 1)
        html = before + part + after
    return html


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
