"""What a run file says about Modal: [fleet.modal], and `modal` of one group.

Owns the two models and their defaults, and whether the package is there. Must not import modal:
everybody who reads a run file reads these.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

from pydantic import Field

from contracts.errors import BadInputError
from contracts.runfile import Section

# Modal names no limits, its servers do; no machine of eight accelerators has more than these.
MAX_CPU = 512
MAX_MEMORY_GIB = 4096

Cloud = Literal["", "aws", "gcp", "oci", "auto"]


class ModalGroupConfig(Section):
    """What one sampler of a group gets from Modal; empty: what [fleet.modal] or a table says."""

    gpu: str = ""  # Modal's name for the accelerator, without a number
    image: str = ""
    cpu: float = Field(default=8.0, gt=0, le=MAX_CPU)  # cores reserved
    memory_gib: float = Field(default=32.0, gt=0, le=MAX_MEMORY_GIB)  # host memory reserved
    regions: tuple[str, ...] = ()
    cloud: Cloud = ""


class ModalConfig(Section):
    """[fleet.modal]: the app that holds all groups with provider "modal".

    `secret` names a Modal Secret with the keys of `modal_container.SECRET_KEYS`; `tls` says which
    of them samplers need: the CA that verifies the servers, and for "mutual" a certificate as well.
    """

    app: str = Field(default="mixed-samplers", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    environment: str = ""  # Modal's; empty: that of the profile
    gateway: str = ""  # HOST:PORT as the internet reaches it
    weights: str = ""
    secret: str = Field(default="mixed-samplers", min_length=1)
    tls: Literal["mutual", "server", "none"] = "server"
    image: str = ""  # tag in a registry; empty: Debian, without SGLang
    volume: str = Field(default="mixed-samplers-cache", min_length=1)  # compiled kernels
    regions: tuple[str, ...] = ()
    cloud: Cloud = ""
    startup_seconds: int = Field(default=1800, ge=1)  # of a container, without loading weights
    scaledown_seconds: int = Field(default=60, ge=2, le=3600)  # before a surplus one is told to go


def check_has_modal() -> None:
    """BadInputError unless the package modal is installed."""
    if importlib.util.find_spec("modal") is None:
        raise BadInputError(
            "this Python environment",
            expected="the modal extra (pip install 'mixed-samplers[modal]')",
            found="no package modal",
        )
