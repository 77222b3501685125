"""The `[weights]` section of a run file.

Owns its keys and defaults. Must not read files: `contracts.runfile` does.
"""

from __future__ import annotations

from pydantic import Field

from contracts.runfile import Section
from weight_sync.formats.nvfp4 import Recipe


class WeightsConfig(Section):
    """How the weight service keeps and converts versions."""

    # The newest ones, besides what is being fetched. Deltas are made between these.
    keep_versions: int = Field(3, ge=1)
    # A sampler further behind takes the full snapshot; older deltas are removed.
    max_deltas: int = Field(16, ge=1)
    nvfp4_recipe: Recipe = Recipe.MODELOPT
    ignore: tuple[str, ...] = ()  # globs of module names that no format quantizes
    convert_threads: int = Field(1, ge=1)
