"""The gateway's process: everything it is made of, from start to end.

Owns which concrete adapter stands behind each of the gateway's ports, and the order in which they
come and go. Must not import an engine: the gateway runs without torch.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from pathlib import Path
from typing import Any

from contracts.credentials import Credentials
from contracts.rpc import start_server
from contracts.types import Trajectory
from sampler_fleet.config import Settings
from sampler_fleet.episodes.agent import run_episode
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.chat import ChatFormat
from sampler_fleet.episodes.containers.grading import GraderByTask
from sampler_fleet.episodes.containers.pool import ContainerPool, SandboxesByTask
from sampler_fleet.episodes.grading import Grader
from sampler_fleet.episodes.sandbox import SandboxPool
from sampler_fleet.episodes.tasks.choose import choose_tasks
from sampler_fleet.fingerprint import identify_checkpoint
from sampler_fleet.fleet import Fleet
from sampler_fleet.gateway import add_services
from sampler_fleet.live_settings import LiveFile
from sampler_fleet.metering import Metering
from sampler_fleet.openai.app import serving_openai
from sampler_fleet.openai.groups import Groups, Limits
from sampler_fleet.openai.session import Policy
from sampler_fleet.process import run_until_stopped, write_port_file
from sampler_fleet.producer import Producer
from sampler_fleet.snapshot import fleet_status
from sampler_fleet.spool import Spool
from sampler_fleet.web.app import serving_page

log = logging.getLogger(__name__)

FOLLOW_S = 5.0  # between looks at the run file
STOP_GRACE_S = 1.0  # for calls in progress when the gateway stops


async def run_gateway(  # noqa: PLR0913 (a command line)
    config: Path,
    *,
    state_dir: Path,
    checkpoint: Path,
    listen: str,
    weights: str,
    credentials: Credentials,
    port_file: Path | None,
    web: str,
    web_port_file: Path | None,
    openai: str = "",
    openai_port_file: Path | None = None,
) -> None:
    """Serves until SIGTERM. `weights` is the weight service as samplers reach it; `web` the
    HOST:PORT of the live page, or nothing; `openai` that of the OpenAI-compatible endpoint.

    Raises:
        BadInputError: a bad run file, checkpoint or address.
        ConflictError: another gateway has this state directory.
        OSError: the disk of the trajectory log is full.
    """
    live = LiveFile(config)
    settings = live.settings
    episodes = settings.episodes
    metering = Metering(settings.fleet, time.time(), state_dir / "cost.json")
    identity = identify_checkpoint(checkpoint)
    fleet = Fleet(settings.fleet, identity, metering=metering)
    most = episodes.num_sandboxes or episodes.max_concurrent + episodes.max_concurrent_evaluation
    sandboxes = SandboxPool(most, episodes.sandbox)
    examination_rooms = SandboxPool(episodes.num_graders, episodes.sandbox)
    containers = ContainerPool(episodes.sandbox, most + episodes.num_graders)
    owner = f"model {identity.model_fingerprint} and tokenizer {identity.tokenizer_fingerprint}"
    spool = Spool(state_dir / "groups.sqlite", owner=owner)
    chat = episodes.agent.load_chat(checkpoint)
    places = SandboxesByTask(sandboxes, containers)
    grader = GraderByTask(examination_rooms, episodes.grading, containers=containers)
    producer = _producer(settings, chat, fleet, places, grader, spool)
    groups = _openai_groups(settings, chat, fleet, spool, producer)
    try:
        services = functools.partial(
            add_services, fleet=fleet, spool=spool, producer=producer, weights_address=weights
        )
        server, port = await start_server(listen, credentials, services)
        try:
            write_port_file(port_file, port)
            log.info("listening on port %d; %d groups kept", port, spool.count())
            async with (
                serving_page(
                    web,
                    web_port_file,
                    status_now=functools.partial(fleet_status, fleet, spool, producer),
                    drain=lambda sampler_id: fleet.drain(sampler_id, "asked to on the web page"),
                    credentials=credentials,
                ),
                serving_openai(
                    openai,
                    openai_port_file,
                    groups,
                    max_context_tokens=episodes.limits.max_context_tokens,
                    credentials=credentials,
                ),
            ):
                prices = follow_prices(live, fleet)
                jobs = (fleet.keep_leases(), producer.run(), groups.run(), prices)
                work = asyncio.ensure_future(_first_failure(*jobs))
                await run_until_stopped(work, work.cancel)
        finally:
            fleet.stop()
            spool.stop()
            await server.stop(STOP_GRACE_S)
            metering.close(time.time())
    finally:
        await sandboxes.close()
        await examination_rooms.close()
        await containers.close()
        spool.close()


async def follow_prices(live: LiveFile, fleet: Fleet, *, every_s: float = FOLLOW_S) -> None:
    """Prices that are edited in mid-run hold from then on; why an edit is left out, the status
    says."""
    while True:
        await asyncio.sleep(every_s)
        live.follow(lambda settings: fleet.metering.reprice(settings.fleet, time.time()))
        fleet.problems["gateway"] = live.problem


def _producer(
    settings: Settings,
    chat: ChatFormat,
    fleet: Fleet,
    places: SandboxesByTask,
    grader: Grader,
    spool: Spool,
) -> Producer:
    episodes, tasks = settings.episodes, settings.tasks

    async def play(task: Task, **arguments: Any) -> Trajectory:
        return await run_episode(task, sandboxes=places.of(task), **arguments)

    return Producer(
        episodes,
        tasks=choose_tasks(
            tasks,
            tree_limit=episodes.sandbox.tree_bytes,
            no_containers=places.no_containers,
        ),
        sampling=settings.sampling.params(),
        run_episode=functools.partial(
            play,
            generator=fleet,
            chat=chat,
            agent=episodes.agent,
            counters=fleet.counters,
            grader=grader,
            limits=episodes.limits,
        ),
        open_session=fleet.session,
        spool=spool,
        seed=tasks.seed,
    )


def _openai_groups(
    settings: Settings, chat: ChatFormat, fleet: Fleet, spool: Spool, producer: Producer
) -> Groups:
    episodes = settings.episodes
    return Groups(
        Policy(
            generate=fleet.generate,
            end_session=fleet.end_session,
            chat=chat,
            with_tool=episodes.agent.mode == "tool",
            sampling=settings.sampling.params(),
            limits=episodes.limits,
        ),
        spool,
        Limits(
            group_size=episodes.group_size,
            idle_s=settings.fleet.session_idle_seconds,
            is_behind=lambda: producer.backlog >= episodes.queue_groups,
        ),
        seed=settings.tasks.seed,
        counters=fleet.counters,
        new_id=lambda: secrets.token_hex(8),
    )


async def _first_failure(*jobs) -> None:
    """Runs jobs that never end; the first to fail ends all, with its own exception."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
