"""What the samplers of a live fleet have cost, over restarts of the gateway.

Owns which accelerators are held now and the file the account is kept in. Prices and their integral
are `cost.py`'s. Must not read a clock.

A group holds the larger of the samplers that are connected and those its provider says it holds:
providers bill while a sampler loads. A gateway that is told to end writes that nothing is held. One
that was killed held on for `lease_seconds` at most: samplers that lived are back by then, and
nobody saw what a longer absence cost.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from contracts.errors import BadInputError
from contracts.files import replacing
from sampler_fleet.config import FleetConfig
from sampler_fleet.cost import Cost, CostMeter, Price, check_in_force
from sampler_fleet.registry import Sampler, SamplerPhase

_EPOCH = datetime.fromtimestamp(0, UTC)


class Metering:
    """GPU-hours and dollars by group. Times are POSIX seconds."""

    def __init__(self, config: FleetConfig, now: float, path: Path | None = None) -> None:
        """`path` keeps the account.

        Raises:
            BadInputError: `path` holds something else, or what was held then had no price yet; a
                price table begins in the future.
        """
        self._config = config
        self._path = path
        self._meter = CostMeter(_tables(config, now))
        self._lock = threading.Lock()  # of the file
        self._is_closed = False
        if path and path.exists():
            try:
                self._meter.restore(json.loads(path.read_text()))
            except ValueError as error:
                raise BadInputError(
                    f"account of costs {path}",
                    expected="the JSON of a gateway",
                    found=str(error).partition("\n")[0],
                ) from None
            try:
                self._meter.release(now, most_s=config.lease_seconds)
            except BadInputError as error:
                raise BadInputError(
                    f"account of costs {path}",
                    expected="prices in the run file that reach back to it, or another --state-dir",
                    found=str(error),
                ) from None

    def reprice(self, config: FleetConfig, now: float) -> None:
        """From now on the prices of `config` hold; what was spent stays as it is.

        Raises:
            BadInputError: a price table begins in the future, or a group gets its first price or
                loses its last: dollars of a part of its hours would pass for those of all.
        """
        tables = _tables(config, now)
        for group, prices in tables.items():
            if bool(prices) != bool(self._meter.prices[group]):
                raise BadInputError(
                    f"run file in mid-run, prices of group {group}",
                    expected=f"{'none' if prices else 'some'}, as at the gateway's start",
                    found="some" if prices else "none",
                )
        self._meter.reprice(tables, now)

    def hold(self, samplers: Iterable[Sampler], held: Mapping[str, int], now: float) -> None:
        """From now on these are held: the live ones of `samplers`, or more, as providers say.

        A sampler that told a price of its own is an account of its own; what is no price of
        anything is as if it were not told.
        """
        live: Counter[str] = Counter()
        accounts: Counter[str] = Counter(dict.fromkeys(self._meter.accounts, 0))
        for sampler in samplers:
            if sampler.phase == SamplerPhase.LOST:
                continue
            group = self._config.group(sampler.info.group)
            live[group.name] += 1
            price = sampler.info.price_per_hour
            if price is None or not 0 <= price < math.inf:
                accounts[group.name] += group.num_accelerators
            else:
                account = f"{group.name}/{sampler.sampler_id}"
                self._meter.prices[account] = (
                    Price(
                        per_hour=price / group.num_accelerators,
                        since=_EPOCH,
                        source=sampler.sampler_id,
                    ),
                )
                accounts[account] += group.num_accelerators
        for group in self._config.groups:
            waiting = max(0, held.get(group.name, 0) - live[group.name])
            accounts[group.name] += waiting * group.num_accelerators
        for account, num in accounts.items():
            self._meter.hold(account, num, now)

    def read(self, now: float) -> dict[str, Cost]:
        """What each group has cost until now; dollars None where a part of it has no price."""
        costs: dict[str, Cost] = {}
        for account, cost in self._meter.read(now).items():
            if not cost.gpu_hours:
                continue
            name = account.partition("/")[0]
            known = costs.get(name, Cost(gpu_hours=0.0, dollars=0.0))
            costs[name] = known + cost
        free = Cost(gpu_hours=0.0, dollars=0.0)
        return {group.name: costs.get(group.name, free) for group in self._config.groups}

    def state(self, now: float) -> dict[str, Any]:
        """The account, as JSON values that change no more."""
        return self._meter.state(now)

    def write(self, state: Mapping[str, Any]) -> None:
        """Keeps a `state`, if there is a file. May run in another thread than all else."""
        with self._lock:
            if not self._is_closed:
                self._replace(state)

    def close(self, now: float) -> None:
        """The run ends and its samplers with it: nothing is held from now on, and this is the last
        that is written."""
        self.hold((), {}, now)
        state = self.state(now)
        with self._lock:
            self._is_closed = True
            self._replace(state)

    def _replace(self, state: Mapping[str, Any]) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as aside:
                aside.write_text(json.dumps(state))


def _tables(config: FleetConfig, now: float) -> dict[str, Sequence[Price]]:
    """Prices by group; BadInputError on a table that begins in the future."""
    tables: dict[str, Sequence[Price]] = {g.name: config.prices_of(g) for g in config.groups}
    for group, prices in tables.items():
        if prices:
            check_in_force(prices, now, table=f"run file, prices of group {group}")
    return tables
