"""`python -m weight_sync {serve,publish,status,check}`: the commands of the weight service.

Owns arguments, signals and the port file. Must not know formats or the store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
from pathlib import Path

from contracts.errors import exits_politely
from contracts.rpc import read_token
from contracts.runfile import read_resolved, validate_section
from weight_sync import client, durable
from weight_sync.config import WeightsConfig
from weight_sync.service import serving
from weight_sync.store import VersionStore


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weight-sync", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="keep versions and hand them to samplers")
    serve.add_argument("--store", type=Path, required=True, metavar="DIR")
    serve.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    serve.add_argument("--token-file", type=Path, metavar="FILE")
    serve.add_argument("--port-file", type=Path, help="where to write the port once listening")
    serve.add_argument("--config", type=Path, metavar="FILE", help="run file or run record")

    publish = commands.add_parser("publish", help="publish a BF16 checkpoint directory")
    publish.add_argument("directory", type=Path)
    publish.add_argument("--version", type=int, required=True)
    publish.add_argument("--address", required=True, metavar="HOST:PORT")
    publish.add_argument("--token-file", type=Path, metavar="FILE")

    status = commands.add_parser("status", help="what the service holds, as JSON")
    status.add_argument("--address", required=True, metavar="HOST:PORT")
    status.add_argument("--token-file", type=Path, metavar="FILE")

    check = commands.add_parser("check", help="validate [weights] and print it resolved, as JSON")
    check.add_argument("--config", type=Path, required=True, metavar="FILE")
    return parser.parse_args()


def _read_config(path: Path | None) -> WeightsConfig:
    sections = read_resolved(path) if path else {}
    return validate_section(WeightsConfig, "weights", sections.get("weights", {}))


async def _serve(arguments: argparse.Namespace, config: WeightsConfig, token: str) -> None:
    store = VersionStore(arguments.store)
    try:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        async with serving(store, config, address=arguments.listen, token=token) as (_, port):
            if arguments.port_file:
                durable.write_text(arguments.port_file, f"{port}\n")
            logging.info("weight service on port %d, version %d", port, store.latest)
            await stopped.wait()
    finally:
        store.close()


@exits_politely
def main() -> None:
    arguments = _arguments()
    if arguments.command == "check":
        config = _read_config(arguments.config)
        print(json.dumps({"weights": config.model_dump(mode="json")}, indent=2, sort_keys=True))
        return
    token = read_token(arguments.token_file)
    if arguments.command == "serve":
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        asyncio.run(_serve(arguments, _read_config(arguments.config), token))
    elif arguments.command == "publish":
        client.publish(arguments.address, token, arguments.directory, arguments.version)
        print(f"version {arguments.version} is published")
    else:
        reply = client.status(arguments.address, token)
        print(
            json.dumps(
                {
                    "latest_version": reply.latest_version,
                    "versions": list(reply.versions),
                    "latest_by_format": dict(reply.latest_by_format),
                    "bytes_published": reply.bytes_published,
                    "bytes_fetched": reply.bytes_fetched,
                },
                indent=2,
            )
        )


if __name__ == "__main__":
    main()
