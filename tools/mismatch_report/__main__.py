"""`python -m tools.mismatch_report RUN_OR_TRAJECTORIES`: what to look at when training goes wrong.

Owns the command line, the tables in the terminal and the page. Where trajectories come from, what
a checkpoint says of them and which fault the numbers mean is in the modules beside it.

RUN_OR_TRAJECTORIES is a run directory (at work or not), a gateway's state directory or
groups.sqlite, or a file of length-delimited TrajectoryGroup messages, such as `--save` writes.
Of a run, settings and the newest trainer checkpoint are taken unless options say otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tokenizers import Tokenizer

from contracts.errors import BadInputError, exits_politely
from contracts.files import replacing
from contracts.types import Trajectory
from tools.mismatch_report.causes import (
    MIN_TOKENS,
    REMEDY,
    Unit,
    agreement,
    diagnose,
    leaning,
    sigmas,
    surprise,
    text_faults,
    units_of,
)
from tools.mismatch_report.source import (
    Checkpoint,
    Source,
    read_checkpoint,
    read_source,
    write_groups,
)
from tools.mismatch_report.tokens import Setup, Tokens, compare, usable, whole_sets
from trainer_jax.live import number
from trainer_jax.report import render_page, svg_of
from trainer_jax.summary import percent

RATIO_EDGES = (0.05, 0.2, 0.5, 0.8, 0.95, 1.05, 1.25, 2.0, 5.0, 20.0)
_CONTEXT_TOKENS = 24  # before an extreme token
_SHOWN_VERSIONS = 12
_METRICS = (
    "num_tokens",
    "kl",
    "k3",
    "abs_dlogp",
    "abs_dlogp_max",
    "ratio_mean",
    "share_out_of_band",
    "masked_q_mass",
    "masked_p_mass",
    "entropy",
)
_COLUMNS = {
    "tokens": ("num_tokens", lambda x: number(int(x))),
    "KL": ("kl", lambda x: number(x, 5)),
    "k3": ("k3", lambda x: number(x, 5)),
    "|dlogp|": ("abs_dlogp", lambda x: number(x, 4)),
    "max": ("abs_dlogp_max", lambda x: number(x, 2)),
    "E[r]": ("ratio_mean", lambda x: number(x, 4)),
    "right": ("ratio_expected", lambda x: number(x, 4)),
    "out of band": ("share_out_of_band", lambda x: percent(x, 2)),
    "agreement": ("agreement", lambda x: number(x, 3)),
    "sigma": ("sigmas", lambda x: number(x, 1)),
}

Row = dict[str, Any]
Label = tuple[str, str]  # all tokens, a group or a version; and which


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """A token whose ratio is far from 1, with the text around it (ids without a tokenizer)."""

    group: str
    sampler: str
    session: str
    position: int
    version: int
    token: int
    text: str
    before: str
    trainer_logp: float
    sampler_logp: float
    ratio: float


def setup_of(source: Source, options: argparse.Namespace) -> Setup:
    """The run's settings under the options; what neither says is read from the records."""
    trajectories = [t for group in source.groups for t in group.trajectories]
    sampling = source.sampling
    whole = whole_sets(trajectories)
    replay = options.replay if options.replay is not None else source.replay
    truncates = sampling.params().truncates if sampling else whole or bool(options.replay)
    temperature = options.temperature or (sampling.temperature if sampling else 1.0)
    names = tuple(sorted({t.group for t in trajectories}))
    loss = source.loss
    bands = {name: band for name, band in loss.bands.items() if name in names}
    return Setup(
        group_names=names,
        log_bands_Gx2=loss.model_copy(update={"bands": bands}).log_bands(names),
        temperature=float(temperature),
        replay=truncates if replay is None else replay,
        truncates=truncates,
        compute=source.compute,
    )


