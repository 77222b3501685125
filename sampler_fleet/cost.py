"""What samplers cost: GPU-hours and dollars, by group, from dated prices.

Owns the price table's model and the meter. Pure state: every method takes `now`, in POSIX seconds;
nothing here reads a clock or asks a provider what it billed.

Dollars of a group are the integral of its accelerators times the price in force at each moment,
from the moment a sampler is asked for (providers bill while it loads) until it is gone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, field_validator

from contracts.errors import BadInputError
from contracts.runfile import Section

HOUR_S = 3600.0
LAST_S = 253_402_300_800.0  # the end of the year 9999: later is no date


class Price(Section):
    """US dollars per accelerator and hour from `since` on (UTC), and who says so."""

    per_hour: float = Field(ge=0, allow_inf_nan=False)
    since: datetime
    source: str = Field(min_length=1)

    @field_validator("since")
    @classmethod
    def _in_utc(cls, since: datetime) -> datetime:
        return since.astimezone(UTC) if since.tzinfo else since.replace(tzinfo=UTC)


def _of_different_moments(prices: tuple[Price, ...]) -> tuple[Price, ...]:
    moment, num = Counter(p.since for p in prices).most_common(1)[0] if prices else (None, 0)
    if num > 1:
        raise ValueError(f"one price from each moment on, not {num} since {moment:%Y-%m-%d %H:%M}")
    return prices


Prices = Annotated[tuple[Price, ...], AfterValidator(_of_different_moments)]


def price_at(prices: Sequence[Price], now: float) -> Price | None:
    """The newest price that is in force; None before the first."""
    in_force = [price for price in prices if price.since.timestamp() <= now]
    return max(in_force, key=lambda price: price.since, default=None)


def check_in_force(prices: Sequence[Price], now: float, *, table: str = "price table") -> None:
    """BadInputError when `now` lies before the first price; `table` says whose prices they are."""
    if price_at(prices, now) is None:
        first = min((price.since.date().isoformat() for price in prices), default="never")
        raise BadInputError(
            table,
            expected=f"a price in force on {datetime.fromtimestamp(now, UTC):%Y-%m-%d}",
            found=f"the first since {first}",
        )


def dollars(prices: Sequence[Price], start: float, end: float, num_accelerators: int) -> float:
    """What accelerators cost from `start` to `end`, over every change of price in between.

    Raises:
        BadInputError: `start` lies before the first price.
    """
    check_in_force(prices, start)
    changes = sorted(t for price in prices if start < (t := price.since.timestamp()) < end)
    edges = [start, *changes, end]
    total = 0.0
    for left, right in itertools.pairwise(edges):
        price = price_at(prices, left)
        assert price is not None, "prices stay in force until the next"
        total += price.per_hour * num_accelerators * (right - left) / HOUR_S
    return total


@dataclass(frozen=True, kw_only=True)
class Cost:
    """GPU-hours, and the dollars they cost; None where a group has no price."""

    gpu_hours: float
    dollars: float | None

    def __add__(self, other: Cost) -> Cost:
        gpu_hours = self.gpu_hours + other.gpu_hours
        if self.dollars is None or other.dollars is None:
            return Cost(gpu_hours=gpu_hours, dollars=None)
        return Cost(gpu_hours=gpu_hours, dollars=self.dollars + other.dollars)

    def __sub__(self, earlier: Cost) -> Cost:
        gpu_hours = self.gpu_hours - earlier.gpu_hours
        if self.dollars is None or earlier.dollars is None:
            return Cost(gpu_hours=gpu_hours, dollars=None)
        return Cost(gpu_hours=gpu_hours, dollars=self.dollars - earlier.dollars)


@dataclass
class _Account:
    num_accelerators: int
    since: float
    gpu_seconds: float = 0.0
    dollars: float = 0.0


class _Saved(Section):
    num_accelerators: int = Field(ge=0)
    since: float = Field(ge=0, lt=LAST_S)
    gpu_seconds: float = Field(ge=0, allow_inf_nan=False)
    dollars: float = Field(ge=0, allow_inf_nan=False)
    prices: tuple[Price, ...]


_STATE = TypeAdapter(dict[str, _Saved])


@dataclass
class CostMeter:
    """Cumulated cost by group. The cost of an update is the difference of two readings."""

    prices: dict[str, Sequence[Price]]  # by group; none: only GPU-hours are counted
    _accounts: dict[str, _Account] = field(default_factory=dict)

    def hold(self, group: str, num_accelerators: int, now: float) -> None:
        """From now on the group holds so many accelerators."""
        account = self._settle(group, now)
        account.num_accelerators = num_accelerators

    def reprice(self, prices: Mapping[str, Sequence[Price]], now: float) -> None:
        """From now on these are the prices of their groups; what was held before stays paid as it
        was."""
        for group in self._accounts:
            self._settle(group, now)
        self.prices.update(prices)

    def read(self, now: float) -> dict[str, Cost]:
        """What each group that ever held something has cost until now."""
        return {group: self._read(group, now) for group in self._accounts}

    @property
    def accounts(self) -> Collection[str]:
        """Groups that ever held something."""
        return self._accounts.keys()

    def state(self, now: float) -> dict[str, dict[str, Any]]:
        """Everything it knows, as JSON values."""
        return {
            group: asdict(self._settle(group, now))
            | {"prices": [price.model_dump(mode="json") for price in self.prices.get(group, ())]}
            for group in self._accounts
        }

    def restore(self, state: object) -> None:
        """Goes on from a `state`; prices it was not given now are those of then.

        Raises:
            ValueError: that is no state.
        """
        for group, saved in _STATE.validate_python(state).items():
            self._accounts[group] = _Account(**saved.model_dump(exclude={"prices"}))
            self.prices.setdefault(group, saved.prices)

    def release(self, now: float, *, most_s: float) -> None:
        """Nothing is held any more; what was counts until now, for at most so many seconds.

        Raises:
            BadInputError: that was before the first price.
        """
        for group, account in self._accounts.items():
            until = min(now, account.since + most_s)
            self.hold(group, 0, until)

    def _read(self, group: str, now: float) -> Cost:
        account = self._settle(group, now)
        priced = bool(self.prices.get(group))
        return Cost(
            gpu_hours=account.gpu_seconds / HOUR_S,
            dollars=account.dollars if priced else None,
        )

    def _settle(self, group: str, now: float) -> _Account:
        account = self._accounts.setdefault(group, _Account(num_accelerators=0, since=now))
        now = max(now, account.since)  # a clock that was set back costs nothing
        if account.num_accelerators and now > account.since:
            account.gpu_seconds += account.num_accelerators * (now - account.since)
            if prices := self.prices.get(group):
                account.dollars += dollars(prices, account.since, now, account.num_accelerators)
        account.since = now
        return account
