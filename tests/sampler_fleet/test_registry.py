"""Admission, leases and phases, with a clock that the test moves."""

import dataclasses

import pytest

from contracts.errors import BadInputError, ConflictError
from contracts.types import KvFormat, SamplerInfo, WeightFormat
from sampler_fleet.engines.base import EngineLoad
from sampler_fleet.fingerprint import identify_checkpoint
from sampler_fleet.registry import IDLE, Registry, SamplerPhase
from tests.sampler_fleet.fakes import make_checkpoint, make_fleet_config

INFO = SamplerInfo(
    sampler_id="a",
    group="big",
    accelerator="cpu",
    weight_format=WeightFormat.BF16,
    kv_format=KvFormat.FP8,
    max_sessions=4,
    model_fingerprint="m",
    tokenizer_fingerprint="t",
    version=1,
)


@pytest.fixture
def registry() -> Registry:
    return Registry(
        make_fleet_config().groups,
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        lease_seconds=10.0,
    )


def test_a_lease_is_kept_by_heartbeats_and_lost_without_them(registry):
    registry.register(INFO, now=0.0)
    registry.heartbeat("a", version=3, load=IDLE, now=9.0)
    assert registry.expire(now=18.9) == []
    assert [s.version for s in registry.ready("big")] == [3]
    assert registry.expire(now=19.0) == ["a"]
    assert registry.ready("big") == []
    registry.heartbeat("a", version=4, load=IDLE, now=19.5)  # too late: it must register again
    assert registry.get("a").phase == SamplerPhase.LOST
    assert registry.expire(now=99.0) == [], "a lost sampler is not lost twice"
    registry.register(dataclasses.replace(INFO, version=5), now=20.0)
    assert [s.version for s in registry.ready("big")] == [5]


def test_an_id_is_free_only_once_its_sampler_is_gone(registry):
    registry.register(INFO, now=0.0)
    with pytest.raises(ConflictError, match="live sampler"):
        registry.register(INFO, now=1.0)
    registry.lose("a", "the stream broke")
    registry.register(dataclasses.replace(INFO, group="small"), now=1.0)
    assert [s.info.group for s in registry] == ["small"], "its old entry is gone"


def test_draining_takes_no_turns_and_needs_a_live_sampler(registry):
    registry.register(INFO, now=0.0)
    registry.drain("a", "asked")
    assert registry.ready("big") == []
    registry.heartbeat("a", version=1, load=IDLE, now=5.0)
    assert registry.get("a").phase == SamplerPhase.DRAINING, "heartbeats don't undo a drain"
    with pytest.raises(BadInputError, match=r"sampler id: expected a live sampler.*found b"):
        registry.drain("b", "asked")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("protocol_version", 99, "protocol: expected 2, found 99"),
        ("group", "huge", "expected one of big, small, eval, found huge"),
        ("weight_format", WeightFormat.NVFP4, "weight format: expected bf16, found nvfp4"),
        ("kv_format", KvFormat.BF16, "KV format: expected fp8, found bf16"),
        ("model_fingerprint", "x", "model fingerprint: expected m, found x"),
        ("tokenizer_fingerprint", "x", "tokenizer fingerprint: expected t, found x"),
        ("version", 0, "version: expected at least 1, found 0"),
        ("max_sessions", 0, "max_sessions: expected at least 1, found 0"),
        ("sampler_id", "", "expected a name"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(registry, field, value, sentence):
    with pytest.raises(BadInputError, match=sentence):
        registry.register(dataclasses.replace(INFO, **{field: value}), now=0.0)
    assert list(registry) == []


def test_a_fingerprint_is_of_the_function_not_of_its_precision_or_writer(tmp_path):
    plain = identify_checkpoint(
        make_checkpoint(
            tmp_path / "a",
            rope_theta=1e6,
            num_attention_heads=2,
            num_experts=4,
            intermediate_size=6144,  # of dense layers, of which there are none
            mlp_only_layers=[],
        )
    )
    quantized = identify_checkpoint(
        make_checkpoint(
            tmp_path / "b",
            rope_parameters={"rope_theta": 1_000_000, "rope_type": "default"},
            num_attention_heads=2,
            head_dim=4,
            num_local_experts=4,
            intermediate_size=768,
            decoder_sparse_step=1,
            quantization_config={"quant_method": "fp8"},
            dtype="bfloat16",
        )
    )
    same = {"rope_theta": 1e6, "num_attention_heads": 2, "num_experts": 4, "head_dim": 4}
    wider = identify_checkpoint(make_checkpoint(tmp_path / "c", **same, hidden_size=16))
    assert plain == identify_checkpoint(make_checkpoint(tmp_path / "d", **same))
    assert plain == quantized
    assert plain.model_fingerprint != wider.model_fingerprint
    (tmp_path / "b" / "tokenizer.json").write_text('{"another": 1}')
    other = identify_checkpoint(tmp_path / "b").tokenizer_fingerprint
    assert other != plain.tokenizer_fingerprint


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 100, "content": "<|im_end|>"}]}'
    )
    with pytest.raises(BadInputError, match=r"at most 100 tokens.*found 101"):
        identify_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(BadInputError, match="expected a tokenizer"):
        identify_checkpoint(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadInputError, match="model configuration"):
        identify_checkpoint(tmp_path)


def test_what_a_sampler_can_draw_follows_its_rate_only_while_it_is_busy(registry):
    name = registry.register(dataclasses.replace(INFO, tokens_per_second=100.0), now=0.0).sampler_id

    def beat(num_running: int, rate: float) -> float:
        load = EngineLoad(
            num_running=num_running, num_waiting=0, tokens_per_second=rate, kv_used_fraction=0.0
        )
        registry.heartbeat(name, version=1, load=load, now=1.0)
        return registry.get(name).tokens_per_second

    assert beat(1, 5.0) == 100.0, "few sessions say nothing of many"
    assert beat(1, 200.0) == pytest.approx(110.0), "but who draws more than that can"
    registry.lose(name, "to begin anew")
    registry.register(dataclasses.replace(INFO, tokens_per_second=100.0), now=0.0)
    assert beat(INFO.max_sessions, 0.0) == 100.0, "nor does a pause"
    assert beat(INFO.max_sessions, 50.0) == pytest.approx(95.0)
    for _ in range(200):
        settled = beat(INFO.max_sessions, 50.0)
    assert settled == pytest.approx(50.0, rel=1e-3)