def rows_of(tokens: Tokens, labels: Mapping[Label, np.ndarray]) -> dict[Label, Row]:
    """The metrics of each label (a mask [T]) by name; see docs/correction.md."""
    metrics = tokens.metrics(np.stack(list(labels.values()), axis=1))
    rows: dict[Label, Row] = {}
    for i, (name, mask_T) in enumerate(labels.items()):
        own = tokens.where(mask_T)
        counts = np.histogram(own.log_ratio, [-np.inf, *np.log(RATIO_EDGES), np.inf])[0]
        rows[name] = {metric: float(metrics[metric][i]) for metric in _METRICS} | {
            "ratio_expected": float(own.expected_ratio.mean()),
            "agreement": agreement(own),
            "surprise_sigmas": surprise(own)[1],
            "leaning_sigmas": leaning(own)[1],
            "sigmas": sigmas(own),
            "ratio_histogram": counts.tolist(),
        }
    return rows


def extremes(
    tokens: Tokens, trajectories: Sequence[Trajectory], directory: Path, num: int
) -> list[Extreme]:
    """The tokens with the largest |log r|, largest first."""
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None

    def spell(ids: np.ndarray) -> str:
        if tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    found = []
    for i in np.argsort(-np.abs(tokens.log_ratio), kind="stable")[:num]:
        trajectory, at = trajectories[int(tokens.trajectory[i])], int(tokens.position[i])
        found.append(
            Extreme(
                group=trajectory.group,
                sampler=", ".join(trajectory.sampler_ids),
                session=trajectory.session_id,
                position=at,
                version=int(tokens.version[i]),
                token=int(trajectory.tokens[at]),
                text=spell(trajectory.tokens[at : at + 1]),
                before=spell(trajectory.tokens[max(0, at - _CONTEXT_TOKENS) : at]),
                trainer_logp=float(tokens.trainer_logp[i]),
                sampler_logp=float(tokens.sampler_logp[i]),
                ratio=float(np.exp(np.clip(tokens.log_ratio[i], -80, 80))),
            )
        )
    return found


def build_report(
    source: Source,
    setup: Setup,
    checkpoint: Checkpoint,
    *,
    others: Sequence[Path],
    num_extremes: int,
) -> dict[str, Any]:
    """Everything that is printed or drawn, as JSON values.

    Raises:
        BadInputError: nothing that this checkpoint could be compared on.
    """
    trajectories, refused = usable(source.groups, checkpoint, setup)
    tokens = compare(trajectories, checkpoint, setup)
    units = units_of(trajectories, tokens)
    readings: dict[Path, Checkpoint] = {}

    def kl_under(unit: Unit) -> dict[str, float]:
        own = [trajectories[i] for i in np.unique(unit.tokens.trajectory)]
        for path in others:
            readings.setdefault(path, read_checkpoint(path, start=source.start_checkpoint))
        return {
            str(path): float(compare(own, other, setup).stat("kl").mean())
            for path, other in readings.items()
            if other.config.vocab_size >= checkpoint.config.vocab_size
        }

    findings = diagnose(units, setup, precision=source.precision, kl_under=kl_under)
    in_text, checked = text_faults(trajectories, checkpoint.tokenizer)
    everything = {("", "all"): np.ones(len(tokens), bool)}
    groups = {("group", name): tokens.group == i for i, name in enumerate(setup.group_names)}
    versions = {("version", str(v)): tokens.version == v for v in np.unique(tokens.version)}
    labels = everything | groups | versions
    rows = rows_of(tokens, {label: mask_T for label, mask_T in labels.items() if mask_T.any()})

    def rows_by(kind: str) -> dict[str, Row]:
        return {name: row for (other, name), row in rows.items() if other == kind}

    return {
        "source": str(source.path),
        "checkpoint": str(checkpoint.path),
        "checkpoint_version": checkpoint.version,
        "versions": [int(tokens.version.min()), int(tokens.version.max())],
        "temperature": setup.temperature,
        "replay": setup.replay,
        "truncates": setup.truncates,
        "bands": {
            name: np.exp(bounds.astype(float)).round(4).tolist()
            for name, bounds in zip(setup.group_names, setup.log_bands_Gx2, strict=True)
        },
        "num_groups": len(source.groups),
        "num_trajectories": len(trajectories),
        "refused": {"number": len(refused), "first": refused[0] if refused else None},
        "findings": [
            asdict(finding) | {"remedy": REMEDY[finding.cause]} for finding in [*findings, *in_text]
        ],
        "notes": [*_notes(tokens, units, checkpoint), *checked],
        "ratio_edges": list(RATIO_EDGES),
        "overall": rows_by("")["all"],
        "groups": rows_by("group"),
        "precision": {name: source.precision.get(name, "") for name in rows_by("group")},
        "by_version": rows_by("version"),
        "extremes": [
            asdict(x) for x in extremes(tokens, trajectories, checkpoint.tokenizer, num_extremes)
        ],
    }


