"""`python -m sampler_fleet`: the gateway, a sampler, and the small commands around them.

Owns the command line and which concrete adapter stands behind each port. Imports of engines and
sandboxes are inside the commands: the gateway runs without torch, a sampler without sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from contracts.credentials import read_credentials
from contracts.errors import EXIT_DIRTY, DirtyProcessError, exits_politely
from contracts.logs import log_to_stderr
from sampler_fleet.episodes.base import Environment
from sampler_fleet.episodes.tasks.cli import app as tasks_app
from sampler_fleet.process import die_with_parent
from sampler_fleet.providers.modal_config import check_has_modal

if TYPE_CHECKING:
    from rich.console import Console


log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0  # for calls in progress when the gateway stops

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)
app.add_typer(tasks_app, name="tasks")

Config = Annotated[Path, typer.Option(help="Run file (.toml) or resolved run record (.json).")]
Gateway = Annotated[str, typer.Option(help="The gateway's HOST:PORT.")]
StateDir = Annotated[Path, typer.Option(help="What this process keeps over restarts.")]
DieWithParent = Annotated[
    bool, typer.Option("--die-with-parent", help="Stop when the process that started this ends.")
]
ProviderName = Annotated[Literal["modal"], typer.Argument(help="Where to.")]
RunFile = Annotated[Path, typer.Argument(help="Run file (.toml) or resolved run record (.json).")]
AppName = Annotated[str, typer.Option(help="Another app than the run file's fleet.modal.app.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the bearer token of the run.")]
TlsCa = Annotated[Path | None, typer.Option(help="PEM file of the CA that verifies the peers.")]
TlsCert = Annotated[Path | None, typer.Option(help="PEM file of this process's certificate.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")]


def main() -> None:
    app()


@app.command()
@exits_politely
def serve(  # noqa: PLR0913 (a command line)
    config: Config,
    state_dir: StateDir,
    checkpoint: Annotated[Path, typer.Option(help="Any checkpoint of the run's policy.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 picks one.")] = "127.0.0.1:0",
    weights: Annotated[str, typer.Option(help="The weight service, as samplers reach it.")] = "",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    port_file: Annotated[Path | None, typer.Option(help="Gets the bound port.")] = None,
    web: Annotated[str, typer.Option(help="HOST:PORT of a live page; none if not given.")] = "",
    web_port_file: Annotated[Path | None, typer.Option(help="Gets the page's port.")] = None,
    openai: Annotated[
        str, typer.Option(help="HOST:PORT of the OpenAI-compatible endpoint; none if not given.")
    ] = "",
    openai_port_file: Annotated[Path | None, typer.Option(help="Gets the endpoint's port.")] = None,
    with_parent: DieWithParent = False,
) -> None:
    """The gateway: routes sessions to samplers, runs episodes, keeps their trajectories."""
    if with_parent:
        die_with_parent()
    from sampler_fleet.gateway_process import run_gateway

    log_to_stderr("gateway")
    asyncio.run(
        run_gateway(
            config,
            state_dir=state_dir,
            checkpoint=checkpoint,
            listen=listen,
            weights=weights,
            credentials=read_credentials(
                token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key
            ),
            port_file=port_file,
            web=web,
            web_port_file=web_port_file,
            openai=openai,
            openai_port_file=openai_port_file,
        )
    )


@app.command()
@exits_politely
def join(  # noqa: PLR0913 (a command line)
    config: Config,
    gateway: Gateway,
    weights: Annotated[str, typer.Option(help="The weight service's HOST:PORT.")],
    group: Annotated[str, typer.Option(help="The group it belongs to, as in the run file.")],
    sampler_id: Annotated[str, typer.Option(help="Unique in the run, kept over restarts.")],
    state_dir: StateDir,
    price_per_hour: Annotated[
        float | None, typer.Option(help="US dollars, where the run file's price is not the one.")
    ] = None,
    metrics: Annotated[str, typer.Option(help="HOST:PORT of its metrics; none if not given.")] = "",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    with_parent: DieWithParent = False,
) -> int:
    """A sampler: loads weights into its group's engine, dials out, serves its group."""
    if with_parent:
        die_with_parent()
    from sampler_fleet.sampler_process import run_sampler

    log_to_stderr(sampler_id)
    try:
        asyncio.run(
            run_sampler(
                config,
                gateway=gateway,
                weights=weights,
                group_name=group,
                sampler_id=sampler_id,
                state_dir=state_dir,
                price_per_hour=price_per_hour,
                metrics=metrics,
                credentials=read_credentials(
                    token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key
                ),
            )
        )
    except DirtyProcessError as error:
        log.error("this process is to be replaced: %s", error)
        return EXIT_DIRTY
    return 0


