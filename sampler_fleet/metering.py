"""What the samplers of a live fleet have cost, over restarts of the gateway.

Owns which accelerators are held now and the file the account is kept in. Prices and their integral
are `cost.py`'s. Must not read a clock.

A group holds the larger of the samplers that are connected and those its provider says it holds:
providers bill while a sampler loads. While the gateway is away the account runs on with what was
held last.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from contracts.errors import BadInputError
from contracts.files import replacing
from sampler_fleet.config import FleetConfig
from sampler_fleet.cost import Cost, CostMeter, Price, dollars
from sampler_fleet.registry import Sampler, SamplerPhase

_EPOCH = datetime.fromtimestamp(0, UTC)


class Metering:
    """GPU-hours and dollars by group. Times are POSIX seconds."""

    def __init__(self, config: FleetConfig, now: float, path: Path | None = None) -> None:
        """`path` keeps the account.

        Raises:
            BadInputError: `path` holds something else, or a price table begins in the future.
        """
        self._config = config
        self._path = path
        self._meter = CostMeter({g.name: config.prices_of(g) for g in config.groups})
        for prices in self._meter.prices.values():
            if prices:
                dollars(prices, now, now, 0)
        if path and path.exists():
            try:
                self._meter.restore(json.loads(path.read_text()))
            except ValueError as error:
                raise BadInputError(
                    f"account of costs {path}",
                    expected="the JSON of a gateway",
                    found=str(error).partition("\n")[0],
                ) from None

    def hold(self, samplers: Iterable[Sampler], held: Mapping[str, int], now: float) -> None:
        """From now on these are held: the live ones of `samplers`, or more, as providers say.

        A sampler that told a price of its own is an account of its own.
        """
        live: Counter[str] = Counter()
        accounts: Counter[str] = Counter(dict.fromkeys(self._meter.accounts, 0))
        for sampler in samplers:
            if sampler.phase == SamplerPhase.LOST:
                continue
            group = self._config.group(sampler.info.group)
            live[group.name] += 1
            price = sampler.info.price_per_hour
            if price is None:
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

    def save(self, now: float) -> None:
        """Writes the account, if it has a file."""
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as aside:
                aside.write_text(json.dumps(self._meter.state(now)))
