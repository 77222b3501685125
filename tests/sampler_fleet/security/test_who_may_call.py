"""Who may call what: without a token, with a role's, without TLS, with too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts import codec, rpc
from contracts.credentials import Credentials, Token
from contracts.pb import (
    fleet_pb2,
    rollout_pb2,
    weights_pb2,
    weights_pb2_grpc,
)
from tests.contracts.certificates import make_certificates, tls
from tests.sampler_fleet.fakes import (
    TOKEN,
    collect,
    make_request,
    make_trajectory,
)
from tests.sampler_fleet.security.calls import (
    BY_NAME,
    CALLS,
    EXPECTED,
    ROLES,
    SAMPLERS,
    Code,
    all_services,
    answer,
    bearer,
    raw_channel,
)

each_call = pytest.mark.parametrize("call", CALLS, ids=str)

# What a role may do, said a second time: a change of the table is to be a decision.
ALLOWED = {
    "sampler": {
        "fleet.v1.Fleet/Join",
        "weights.v1.Weights/Watch",
        "weights.v1.Weights/Chain",
        "weights.v1.Weights/Fetch",
    },
    "trainer": {
        "fleet.v1.Fleet/Status",
        "fleet.v1.Fleet/ReportUpdate",
        "rollout.v1.Rollout/Generate",
        "rollout.v1.Rollout/EndSession",
        "rollout.v1.Rollout/StreamGroups",
        "rollout.v1.Rollout/AckGroups",
        "rollout.v1.Rollout/Watch",
        "rollout.v1.Rollout/Evaluate",
        "weights.v1.Weights/Publish",
        "weights.v1.Weights/Status",
    },
    "all": set(BY_NAME),
}


@each_call
async def test_a_call_without_this_servers_token_is_refused(tmp_path, call):
    async with all_services(tmp_path) as (_, address), raw_channel(address) as channel:
        for given in (
            (),
            bearer(""),
            bearer("another-token-altogether"),
            bearer(TOKEN[:-1]),
            bearer(TOKEN + " "),
            bearer(f"sampler {SAMPLERS}"),
            (("authorization", TOKEN),),
            (("authorization", f"Basic {TOKEN}"),),
            (("Authorization-".lower(), f"Bearer {TOKEN}"),),
        ):
            code, details = await answer(channel, call, metadata=given)
            assert code == Code.UNAUTHENTICATED, (given, code, details)
            assert TOKEN not in details


@each_call
async def test_a_role_may_call_what_stands_in_the_table_only(tmp_path, call):
    name = call.path.removeprefix("/")
    async with all_services(tmp_path) as (_, address), raw_channel(address) as channel:
        for role, token in ROLES.items():
            code, details = await answer(channel, call, metadata=bearer(token), timeout_s=0.4)
            assert code != Code.UNAUTHENTICATED
            refused = code == Code.PERMISSION_DENIED
            assert refused == (name not in ALLOWED[role]), (role, code, details)
            assert not refused or (call.path in details and role in details)


async def test_a_stolen_samplers_token_reads_and_changes_nothing(tmp_path):
    async with all_services(tmp_path) as (gateway, address), raw_channel(address) as channel:
        await gateway.start_ready_sampler("big-0")
        await gateway.spool.append("a", [make_trajectory("a")])
        header = weights_pb2.PublishHeader(
            version=1, files=[weights_pb2.FileEntry(name="config.json")]
        )
        for name, message in (
            ("rollout.v1.Rollout/StreamGroups", rollout_pb2.StreamGroupsRequest()),
            ("rollout.v1.Rollout/AckGroups", rollout_pb2.AckGroupsRequest(sequence=1, taken=1)),
            ("rollout.v1.Rollout/Generate", codec.generate_to_pb(make_request())),
            ("weights.v1.Weights/Publish", weights_pb2.PublishRequest(header=header)),
            ("fleet.v1.Fleet/DrainSampler", fleet_pb2.DrainRequest(sampler_id="big-0")),
            ("fleet.v1.Fleet/Status", fleet_pb2.StatusRequest()),
        ):
            code, details = await answer(
                channel, BY_NAME[name], [message.SerializeToString()], metadata=bearer(SAMPLERS)
            )
            assert code == Code.PERMISSION_DENIED, (name, details)
        assert gateway.spool.count() == 1 and gateway.producer.backlog == 1
        assert gateway.phase("big-0") == "ready"
        status = weights_pb2_grpc.WeightsStub(channel).Status(
            weights_pb2.StatusRequest(), metadata=bearer(TOKEN)
        )
        assert (await status).latest_version == 0


@each_call
async def test_another_ca_and_plain_text_get_no_answer(authorities, tmp_path, call):
    ours, others = authorities
    credentials = Credentials(token=Token(TOKEN), tls=tls(ours, "gateway", ca=False))
    async with all_services(tmp_path, credentials, host="localhost") as (_, address):
        for ca in (others, None):
            client = Credentials(token=Token(TOKEN), tls=tls(ca) if ca else None)
            async with rpc.aio_channel(address, client, add_token=False) as channel:
                code, details = await answer(channel, call, metadata=bearer(TOKEN))
                assert code == Code.UNAVAILABLE, (code, details)
        async with rpc.aio_channel(address, Credentials(tls=tls(ours))) as channel:
            code, details = await answer(channel, call)
            assert code == Code.UNAUTHENTICATED, details


@pytest.fixture(scope="module")
def authorities(tmp_path_factory) -> tuple[Path, Path]:
    """Certificates of two CAs under the same names."""
    place = tmp_path_factory.mktemp("tls")
    return make_certificates(place / "ours"), make_certificates(place / "others")


async def test_messages_beyond_the_limit_are_refused(tmp_path):
    large = b"\0" * (rpc.MAX_MESSAGE_BYTES + 1)
    async with all_services(tmp_path) as (gateway, address), raw_channel(address) as channel:
        await gateway.start_ready_sampler("big-0")
        for call in CALLS:
            code, details = await answer(channel, call, [large], timeout_s=20)
            assert code == Code.UNAUTHENTICATED, (call, details)
            code, details = await answer(
                channel, call, [large], metadata=bearer(TOKEN), timeout_s=20
            )
            assert code == Code.RESOURCE_EXHAUSTED, (call, code, details)
        assert (await collect(gateway.fleet, make_request()))[0].tokens.tolist() == EXPECTED
