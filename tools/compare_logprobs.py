"""`python -m tools.compare_logprobs CHECKPOINT --tokens FILE.json`: the trainer against a peer.

Owns the command line, the asking of peers (transformers in this process, or an engine that speaks
SGLang's native /generate), and the statistics. The model's mathematics belong to `trainer_jax`.

FILE.json is a list of token rows, or {"rows": [...]}. Entry t of a row's log-probs is that of
token t + 1. The peer stands where a sampler stands, so its log-probs are `sampler_logp`; if it also
drew the tokens, the k3 estimate is that of KL(peer || trainer).
"""

from __future__ import annotations

import argparse
import functools
import http.client
import importlib.util
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from contracts.errors import BadInputError, RetryError, exits_politely
from contracts.files import replacing
from trainer_jax.head import candidate_logits
from trainer_jax.hf import load_checkpoint
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.decoder import head_weight, hidden_states
from trainer_jax.models.parameters import Params

_MIN_ROW = 64  # rows are padded to a power of two from here on, so that few programs are compiled
Rows = list[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Position:
    """A token and what the two make of it. `position` counts from 0 and is that of the token."""

    row: int
    position: int
    token: int
    trainer_logp: float
    sampler_logp: float


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Trainer minus peer, over all predicted tokens. In nats."""

    max_abs: float
    mean_abs: float
    kl_k3: float
    worst: list[Position]


@dataclass(frozen=True, kw_only=True)
class TrainerStatistics:
    """The trainer's own numbers, over all predicted tokens. In nats."""

    mean_logp: float
    min_logp: float
    mean_entropy: float


def read_rows(path: Path, vocab_size: int) -> Rows:
    """The file's rows, int32. Raises BadInputError naming the first row that can't be used."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not text
        raise BadInputError(str(path), expected="JSON", found=str(error)) from None
    rows = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows:
        raise BadInputError(
            str(path), expected='a list of token rows, or {"rows": [...]}', found="none"
        )
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        if not isinstance(row, list) or any(type(token) is not int for token in row):
            raise BadInputError(where, expected="a list of token ids", found="something else")
        if len(row) < 2:
            raise BadInputError(where, expected="at least 2 tokens", found=len(row))
        for token in row:
            if not 0 <= token < vocab_size:
                raise BadInputError(
                    where, expected=f"token ids from 0 to {vocab_size - 1}", found=token
                )
    return [np.array(row, np.int32) for row in rows]


@functools.partial(jax.jit, static_argnames="config")
def _row_logp(params: Params, config: ModelConfig, tokens_T: jax.Array, num_tokens: jax.Array):
    """Log-prob of each next token and entropy before it, [T]; beyond the row they mean nothing."""
    positions_T = jnp.arange(len(tokens_T), dtype=jnp.int32)
    segments_T = (positions_T < num_tokens).astype(jnp.int32)
    hidden_BxTxD = hidden_states(
        params, config, tokens_T[None], positions_T[None], segments_T[None]
    )
    out = candidate_logits(
        hidden_BxTxD[0], head_weight(params), jnp.roll(tokens_T, -1)[:, None], normalizer=True
    )
    assert out.normalizer_T is not None and out.entropy_T is not None
    return out.logits_TxK[:, 0] - out.normalizer_T, out.entropy_T


def trainer_logp(config: ModelConfig, params: Params, rows: Rows) -> tuple[Rows, Rows]:
    """Log-probs of the next tokens and entropies of their distributions, float32, in full float32.

    One row at a time; of the head, one chunk of tokens at a time.
    """
    params = jax.tree.map(jnp.asarray, params)
    logp, entropy = [], []
    with jax.default_matmul_precision("float32"):  # an accelerator would use less
        for row in rows:
            padded = np.zeros(max(_MIN_ROW, 1 << (len(row) - 1).bit_length()), np.int32)
            padded[: len(row)] = row
            out = _row_logp(params, config, jnp.asarray(padded), jnp.int32(len(row)))
            logp_T, entropy_T = (np.asarray(x)[: len(row) - 1] for x in out)
            logp.append(logp_T)
            entropy.append(entropy_T)
    return logp, entropy


def transformers_logp(checkpoint: Path, rows: Rows) -> Rows:
    """The same by transformers' model, float32 on the CPU."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise BadInputError(
                "--peer transformers",
                expected=f"{package} to be installed (pip install torch transformers)",
                found="no such package",
            )
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    out = []
    with torch.inference_mode():
        for row in rows:
            tokens_T = torch.from_numpy(row.astype(np.int64))
            logp_TxV = model(tokens_T[None], use_cache=False).logits[0, :-1].log_softmax(dim=-1)
            out.append(logp_TxV.gather(1, tokens_T[1:, None])[:, 0].numpy())
    return out


