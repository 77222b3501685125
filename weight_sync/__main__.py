"""`python -m weight_sync {serve,publish,withdraw,status,check}`: commands of the weight service.

Owns arguments, signals and the port file. Must not know formats or the store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Any

from contracts.credentials import Credentials, read_credentials
from contracts.errors import exits_politely
from contracts.logs import log_to_stderr
from contracts.pb import weights_pb2
from contracts.runfile import read_resolved, validate_section
from weight_sync import client, durable
from weight_sync.config import WeightsConfig
from weight_sync.memory import keep_freed_memory
from weight_sync.service import serving
from weight_sync.store import VersionStore

log = logging.getLogger(__name__)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weight-sync", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="keep versions and hand them to samplers")
    serve.add_argument("--store", type=Path, required=True, metavar="DIR")
    serve.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    serve.add_argument("--port-file", type=Path, help="where to write the port once listening")
    serve.add_argument("--config", type=Path, metavar="FILE", help="run file or run record")

    publish = commands.add_parser("publish", help="publish a BF16 checkpoint directory")
    publish.add_argument("directory", type=Path)
    publish.add_argument("--version", type=int, required=True)
    publish.add_argument("--address", required=True, metavar="HOST:PORT")

    withdraw = commands.add_parser("withdraw", help="take back the newest version")
    withdraw.add_argument("--version", type=int, required=True, help="it must be the newest")
    withdraw.add_argument("--address", required=True, metavar="HOST:PORT")

    status = commands.add_parser("status", help="what the service holds, as JSON")
    status.add_argument("--address", required=True, metavar="HOST:PORT")

    for command in (serve, publish, withdraw, status):
        command.add_argument("--token-file", type=Path, metavar="FILE")
        command.add_argument("--tls-ca", type=Path, metavar="FILE", help="verifies the peers; PEM")
        command.add_argument("--tls-cert", type=Path, metavar="FILE", help="its certificate; PEM")
        command.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key")

    check = commands.add_parser("check", help="validate [weights] and print it resolved, as JSON")
    check.add_argument("--config", type=Path, required=True, metavar="FILE")
    return parser.parse_args()


def _read_config(path: Path | None) -> WeightsConfig:
    sections = read_resolved(path) if path else {}
    return validate_section(WeightsConfig, "weights", sections.get("weights", {}))


async def _serve(
    arguments: argparse.Namespace, config: WeightsConfig, credentials: Credentials
) -> None:
    store = VersionStore(arguments.store)
    try:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        async with serving(store, config, address=arguments.listen, credentials=credentials) as (
            _,
            port,
        ):
            if arguments.port_file:
                durable.write_text(arguments.port_file, f"{port}\n")
            log.info("weight service on port %d, version %d", port, store.latest)
            await stopped.wait()
    finally:
        store.close()


def _format_status(status: weights_pb2.FormatStatus) -> dict[str, Any]:
    return {
        "latest_version": status.latest_version,
        "num_watchers": status.num_watchers,
        "snapshot_bytes": status.snapshot_bytes,
        "convert_seconds": round(status.convert_seconds, 3),
        "delta_seconds": round(status.delta_seconds, 3),
        "bytes_fetched": status.bytes_fetched,
        "delta_bytes_fetched": status.delta_bytes_fetched,
        "deltas": {f"{d.base_version}-{d.version}": d.num_bytes for d in status.deltas},
    }


@exits_politely
def main() -> None:
    arguments = _arguments()
    if arguments.command == "check":
        config = _read_config(arguments.config)
        print(json.dumps({"weights": config.model_dump(mode="json")}, indent=2, sort_keys=True))
        return
    credentials = read_credentials(
        arguments.token_file,
        tls_ca=arguments.tls_ca,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
    )
    if arguments.command == "serve":
        log_to_stderr("weights")
        keep_freed_memory()
        asyncio.run(_serve(arguments, _read_config(arguments.config), credentials))
    elif arguments.command == "publish":
        client.publish(arguments.address, credentials, arguments.directory, arguments.version)
        print(f"version {arguments.version} is published")
    elif arguments.command == "withdraw":
        latest = client.withdraw(arguments.address, credentials, arguments.version)
        print(f"version {arguments.version} is withdrawn; the newest is {latest}")
    else:
        reply = client.status(arguments.address, credentials)
        print(
            json.dumps(
                {
                    "latest_version": reply.latest_version,
                    "versions": list(reply.versions),
                    "formats": {f.format: _format_status(f) for f in reply.formats},
                    "bytes_published": reply.bytes_published,
                    "bytes_fetched": reply.bytes_fetched,
                    "num_fetching": reply.num_fetching,
                    "bytes_per_second": reply.bytes_per_second,
                },
                indent=2,
            )
        )


if __name__ == "__main__":
    main()