def _notes(tokens: Tokens, units: Sequence[Unit], checkpoint: Checkpoint) -> list[str]:
    """What limits the conclusions."""
    notes = []
    first, last = int(tokens.version.min()), int(tokens.version.max())
    if checkpoint.version is None:
        notes.append(
            f"tokens are of versions {first} to {last}, and nothing says which the checkpoint is: "
            "part of the mismatch may be age"
        )
    else:
        age_T = checkpoint.version - tokens.version
        notes.append(
            f"tokens are of versions {first} to {last}, the checkpoint is {checkpoint.version}: "
            f"on average {np.abs(age_T).mean():.1f} versions apart"
            + (f", {np.mean(age_T < 0):.0%} of the tokens newer than it" if age_T.min() < 0 else "")
        )
    if few := [unit.sampler for unit in units if len(unit.tokens) < MIN_TOKENS]:
        notes.append(f"not judged, below {MIN_TOKENS} tokens: {', '.join(few)}")
    return notes


def show(console: Console, report: Mapping[str, Any]) -> None:
    """The report as tables."""
    say = lambda text: console.print(text, highlight=False, markup=False)  # noqa: E731
    say(
        f"{report['source']}: {report['num_trajectories']:,} trajectories against "
        f"{report['checkpoint']}\ntemperature {report['temperature']:g}, "
        f"mask replay {'on' if report['replay'] else 'off'}"
    )
    for title, rows in (
        ("by sampler group", report["groups"] | {"all": report["overall"]}),
        ("by version of the weights drawn from", _last(report["by_version"], _SHOWN_VERSIONS)),
    ):
        table = Table("", *map(escape, _COLUMNS), title=title, title_justify="left")
        for name, row in rows.items():
            table.add_row(name, *(cell(row[metric]) for metric, cell in _COLUMNS.values()))
        console.print(table)
    table = Table(
        "ratio", *map(escape, report["groups"]), "all", title="ratio p / q", title_justify="left"
    )
    columns = [row["ratio_histogram"] for row in report["groups"].values()]
    columns.append(report["overall"]["ratio_histogram"])
    for i, name in enumerate(ratio_bins()):
        table.add_row(name, *(percent(column[i] / sum(column), 2) for column in columns))
    console.print(table)
    table = Table("ratio", "group", "session", "position", "version", "token", "after",
                  title="most extreme ratios", title_justify="left")  # fmt: skip
    for x in report["extremes"]:
        table.add_row(
            f"{x['ratio']:.3g}", x["group"], x["session"], str(x["position"]), str(x["version"]),
            escape(repr(x["text"])), escape(repr(x["before"][-40:])),
        )  # fmt: skip
    console.print(table)
    for note in report["notes"]:
        say(f"- {note}")
    if report["refused"]["number"]:
        say(f"- the trainer refuses {report['refused']['number']}: {report['refused']['first']}")
    say("")
    for finding in report["findings"]:
        say(f"LIKELY CAUSE, {finding['subject']}: {finding['cause']}")
        say(f"  {finding['evidence']}\n  {finding['remedy']}")
    if not report["findings"]:
        say("No fault found: records agree with their draws, and the checkpoint with the records.")


def _last(rows: Mapping[str, Row], num: int) -> dict[str, Row]:
    return dict(list(rows.items())[-num:])


def ratio_bins() -> list[str]:
    """The names of the histogram's bins."""
    edges = [f"{edge:g}" for edge in RATIO_EDGES]
    inner = [f"{low} .. {high}" for low, high in itertools.pairwise(edges)]
    return [f"< {edges[0]}", *inner, f"> {edges[-1]}"]