@app.command()
@exits_politely
def autoscale(  # noqa: PLR0913 (a command line)
    config: Config,
    gateway: Gateway,
    weights: Annotated[str, typer.Option(help="The weight service's HOST:PORT.")],
    state_dir: StateDir,
    token_file: TokenFile = None,
    sampler_token_file: Annotated[
        Path | None, typer.Option(help="Token of the samplers it starts; its own if not given.")
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    with_parent: DieWithParent = False,
) -> None:
    """The autoscaler: starts and stops samplers, as many as the trainer needs."""
    if with_parent:
        die_with_parent()
    from sampler_fleet.autoscaler_process import run_autoscaler

    log_to_stderr("autoscaler")
    files = {
        "--token-file": sampler_token_file or token_file,
        "--tls-ca": tls_ca,
        "--tls-cert": tls_cert,
        "--tls-key": tls_key,
    }
    given = [str(part) for option, path in files.items() if path for part in (option, path)]
    asyncio.run(
        run_autoscaler(
            config,
            gateway=gateway,
            state_dir=state_dir,
            credentials=read_credentials(
                token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key
            ),
            join_options=("--gateway", gateway, "--weights", weights, *given),
        )
    )


@app.command()
@exits_politely
def status(
    gateway: Gateway,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    every: Annotated[float, typer.Option(help="Seconds between updates; 0 shows it once.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Once, for machines.")] = False,
) -> None:
    """A live table of groups and samplers."""
    from rich.console import Console

    from sampler_fleet.status import show

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file has no width, and the tables need one
    credentials = read_credentials(token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    show(gateway, credentials, every_seconds=every, console=console, as_json=as_json)


@app.command()
@exits_politely
def drain(
    gateway: Gateway,
    sampler_id: Annotated[str, typer.Option(help="Which sampler.")],
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Lets a sampler finish what it runs, then leave."""
    from contracts import rpc
    from contracts.pb import fleet_pb2, fleet_pb2_grpc

    credentials = read_credentials(token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    with rpc.sync_channel(gateway, credentials) as channel, rpc.calling(gateway):
        fleet_pb2_grpc.FleetStub(channel).DrainSampler(
            fleet_pb2.DrainRequest(sampler_id=sampler_id), timeout=rpc.DEADLINE_S
        )


@app.command()
@exits_politely
def check(config: Config) -> None:
    """Validates the fleet's sections of a run file and prints them resolved, as JSON."""
    from sampler_fleet.config import read_settings

    print(json.dumps(read_settings(config).to_dict(), indent=2, sort_keys=True))


@app.command("deploy")
@exits_politely
def deploy_groups(
    provider: ProviderName,
    config: RunFile,
    name: AppName = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allows tokens and samples to travel without TLS.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prints and checks everything; needs no account.")
    ] = False,
) -> None:
    """Deploys the groups of a provider elsewhere: their samplers start there and dial in."""
    check_has_modal()
    from sampler_fleet.providers.modal_deploy import deploy, read_deployment

    deploy(read_deployment(config, name), _console(), insecure=insecure, dry_run=dry_run)


@app.command("undeploy")
@exits_politely
def undeploy_groups(provider: ProviderName, config: RunFile, name: AppName = "") -> None:
    """Stops what `deploy` started, all samplers at once."""
    check_has_modal()
    from sampler_fleet.providers.modal_deploy import read_deployment, undeploy

    undeploy(read_deployment(config, name), _console())


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)  # a file has no width


@app.command("simulate")
@exits_politely
def run_simulations(
    scenarios: Annotated[list[Path], typer.Argument(help="Scenario files (.toml).")],
    out: Annotated[Path | None, typer.Option(help="Directory for figures and JSON.")] = None,
) -> None:
    """Days of load on a simulated fleet, in seconds: use, staleness, cost; several are compared."""
    from rich.console import Console

    from sampler_fleet.simulate.report import run_scenarios

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    run_scenarios(scenarios, out, console)


@app.command()
@exits_politely
def demonstrations(
    out: Annotated[Path, typer.Option(help="The .npz file to write.")],
    tokenizer: Annotated[Path, typer.Option(help="Directory with the tokenizer's files.")],
    num: Annotated[int, typer.Option(help="Episodes.")],
    seed: Annotated[int, typer.Option()] = 0,
    environment: Annotated[
        Environment, typer.Option(help="What the episodes are about, as in [tasks].")
    ] = "code",
) -> None:
    """Scripted episodes for the supervised warm start."""
    from sampler_fleet.episodes.tasks.demonstrations import write_demonstrations

    write_demonstrations(out, tokenizer, num, seed, environment=environment)


@app.command("tokenizer")
@exits_politely
def write_tokenizer_files(out: Annotated[Path, typer.Option(help="Directory to write.")]) -> None:
    """The demo policy's tokenizer and chat template."""
    from sampler_fleet.episodes.tokenizer import write_tokenizer

    write_tokenizer(out)


if __name__ == "__main__":
    main()
