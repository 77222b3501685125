"""The engine contract, held by a real SGLang server on this CPU."""

from __future__ import annotations

import pytest

from contracts.types import WeightFormat
from sampler_fleet.engines.sglang import SglangEngine
from tests.sampler_fleet.engines.test_engine_contract import *  # noqa: F403
from tests.sampler_fleet.engines.test_engine_contract import MAX_CONTEXT, Subject


@pytest.fixture
async def subject(server, tmp_path):
    def make(max_sessions: int) -> SglangEngine:
        return SglangEngine(server, weight_format=WeightFormat.BF16, max_context_tokens=MAX_CONTEXT)

    subject = Subject(
        make=make,
        format=WeightFormat.BF16,
        root=tmp_path,
        engine=make(4),
        honours_seeds=False,  # on a CPU: deterministic inference wants kernels for GPUs
    )
    yield subject
    await subject.engine.close()
