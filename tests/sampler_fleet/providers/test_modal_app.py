"""What a run file's groups become on Modal: the real package, without an account."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import modal
import pytest
from typer.testing import CliRunner

from contracts.errors import BadInputError
from contracts.runfile import write_resolved
from sampler_fleet.__main__ import app as command_line
from sampler_fleet.config import FleetConfig, read_settings
from sampler_fleet.engines.launch import kernels_for
from sampler_fleet.metering import Metering
from sampler_fleet.providers.modal_app import (
    GPUS,
    build_app,
    check_public,
    plan_servers,
    requirements,
)

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "modal.toml"
GROUP = {
    "name": "a",
    "provider": "modal",
    "weight_format": "bf16",
    "accelerator": "H100",
    "samplers": 2,
}
ADDRESSES = {"gateway": "gateway.example.com:7000", "weights": "203.0.114.9:7001"}


def fleet(*, modal_section: dict | None = None, drain_seconds: float = 30, **group) -> FleetConfig:
    return FleetConfig.model_validate(
        {
            "drain_seconds": drain_seconds,
            "modal": ADDRESSES | (modal_section or {}),
            "groups": [GROUP | group, {"name": "here", "weight_format": "bf16"}],
        }
    )


def test_only_groups_of_this_provider_are_planned():
    (plan,) = plan_servers(fleet())
    assert (plan.group.name, plan.gpu, plan.image) == ("a", "H100!", "")
    with pytest.raises(BadInputError, match='provider = "modal", found none'):
        plan_servers(fleet(provider="local"))


@pytest.mark.parametrize(
    ("group", "gpu"),
    [
        ({"accelerator": "H100", "num_accelerators": 2}, "H100!:2"),
        ({"accelerator": "RTX PRO 6000"}, "RTX-PRO-6000"),
        ({"accelerator": "a100"}, "A100-80GB"),
        ({"accelerator": "cpu"}, None),
        ({"accelerator": "TPU", "modal": {"gpu": "T4"}, "num_accelerators": 8}, "T4:8"),
    ],
)
def test_accelerators_have_modals_names(group, gpu):
    assert plan_servers(fleet(**group))[0].gpu == gpu


def test_a_groups_own_settings_go_before_the_fleets():
    own = {"image": "one:1", "regions": ["eu"], "cloud": "gcp"}
    section = {"image": "all:1", "regions": ["us"], "cloud": "aws"}
    (plan,) = plan_servers(fleet(modal_section=section, modal=own))
    assert (plan.image, plan.regions, plan.cloud) == ("one:1", ("eu",), "gcp")
    (plan,) = plan_servers(fleet(modal_section=section))
    assert (plan.image, plan.regions, plan.cloud) == ("all:1", ("us",), "aws")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"accelerator": "TPU"}, "group a: expected modal.gpu, or an accelerator of"),
        (
            {"num_accelerators": 2, "modal": {"gpu": "H100:4"}},
            "modal.gpu without a number: num_accelerators is it, found H100:4",
        ),
        ({"num_accelerators": 16}, "at most 8 in one Modal container, found 16"),
        ({"engine": "sglang"}, "sglang.python, that image's Python, found neither"),
        ({"engine": "sglang", "modal": {"image": "x:1"}}, "found only one of them"),
        ({"sglang": {"address": "http://x:1"}}, "a server of each sampler's own"),
        ({"drain_seconds": 3600}, "fleet.drain_seconds: expected at most 3540"),
        ({"modal_section": {"gateway": ""}}, "fleet.modal.gateway: expected a public HOST:PORT"),
        ({"modal_section": {"weights": "10.0.0.1:7001"}}, "fleet.modal.weights: expected a public"),
        ({"modal_section": {"tls": "none"}}, "fleet.modal.tls: expected"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(BadInputError, match=sentence):
        plan_servers(fleet(**changes))


def test_plain_text_takes_a_flag():
    assert plan_servers(fleet(modal_section={"tls": "none"}), insecure=True)


@pytest.mark.parametrize("address", ["a.example.com:1", "8.8.8.8:65535", "[2606:4700::1]:7000"])
def test_public_addresses(address):
    check_public("key", address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost:7000",
        "127.0.0.1:7000",
        "192.168.0.1:7000",
        "[::1]:7000",
        "gateway:7000",
        "gateway.local:7000",
        "gateway.example.com",
        "gateway.example.com:",
        "gateway.example.com:0",
        "gateway.example.com:65536",
    ],
)
def test_addresses_that_a_container_could_not_dial(address):
    with pytest.raises(BadInputError, match="a public HOST:PORT"):
        check_public("key", address)


def test_packages_are_pinned_to_this_environment():
    pins = requirements()
    names = {pin.partition("==")[0] for pin in pins}
    assert {"numpy", "grpcio", "torch", "safetensors", "aiohttp"} <= names
    assert not {"jax", "modal", "pytest"} & names
    assert all("==" in pin and "+" not in pin for pin in pins)


def test_every_group_of_the_example_is_defined_and_has_kernels(tmp_path):
    settings = read_settings(EXAMPLE)
    record = tmp_path / "run.json"
    write_resolved(record, settings.to_dict())
    plans = plan_servers(settings.fleet)
    assert len(plans) == len(settings.fleet.groups) == 8
    build_app(settings.fleet, plans, record)
    for plan in plans:
        kernels_for(plan.group.accelerator, plan.group.weight_format)
        (price,) = settings.fleet.prices_of(plan.group)
        assert price.source and math.isfinite(price.per_hour)


def test_a_setting_that_modal_refuses_is_refused_here(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    config = fleet(modal_section={"scaledown_seconds": 3600})
    wrong = config.model_copy(
        update={"modal": config.modal.model_copy(update={"scaledown_seconds": 1})}
    )
    with pytest.raises(modal.exception.InvalidError, match="scaledown_window"):
        build_app(wrong, plan_servers(wrong), tmp_path / "run.json")


def test_each_gpu_name_says_where_it_is_from():
    assert all(gpu.source for gpu in GPUS.values())


def test_a_dry_run_needs_no_account_and_says_what_would_run(tmp_path):
    result = CliRunner().invoke(command_line, ["deploy", "modal", str(EXAMPLE), "--dry-run"])
    assert result.exit_code == 0, result.output
    for part in ("H100!:2", "lmsysorg/sglang:v0.5.23", "8 (0 to 16)", "50.00", "SAMPLER_TLS_KEY"):
        assert part in result.stdout
    assert "$286.88 per hour" in result.stdout
    assert "nothing was sent" in result.stdout


def test_a_group_without_a_price_is_named(tmp_path):
    record = tmp_path / "run.json"
    sections = read_settings(EXAMPLE).to_dict()
    del sections["fleet"]["prices"]["B300"]
    record.write_text(json.dumps(sections))
    result = CliRunner().invoke(command_line, ["deploy", "modal", str(record), "--dry-run"])
    assert "no price  b300-nvfp4" in result.stdout
    assert "$230.08 per hour" in result.stdout


def dry_run(tmp_path, change):
    """`deploy --dry-run` of the example with one change to its first group or its prices."""
    sections = read_settings(EXAMPLE).to_dict()
    change(sections["fleet"])
    record = tmp_path / "run.json"
    record.write_text(json.dumps(sections))
    return CliRunner().invoke(command_line, ["deploy", "modal", str(record), "--dry-run"])


@pytest.mark.parametrize(
    ("setting", "value"), [("memory_gib", 1e9), ("cpu", 1e6), ("memory_gib", math.inf)]
)
def test_a_host_that_nobody_has_is_refused(tmp_path, setting, value):
    result = dry_run(tmp_path, lambda f: f["groups"][0]["modal"].update({setting: value}))
    assert result.exit_code == 2
    assert setting in result.stderr


def test_a_gpu_that_is_not_in_the_table_is_named(tmp_path):
    result = dry_run(tmp_path, lambda f: f["groups"][0]["modal"].update(gpu="NoSuchGPU"))
    assert result.exit_code == 0
    assert "unknown GPU  NoSuchGPU: not checked here, Modal may refuse it" in result.stdout
    known = dry_run(tmp_path, lambda f: f["groups"][0]["modal"].update(gpu="H100!"))
    assert "unknown GPU" not in known.stdout


def test_what_modal_refuses_in_a_definition_is_one_sentence(tmp_path):
    result = dry_run(tmp_path, lambda f: f["modal"].update(volume="a volume"))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: Modal app mixed-samplers: expected what Modal accepts")


def test_prices_that_begin_in_the_future_are_refused_as_the_gateway_does(tmp_path):
    def change(section):
        for prices in section["prices"].values():
            prices[0]["since"] = "2999-01-01"

    result = dry_run(tmp_path, change)
    assert result.exit_code == 2
    fleet = read_settings(tmp_path / "run.json").fleet
    with pytest.raises(BadInputError, match="found the first since 2999-01-01") as refused:
        Metering(fleet, time.time())
    assert result.stderr == f"error: {refused.value}\n"


def test_another_provider_is_unknown():
    result = CliRunner().invoke(command_line, ["deploy", "nowhere", str(EXAMPLE)])
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
