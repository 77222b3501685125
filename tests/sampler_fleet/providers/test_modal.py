"""The provider that resizes deployed groups: with a fake, and the calls that reach Modal's API."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import modal
import pytest
from grpclib import Status

from contracts.errors import BadInputError, RetryError
from sampler_fleet.config import read_settings
from sampler_fleet.providers.modal import Api, ModalApi, ModalProvider
from tests.sampler_fleet.providers.modal_stand_in import ModalStandIn, modal_stand_in

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "modal.toml"


class FakeApi(Api):
    """Containers by server; `error` is raised instead of an answer."""

    def __init__(self) -> None:
        self.bounds: dict[str, tuple[int, int]] = {}
        self.error: Exception | None = None
        self.closed = False

    async def resize(self, server: str, *, least: int, most: int) -> None:
        if self.error:
            raise self.error
        self.bounds[server] = (least, most)

    async def num_containers(self, server: str) -> int:
        if self.error:
            raise self.error
        return self.bounds[server][0]

    async def close(self) -> None:
        self.closed = True


async def test_a_group_gets_exactly_what_is_asked_for():
    api = FakeApi()
    provider = ModalProvider(api)
    for num in (3, 3, 1):
        await provider.scale("a", num)
        assert api.bounds["a"] == (num, num)
        assert await provider.num_held("a") == num
    await provider.close()
    assert api.closed


async def test_none_is_not_written_as_a_limit_of_zero_which_is_no_limit():
    api = FakeApi()
    await ModalProvider(api).scale("a", 0)
    assert api.bounds["a"] == (0, 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (modal.exception.ServiceError("upstream"), RetryError),
        (modal.exception.ResourceExhaustedError("too many requests"), RetryError),
        (modal.exception.ConflictError("deploying"), RetryError),
        (modal.exception.ConnectionError("refused"), RetryError),
        (ConnectionResetError("reset"), RetryError),
        (TimeoutError(), RetryError),
        (modal.exception.AuthError("Token missing."), BadInputError),
        (modal.exception.NotFoundError("no such app"), BadInputError),
        (modal.exception.PermissionDeniedError("not yours"), BadInputError),
        (modal.exception.InvalidError("bad"), BadInputError),
    ],
)
async def test_failures_say_whether_trying_again_helps(error, kind):
    api = FakeApi()
    provider = ModalProvider(api)
    api.error = error
    for call in (provider.scale("a", 1), provider.num_held("a")):
        with pytest.raises(kind) as caught:
            await call
        assert "Modal" in str(caught.value) and str(error).rstrip(".") in str(caught.value)


async def test_a_bug_stays_a_bug():
    api = FakeApi()
    api.error = KeyError("x")
    with pytest.raises(KeyError):
        await ModalProvider(api).scale("a", 1)


@pytest.fixture
def stand_in(monkeypatch) -> Iterator[ModalStandIn]:
    with modal_stand_in() as served:
        monkeypatch.setenv("MODAL_SERVER_URL", served.address)
        monkeypatch.setenv("MODAL_TOKEN_ID", "ak-test")
        monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-test")
        served.containers = {"h100-fp8": 3}
        yield served


async def test_the_right_calls_reach_modal(stand_in):
    provider = ModalProvider(ModalApi("an-app", "staging"))
    try:
        await provider.scale("h100-fp8", 5)
        await provider.scale("h100-fp8", 0)
        assert await provider.num_held("h100-fp8") == 3
    finally:
        await provider.close()
    looked_up = stand_in.requests["FunctionGet"]
    assert {(r.app_name, r.object_tag, r.environment_name) for r in looked_up} == {
        ("an-app", "h100-fp8", "staging")
    }
    updates = stand_in.requests["FunctionUpdateSchedulingParams"]
    assert [(u.settings.min_containers, u.settings.max_containers) for u in updates] == [
        (5, 5),
        (0, 1),
    ]
    changed = {"min_containers", "max_containers"}
    for update in updates:
        assert update.function_id == stand_in.function_id("h100-fp8")
        assert {field.name for field, _ in update.settings.ListFields()} <= changed
        assert update.settings.HasField("min_containers"), "0 is said, not left out"


async def test_what_modal_answers_becomes_one_sentence(stand_in):
    provider = ModalProvider(ModalApi("an-app"))
    try:
        with pytest.raises(BadInputError, match="group b: expected a deployed group"):
            await provider.scale("b", 1)
        stand_in.failure = (Status.RESOURCE_EXHAUSTED, "slow down")
        with pytest.raises(RetryError, match="slow down"):
            await provider.scale("h100-fp8", 1)
        stand_in.failure = (Status.UNAVAILABLE, "maintenance")
        with pytest.raises(RetryError, match="maintenance"):
            await provider.num_held("h100-fp8")
        stand_in.failure = (Status.UNAUTHENTICATED, "Token not found")
        with pytest.raises(BadInputError, match=r"Modal credentials: .*Token not found"):
            await provider.scale("h100-fp8", 1)
        stand_in.failure = None
        await provider.scale("h100-fp8", 1)
    finally:
        await provider.close()


async def test_modal_away_is_worth_another_try(stand_in, monkeypatch):
    monkeypatch.setenv("MODAL_SERVER_URL", "http://127.0.0.1:1")
    provider = ModalProvider(ModalApi("an-app"), call_s=0.5)
    try:
        with pytest.raises(RetryError, match="Modal is away"):
            await provider.scale("h100-fp8", 1)
    finally:
        await provider.close()


def run_command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of the fleet, with nobody's Modal account."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MODAL_")}
    return subprocess.run(
        [sys.executable, "-m", "sampler_fleet", *map(str, arguments)],
        cwd=ROOT,
        env=kept | {"MODAL_CONFIG_PATH": "/nowhere/modal.toml"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("command", ["deploy", "undeploy"])
def test_no_credentials_are_one_sentence(command):
    done = run_command(command, "modal", EXAMPLE)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Modal credentials: expected a token from")
    assert len(done.stderr.strip().splitlines()) == 1


def test_deploying_sends_every_group_and_undeploying_stops_the_app(stand_in):
    account = {name: os.environ[name] for name in os.environ if name.startswith("MODAL_")}
    done = run_command("deploy", "modal", EXAMPLE, "--name", "other", **account)
    assert done.returncode == 2, "the secret lacks the certificate that mutual TLS needs"
    assert "SAMPLER_TLS_CERT" in done.stderr

    stand_in.secret_keys |= {"SAMPLER_TLS_CERT", "SAMPLER_TLS_KEY"}
    done = run_command("deploy", "modal", EXAMPLE, "--name", "other", **account)
    assert done.returncode == 0, done.stderr
    assert stand_in.requests["AppPublish"][0].name == "other"
    assert set(stand_in.deployed) == {group.name for group in read_settings(EXAMPLE).fleet.groups}
    group = stand_in.deployed["h100-bf16"]
    assert group.is_server
    assert (group.resources.gpu_config.gpu_type, group.resources.gpu_config.count) == ("H100!", 2)
    assert group.resources.memory_mb == 224 * 1024
    settings = group.autoscaler_settings
    assert (settings.min_containers, settings.max_containers) == (4, 4)
    assert not settings.target_concurrency_float, "requests scale nothing"
    assert group.http_config.exit_grace_period == 960 > 900
    assert not group.http_config.unauthenticated
    named = [r for r in stand_in.requests["SecretGetOrCreate"] if r.deployment_name]
    assert {r.deployment_name for r in named} == {"mixed-samplers"}

    done = run_command("undeploy", "modal", EXAMPLE, "--name", "other", **account)
    assert done.returncode == 0, done.stderr
    assert len(stand_in.requests["AppStop"]) == 1
