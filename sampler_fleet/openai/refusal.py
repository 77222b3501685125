"""Refusals in OpenAI's shape.

Owns the status, type and code of every error that a client of the endpoint can meet. Must not know
sessions.
"""

from __future__ import annotations

from typing import Any

from contracts.errors import shown

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Refusal(Exception):
    """Why a request is not served.

    `code` is for programs; `param` names the field at fault; `again_s` asks to come back after that
    many seconds, and None says that the same request will fail again.
    """

    def __init__(
        self, status: int, code: str, sentence: str, *, param: str = "", again_s: int | None = None
    ) -> None:
        super().__init__(shown(sentence))
        self.status, self.code, self.param, self.again_s = status, code, param, again_s

    def to_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, kind),
                "param": self.param or None,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """`x-should-retry` is what OpenAI's own clients go by."""
        if self.again_s is None:
            return {"x-should-retry": "false"}
        return {"x-should-retry": "true", "Retry-After": str(self.again_s)}


def ended() -> Refusal:
    return Refusal(409, "session_ended", "The session has ended.")