def engine_logp(url: str, rows: Rows, *, timeout_s: float) -> Rows:
    """The same by an engine's /generate: the log-probs of its input tokens at temperature 1.

    Raises:
        RetryError: nobody answers in time.
        BadInputError: it refuses, or answers something else.
    """
    return [_engine_row(url.rstrip("/") + "/generate", row, timeout_s) for row in rows]


def _engine_row(url: str, row: np.ndarray, timeout_s: float) -> np.ndarray:
    body = {
        "input_ids": row.tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        with error:
            reason = error.read(200).decode(errors="replace")
        raise BadInputError(url, expected="status 200", found=f"{error.code} {reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise RetryError(f"{url}: the engine does not answer ({error})") from None
    try:
        found = json.loads(text)["meta_info"]["input_token_logprobs"]
        logp = [None if entry[0] is None else float(entry[0]) for entry in found]
        tokens = [int(entry[1]) for entry in found]
    except (ValueError, KeyError, TypeError, IndexError):
        raise BadInputError(
            url,
            expected="meta_info.input_token_logprobs, a list of [log-prob, token, text]",
            found=text[:100].decode(errors="replace"),
        ) from None
    if tokens != row.tolist():
        raise BadInputError(
            url, expected=f"the {len(row)} tokens sent", found=f"{len(tokens)} others"
        )
    if None in logp[1:]:
        raise BadInputError(url, expected="a log-prob of every token but the first", found="null")
    return np.array(logp[1:], np.float32)


def difference(rows: Rows, trainer: Rows, sampler: Rows, *, num_worst: int) -> Difference:
    """Statistics of two answers to the same rows; k3 is r - 1 - log r, r = p_trainer / p_peer."""
    places = [(row, t) for row, logp in enumerate(trainer) for t in range(len(logp))]
    all_trainer = np.concatenate(trainer).astype(np.float64)
    all_sampler = np.concatenate(sampler).astype(np.float64)
    log_ratio = all_trainer - all_sampler
    worst = np.argsort(-np.abs(log_ratio), kind="stable")[:num_worst]
    return Difference(
        max_abs=float(np.abs(log_ratio).max()),
        mean_abs=float(np.abs(log_ratio).mean()),
        kl_k3=float((np.expm1(log_ratio) - log_ratio).mean()),
        worst=[
            Position(
                row=places[i][0],
                position=places[i][1] + 1,
                token=int(rows[places[i][0]][places[i][1] + 1]),
                trainer_logp=float(all_trainer[i]),
                sampler_logp=float(all_sampler[i]),
            )
            for i in worst.tolist()
        ],
    )


def _check_finite(whose: str, rows: Rows) -> None:
    for number, logp in enumerate(rows):
        if bad := np.flatnonzero(~np.isfinite(logp)).tolist():
            raise BadInputError(
                f"the {whose}'s log-probs, row {number}, position {bad[0] + 1}",
                expected="a finite number",
                found=f"{logp[bad[0]]} ({len(bad)} such in the row)",
            )


def _dump(path: Path, rows: Rows, **values: Rows) -> None:
    """Writes `tokens`, `offsets` [rows + 1] and arrays like `tokens`, NaN where a row begins."""
    arrays: dict[str, np.ndarray] = {
        name: np.concatenate(
            [x for logp in of_rows for x in (np.full(1, np.nan, np.float32), logp)]
        )
        for name, of_rows in values.items()
    }
    arrays["tokens"] = np.concatenate(rows)
    arrays["offsets"] = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    with replacing(path) as aside, aside.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _show(console: Console, summary: dict[str, Any], compared: Difference | None) -> None:
    table = Table("", "value", title=summary["checkpoint"])
    table.add_row("rows", f"{summary['rows']:,}")
    table.add_row("predicted tokens", f"{summary['tokens']:,}")
    for name, value in summary["trainer"].items():
        table.add_row(f"trainer {name.replace('_', ' ')}", f"{value:.6f}")
    if compared:
        table.add_row("peer", summary["peer"])
        table.add_row("max |difference|", f"{compared.max_abs:.3e}")
        table.add_row("mean |difference|", f"{compared.mean_abs:.3e}")
        table.add_row("mean KL (k3)", f"{compared.kl_k3:.3e}")
    console.print(table)
    if compared:
        table = Table("row", "position", "token", "trainer", "peer", "difference", title="worst")
        for at in compared.worst:
            logps = (at.trainer_logp, at.sampler_logp, at.trainer_logp - at.sampler_logp)
            numbers = (f"{logps[0]:.6f}", f"{logps[1]:.6f}", f"{logps[2]:+.3e}")
            table.add_row(str(at.row), str(at.position), str(at.token), *numbers)
        console.print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="Hugging Face directory"
    )
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--peer", metavar="transformers|URL", help="whom to compare with")
    parser.add_argument("--dump", type=Path, metavar="OUT.npz", help="write all log-probs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="positions shown (10)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="per row")
    return parser.parse_args()


def _is_url(text: str) -> bool:
    try:
        url = urllib.parse.urlsplit(text)
        (url.hostname or "").encode("idna")
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of a bad bracket, label or port
        return False


def _check(arguments: argparse.Namespace) -> None:
    peer = arguments.peer
    if peer not in (None, "transformers") and not _is_url(peer):
        raise BadInputError("--peer", expected="transformers or http://HOST:PORT", found=peer)
    if arguments.worst < 0:
        raise BadInputError("--worst", expected="at least 0", found=arguments.worst)
    if not 0 < arguments.timeout < math.inf:
        raise BadInputError("--timeout", expected="more than 0", found=arguments.timeout)
    dump = arguments.dump
    if dump and (not dump.parent.is_dir() or (dump.exists() and not dump.is_file())):
        raise BadInputError("--dump", expected="a file in a directory", found=arguments.dump)


@exits_politely
def main() -> None:
    arguments = _arguments()
    _check(arguments)
    config, params = load_checkpoint(arguments.checkpoint)
    rows = read_rows(arguments.tokens, config.vocab_size)
    sampler: Rows | None = None
    if arguments.peer == "transformers":
        sampler = transformers_logp(arguments.checkpoint, rows)
    elif arguments.peer:
        sampler = engine_logp(arguments.peer, rows, timeout_s=arguments.timeout)
    trainer, entropy = trainer_logp(config, params, rows)
    _check_finite("trainer", trainer)
    every_logp = np.concatenate(trainer)
    statistics = TrainerStatistics(
        mean_logp=float(every_logp.mean()),
        min_logp=float(every_logp.min()),
        mean_entropy=float(np.concatenate(entropy).mean()),
    )
    summary: dict[str, Any] = {
        "checkpoint": str(arguments.checkpoint),
        "peer": arguments.peer,
        "rows": len(rows),
        "tokens": len(every_logp),
        "trainer": asdict(statistics),
    }
    compared = None
    if sampler is not None:
        _check_finite("peer", sampler)
        compared = difference(rows, trainer, sampler, num_worst=arguments.worst)
        summary["difference"] = asdict(compared)
    if arguments.dump:
        values = {"trainer_logp": trainer} | ({"sampler_logp": sampler} if sampler else {})
        _dump(arguments.dump, rows, **values)
    if arguments.json:
        print(json.dumps(summary))
    else:
        _show(Console(), summary, compared)


if __name__ == "__main__":
    main()