def render(report: Mapping[str, Any]) -> str:
    """The report as one self-contained page."""
    drawn: list[tuple[str, str, Callable[[Axes], None]]] = [
        (
            "KL between sampler and trainer",
            "KL(sampler || trainer) per token, by sampler group; logarithmic.",
            lambda axes: _bars(axes, report["groups"], "kl"),
        ),
        (
            "Ratio",
            "Share of a group's tokens by r = p / q of the token drawn; logarithmic.",
            lambda axes: _histogram(axes, report["groups"]),
        ),
        (
            "KL by version",
            "KL against the version of the weights drawn from.",
            lambda axes: _by_version(axes, report["by_version"]),
        ),
    ]
    plots = [
        {"title": title, "note": note, "svg": Markup(svg_of(title, draw))}
        for title, note, draw in drawn
    ]
    return render_page(
        Path(__file__).with_name("report.html"),
        report=report, plots=plots, columns=_COLUMNS, bins=ratio_bins(), percent=percent,
    )  # fmt: skip


def _bars(axes: Axes, rows: Mapping[str, Row], metric: str) -> None:
    axes.barh(list(rows), [max(row[metric], 1e-8) for row in rows.values()], 0.6)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _histogram(axes: Axes, rows: Mapping[str, Row]) -> None:
    for name, row in rows.items():
        counts = np.array(row["ratio_histogram"], float)
        axes.step(range(len(counts)), counts / counts.sum(), where="mid", label=name)
    axes.set_xticks(range(len(ratio_bins())), ratio_bins(), rotation=60, ha="right", fontsize=7)
    axes.set_yscale("log")
    axes.legend()


def _by_version(axes: Axes, rows: Mapping[str, Row]) -> None:
    axes.plot([int(name) for name in rows], [row["kl"] for row in rows.values()], marker="o")
    axes.set_xlabel("version")
    axes.set_ylim(bottom=0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, metavar="RUN_OR_TRAJECTORIES")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR",
        help="a Hugging Face directory or checkpoints/<step> of a run (the run's newest)",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, help="of sampling (the run's, or 1)")
    parser.add_argument(
        "--replay", action=argparse.BooleanOptionalAction,
        help="compare over the recorded sets (as the run does, or if they hold all the mass)",
    )  # fmt: skip
    parser.add_argument(
        "--other", type=Path, action="append", default=[], metavar="DIR",
        help="weights to try for samplers that this checkpoint doesn't fit; may be repeated",
    )  # fmt: skip
    parser.add_argument("--top", type=int, default=10, metavar="N", help="extreme tokens (10)")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write the report as a page")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", type=Path, metavar="OUT", help="keep the trajectories in a file")
    return parser.parse_args()


def _check(options: argparse.Namespace) -> None:
    if options.top < 0:
        raise BadInputError("--top", expected="at least 0", found=options.top)
    if options.temperature is not None and not 0 < options.temperature < float("inf"):
        raise BadInputError("--temperature", expected="above 0", found=options.temperature)
    for flag in ("html", "save"):
        path = getattr(options, flag)
        if path and (not path.parent.is_dir() or (path.exists() and not path.is_file())):
            raise BadInputError(f"--{flag}", expected="a file in a directory", found=path)
    for path in options.other:
        if not path.is_dir():
            raise BadInputError("--other", expected="a checkpoint directory", found=path)


@exits_politely
def main() -> None:
    options = _arguments()
    _check(options)
    source = read_source(options.source)
    path = options.checkpoint or source.newest_checkpoint
    if path is None:
        raise BadInputError("--checkpoint", expected="one to compare with", found="none")
    checkpoint = read_checkpoint(
        path, start=None if options.checkpoint else source.start_checkpoint
    )
    others = [*options.other, *([source.start_checkpoint] if source.start_checkpoint else [])]
    if options.save:
        write_groups(options.save, source.groups)
    report = build_report(
        source, setup_of(source, options), checkpoint, others=others, num_extremes=options.top
    )
    if options.html:
        with replacing(options.html) as aside:
            aside.write_text(render(report))
    if options.json:
        print(json.dumps(report))
    else:
        console = Console()
        show(console if console.is_terminal else Console(width=160), report)


if __name__ == "__main__":
    main()
