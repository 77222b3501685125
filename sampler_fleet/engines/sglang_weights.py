"""Whether a running SGLang server holds the weights it was told to load.

Owns the map from a checkpoint's tensors to the modules of the server, which fuses them. Pure
functions of manifests and of `/weights_checker` checksums; must not talk to anybody.

The server skips tensors whose names it does not know and reports success, and quantization and
tensor parallelism rewrite what it holds, so bytes can't be compared with the checkpoint's. What can
be compared is change: from one version to the next, exactly those modules of the server must change
of which a tensor in the checkpoint did.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from contracts.errors import BadInputError
from contracts.types import Manifest

Checksums = tuple[dict[str, str], ...]  # of each rank: parameter name -> checksum

_FUSED = (
    (re.compile(r"\.experts\.\d+\..*$"), ".experts"),
    (re.compile(r"\.self_attn\.(q|k|v)_proj$"), ".self_attn.qkv_proj"),
    (re.compile(r"\.(gate|up)_proj$"), ".gate_up_proj"),
)


def server_module(tensor: str) -> str:
    """The module of the server that holds a tensor of the checkpoint."""
    module = tensor.rpartition(".")[0]
    for pattern, fused in _FUSED:
        module, found = pattern.subn(fused, module)
        if found:
            break
    return module


def check_same_tensors(before: Manifest, after: Manifest) -> None:
    """Raises BadInputError unless both have tensors of the same names, dtypes and shapes."""
    ours = {(t.name, t.dtype, t.shape) for t in before.tensors}
    theirs = {(t.name, t.dtype, t.shape) for t in after.tensors}
    if ours != theirs:
        missing = sorted(name for name, *_ in ours - theirs)
        unknown = sorted(name for name, *_ in theirs - ours)
        raise BadInputError(
            f"tensors of version {after.version} ({after.format})",
            expected=f"those of version {before.version}",
            found=f"{len(missing)} missing or other {missing[:3]}, {len(unknown)} new or other "
            f"{unknown[:3]}",
        )


def check_has_place(manifest: Manifest, held: Checksums) -> None:
    """The server skips a tensor that it has no module for, and keeps weights that no tensor fills.

    The latter are whatever was in memory: its Qwen3-MoE has a head of its own also where the
    checkpoint ties it to the embedding. A model that does tie it has no such module.

    Raises:
        BadInputError: one or the other.
    """
    modules = _modules(name for rank in held for name in rank)
    wanted = {server_module(tensor.name) for tensor in manifest.tensors}
    weights = _modules(name for rank in held for name in rank if name.endswith("weight"))
    if unfilled := sorted(weights - wanted):
        raise BadInputError(
            f"tensors of version {manifest.version} ({manifest.format})",
            expected="all that the server has weights for",
            found=f"none for {len(unfilled)} modules, first {unfilled[0]}",
        )
    if stray := sorted(wanted - modules - {"lm_head"}):
        raise BadInputError(
            f"tensors of version {manifest.version} ({manifest.format})",
            expected="modules that the server has",
            found=f"{len(stray)} that it has not, first {stray[0]}",
        )


def wrong_modules(
    before: Manifest, after: Manifest, held_before: Checksums, held_after: Checksums
) -> list[str]:
    """Modules that changed in the server and not in the checkpoint, or the other way round."""
    known = {tensor.name: tensor.checksum for tensor in before.tensors}
    wanted = {server_module(t.name) for t in after.tensors if known.get(t.name) != t.checksum}
    found = _modules(
        name
        for one, other in zip(held_before, held_after, strict=True)
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    )
    if "lm_head" not in _modules(name for rank in held_after for name in rank):
        wanted.discard("lm_head")  # tied to the embedding
    return sorted(wanted ^ found)


def _modules(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}
