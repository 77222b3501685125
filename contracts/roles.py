"""What each role's token may call.

Owns that table and nothing else. A call that stands nowhere here, such as draining a sampler, takes
a token of every right: so does one that is new.
"""

from __future__ import annotations

from contracts.credentials import Role

# over HTTP: the OpenAI-compatible endpoint
_CHAT = frozenset({"/v1/chat/completions", "/v1/models"})
_WEIGHTS, _FLEET, _ROLLOUT = "/weights.v1.Weights/", "/fleet.v1.Fleet/", "/rollout.v1.Rollout/"

CALLS: dict[Role, frozenset[str]] = {
    # runs on rented machines: may serve the policy, and read nothing but it
    Role.SAMPLER: frozenset(
        {_FLEET + "Join", _WEIGHTS + "Watch", _WEIGHTS + "Chain", _WEIGHTS + "Fetch"}
    ),
    Role.TRAINER: frozenset(
        {
            *(_FLEET + call for call in ("Status", "ReportUpdate")),
            *(_ROLLOUT + call for call in ("StreamGroups", "AckGroups", "Watch", "Evaluate")),
            *(_ROLLOUT + call for call in ("Generate", "EndSession")),
            *(_WEIGHTS + call for call in ("Publish", "Status")),
        }
    ),
    # runs beside the policy's own commands: must not be able to reward itself
    Role.AGENT: _CHAT,
    Role.HARNESS: _CHAT | {"/v1/groups", "/v1/sessions/{session_id}/finish"},
}


def may_call(role: Role, method: str) -> bool:
    """Whether a token of that role passes for `/package.Service/Method`, or a route of HTTP."""
    return role == Role.ALL or method in CALLS[role]
