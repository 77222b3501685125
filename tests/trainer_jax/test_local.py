import stat
from pathlib import Path

from trainer_jax import local
from trainer_jax.local import (
    Addresses,
    autoscaler_service,
    gateway_service,
    sampler_services,
    weights_service,
)


def test_commands_follow_the_run_file(tmp_path):
    addresses = Addresses(gateway="h:1", weights="h:2", token_file=tmp_path / "token")
    groups = [{"name": "a", "samplers": 2}, {"name": "b"}]
    services = sampler_services(tmp_path, addresses, groups)
    assert [s.name for s in services] == ["a-0", "a-1", "b-0"]
    command = " ".join(services[1].command)
    assert "-m sampler_fleet join" in command
    assert "--group a --sampler-id a-1" in command
    assert "--gateway h:1 --weights h:2" in command


def test_every_service_has_a_niceness_and_the_token(tmp_path):
    addresses = Addresses(gateway="h:1", weights="h:2", token_file=tmp_path / "token")
    services = [
        weights_service(tmp_path, addresses),
        gateway_service(tmp_path, addresses, Path("model")),
        autoscaler_service(tmp_path, addresses),
        *sampler_services(tmp_path, addresses, [{"name": "a"}]),
    ]
    assert {service.kind for service in services} == set(local.NICE)
    assert all(str(tmp_path / "token") in service.command for service in services)
    assert next(iter(local.NICE)) == "gateway", "without it, samplers have nothing to drain"


def test_the_token_is_private(tmp_path):
    addresses = local.local_addresses(tmp_path)
    assert addresses.token_file
    assert stat.S_IMODE(addresses.token_file.stat().st_mode) == 0o600
    assert len(addresses.token_file.read_text().strip()) >= 32
    assert addresses.gateway != addresses.weights
