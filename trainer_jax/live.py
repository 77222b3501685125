"""The run as it is watched in a terminal: a live table, or plain lines where there is no terminal.

Owns layout and wording. Must not decide anything about the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainer_jax.metrics import Record

SHOWN_UPDATES = 8


def number(value: float | int | None, digits: int = 3) -> str:
    """A value for a table cell; a dash where there is none."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if value and abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:,.{digits}f}"


class LiveView:
    """Shows a phase, a status line, the last updates and the sampler groups."""

    def __init__(self, groups: Sequence[str], num_updates: int, console: Console) -> None:
        self._groups = groups
        self._num_updates = num_updates
        self._console = console
        self._records: list[Record] = []
        self._phase = ""
        self._status: dict[str, str] = {}
        self._live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=2)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def phase(self, text: str) -> None:
        """What the run is doing now; a line of its own where there is no terminal."""
        if text != self._phase:
            self._phase = text
            if not self._live:
                self._console.print(text, highlight=False, markup=False)

    def say(self, text: str) -> None:
        """Something worth keeping above the table: a restart, an alarm, a checkpoint."""
        self._console.print(text, highlight=False, markup=False)

    def status(self, **values: str) -> None:
        """Replaces parts of the status line; only the live table shows it."""
        self._status |= values

    def show(self, record: Record) -> None:
        """Adds an update."""
        self._records.append(record)
        if not self._live:
            self._console.print(self._line(record), highlight=False, markup=False, soft_wrap=True)

    def _line(self, record: Record) -> str:
        kl = " ".join(
            f"{name} {number(record[f'group/{name}/kl'], 4)}"
            for name in self._groups
            if record.get(f"group/{name}/kl") is not None
        )
        return (
            f"update {record['step']}/{self._num_updates}"
            f"  reward {number(record.get('reward'))}  kl {number(record.get('kl'), 4)}"
            f"  out of band {number(record.get('share_out_of_band'), 4)}"
            f"  entropy {number(record.get('entropy'))}  grad {number(record.get('grad_norm'))}"
            f"  staleness {number(record.get('staleness/mean'), 1)}"
            f"  version {record.get('version')}"
            f"  tokens/s {number(record.get('tokens_per_second/sampled'), 0)}"
            f"  in flight {number(record.get('fleet/episodes_in_flight'))}  [kl: {kl}]"
        )

    def _render(self) -> RenderableType:
        head = Text(self._phase, style="bold")
        status = Text("  ".join(f"{name} {text}" for name, text in self._status.items()), "dim")
        if not self._records:
            return Group(head, status)
        return Group(head, self._updates(), self._fleet(), status)

    def _updates(self) -> Table:
        columns = {
            "step": lambda r: f"{r['step']}/{self._num_updates}",
            "reward": lambda r: number(r.get("reward")),
            "kl": lambda r: number(r.get("kl"), 4),
            "out of band": lambda r: number(r.get("share_out_of_band"), 4),
            "entropy": lambda r: number(r.get("entropy")),
            "grad norm": lambda r: number(r.get("grad_norm")),
            "staleness": lambda r: number(r.get("staleness/mean"), 1),
            "version": lambda r: str(r.get("version", "-")),
            "tokens/s": lambda r: number(r.get("tokens_per_second/sampled"), 0),
            "in flight": lambda r: number(r.get("fleet/episodes_in_flight")),
            "seconds": lambda r: number(r.get("time/step"), 1),
        }
        table = Table(*columns, box=None, pad_edge=False)
        for record in self._records[-SHOWN_UPDATES:]:
            table.add_row(*(cell(record) for cell in columns.values()))
        return table

    def _fleet(self) -> Table:
        last = self._records[-1]
        table = Table("group", "samples", "kl", "out of band", "reward", box=None, pad_edge=False)
        for name in self._groups:
            table.add_row(
                name,
                number(last.get(f"group/{name}/share_of_samples"), 2),
                number(last.get(f"group/{name}/kl"), 4),
                number(last.get(f"group/{name}/share_out_of_band"), 4),
                number(last.get(f"group/{name}/reward"), 2),
            )
        return table
