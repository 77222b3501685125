"""The report in the terminal, and the columns that terminal and page share.

Owns their names, what they mean and how a cell is written. Must not compute what is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.mismatch_report.report import RATIO_EDGES, Row
from trainer_jax.live import number
from trainer_jax.summary import percent

_SHOWN_VERSIONS = 12


@dataclass(frozen=True)
class Column:
    """One number of a row."""

    title: str
    metric: str
    cell: Callable[[Any], str]
    meaning: str = ""  # where the title doesn't say it


COLUMNS = (
    Column("tokens", "num_tokens", lambda x: number(int(x))),
    Column("KL", "kl", lambda x: number(x, 5), "KL(sampler || trainer) per token, in nats"),
    Column("k3", "k3", lambda x: number(x, 5), "the same from the tokens drawn: r - 1 - log r"),
    Column("|dlogp|", "abs_dlogp", lambda x: number(x, 4), "mean |log r|, with r = p / q of the "
           "token drawn; p is the trainer's, q the sampler's"),
    Column("max", "abs_dlogp_max", lambda x: number(x, 2), "largest |log r|"),
    Column("E[r]", "ratio_mean", lambda x: number(x, 4), "mean ratio"),
    Column("right", "ratio_expected", lambda x: number(x, 4), "the E[r] of a right record"),
    Column("out of band", "share_out_of_band", lambda x: percent(x, 2),
           "share of tokens whose ratio is outside the group's band"),
    Column("agreement", "agreement", lambda x: number(x, 3),
           "correlation of log p and log q over the candidates"),
    Column("sigma", "sigmas", lambda x: number(x, 1), "how many standard deviations the tokens "
           "drawn are from what the record says of them"),
)  # fmt: skip


def last_versions(rows: Mapping[str, Row]) -> dict[str, Row]:
    """As many as a reader wants to see."""
    return dict(list(rows.items())[-_SHOWN_VERSIONS:])


def ratio_bins() -> list[str]:
    """The names of the histogram's bins."""
    edges = [f"{edge:g}" for edge in RATIO_EDGES]
    inner = [f"{low} .. {high}" for low, high in itertools.pairwise(edges)]
    return [f"< {edges[0]}", *inner, f"> {edges[-1]}"]


def band_of(report: Mapping[str, Any], group: str) -> str:
    """A group's band, as text."""
    low, high = report["bands"][group]
    return f"{low:g} .. {high:g}"


def show(console: Console, report: Mapping[str, Any]) -> None:
    """The report as tables, and at the end what matters."""

    def say(text: str) -> None:
        console.print(_plain(text))

    say(
        f"{report['source']}: {report['num_trajectories']:,} trajectories against "
        f"{report['checkpoint']}\ntemperature {report['temperature']:g}, "
        f"mask replay {'on' if report['replay'] else 'off'}"
    )
    groups = report["groups"]
    bands = [band_of(report, name) for name in groups]
    every = groups | {"all": report["overall"]}
    console.print(_rows("by sampler group", every, {"band": [*bands, ""]}))
    versions = last_versions(report["by_version"])
    console.print(_rows("by version of the weights drawn from", versions, {}))
    columns = [row["ratio_histogram"] for row in every.values()]
    console.print(
        _table(
            "ratio p / q", ["ratio", *every],
            (
                [name, *(percent(column[i] / sum(column), 2) for column in columns)]
                for i, name in enumerate(ratio_bins())
            ),
        )
    )  # fmt: skip
    if report["extremes"]:
        console.print(_extremes(report["extremes"]))
    for note in report["notes"]:
        say(f"- {note}")
    if report["refused"]["number"]:
        say(f"- the trainer refuses {report['refused']['number']}: {report['refused']['first']}")
    say("")
    for finding in report["findings"]:
        say(f"LIKELY CAUSE, {finding['subject']}: {finding['cause']}")
        say(f"  {finding['evidence']}\n  -> {finding['remedy']}")
    if report["verdict"]:
        say(report["verdict"])


def _rows(title: str, rows: Mapping[str, Row], more: Mapping[str, list[str]]) -> Table:
    numbers = [[c.cell(row[c.metric]) for c in COLUMNS] for row in rows.values()]
    extra = zip(*more.values(), strict=True) if more else [()] * len(rows)
    cells = zip(rows, numbers, extra, strict=True)
    head = ["", *(c.title for c in COLUMNS), *more]
    return _table(title, head, ([name, *own, *others] for name, own, others in cells))


def _extremes(extremes: Iterable[Mapping[str, Any]]) -> Table:
    return _table(
        "most extreme ratios of each group",
        ["group", "ratio", "log p", "log q", "sampler", "session", "position", "version", "token",
         "after"],
        (
            [x["group"], f"{x['ratio']:.3g}", f"{x['trainer_logp']:.2f}",
             f"{x['sampler_logp']:.2f}", x["sampler"], x["session"], str(x["position"]),
             str(x["version"]), repr(x["text"]), repr(x["before"][-30:])]
            for x in extremes
        ),
    )  # fmt: skip


def _table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(_plain(name))
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


def _plain(text: str) -> Text:
    """Names come from a file: neither markup nor a terminal's control codes."""
    return Text("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text))
