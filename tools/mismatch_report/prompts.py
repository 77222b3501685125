"""What nobody drew: whether prompts and observations were encoded as the checkpoint would.

Tokens that no sampler drew were encoded by the gateway: the checkpoint's own tokenizer and chat
template must give the same. Owns these two tests and their limits; reads no log-probs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from contracts.errors import BadInputError
from contracts.types import Trajectory
from sampler_fleet.episodes.chat import ChatFormat
from tools.mismatch_report.causes import Cause, Finding

_ROUND_TRIP = 0.85
_TEMPLATE_FITS = 0.5


def text_faults(
    trajectories: Sequence[Trajectory], directory: Path
) -> tuple[list[Finding], list[str]]:
    """Causes in the tokens that nobody drew, and what was or could not be checked."""
    if not (directory / "tokenizer.json").exists():
        return [], [f"no tokenizer.json in {directory}: tokenizer and chat template not checked"]
    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise BadInputError(
            str(directory / "tokenizer.json"), expected="a tokenizer", found=error
        ) from None
    contexts = [part for t in trajectories for part in _given_parts(t)]
    unknown = {i for part in contexts for i in np.unique(part) if not tokenizer.id_to_token(int(i))}
    share = round_trip_share(contexts, tokenizer)
    said = f"{share:.1%} of the tokens given to the samplers come back when encoded again"
    if unknown or share < _ROUND_TRIP:
        ids = f"; ids without a token: {len(unknown)}, such as {min(unknown)}" if unknown else ""
        evidence = f"{said} by {directory / 'tokenizer.json'}{ids}"
        return [Finding(cause=Cause.TOKENIZER, subject="prompts", evidence=evidence)], []
    try:
        chat = _chat_format(directory)
    except (ValueError, FileNotFoundError) as error:
        return [], [said, f"chat template not checked: {error}"]
    heads, openings = template_shares(trajectories, chat)
    template = f"{heads:.1%} of the prompts begin, and {openings:.1%} of the replies are opened"
    if min(heads, openings) < _TEMPLATE_FITS:
        evidence = f"{template} as the chat template of {directory} does"
        return [Finding(cause=Cause.TEMPLATE, subject="prompts", evidence=evidence)], [said]
    return [], [said, f"{template} as the checkpoint's chat template does"]


def _chat_format(directory: Path) -> ChatFormat:
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_bytes())
    if not isinstance(config, dict):
        raise BadInputError(str(path), expected="an object", found=type(config).__name__)
    return ChatFormat.load(directory)


def _given_parts(trajectory: Trajectory) -> list[np.ndarray]:
    """The runs of tokens between the sampled ones."""
    edges = np.flatnonzero(np.diff(trajectory.loss_mask)) + 1
    parts = np.split(trajectory.tokens, edges)
    return [part for part in parts[0 if not trajectory.loss_mask[0] else 1 :: 2] if len(part)]


def round_trip_share(parts: Iterable[np.ndarray], tokenizer: Tokenizer) -> float:
    """Share of the tokens that decoding and encoding again gives back, in any order.

    Pieces between control tokens are taken by themselves. Where template and content meet, they
    were encoded apart, so a right tokenizer doesn't quite reach 1.
    """
    control = np.array(
        [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special], np.int64
    )
    kept = total = 0
    pieces = Counter(
        tuple(piece[~np.isin(piece, control)].tolist())
        for part in parts
        for piece in np.split(part, np.flatnonzero(np.isin(part, control)))
    )
    for piece, times in pieces.items():
        again = tokenizer.encode(tokenizer.decode(list(piece)), add_special_tokens=False).ids
        kept += times * sum((Counter(piece) & Counter(again)).values())
        total += times * len(piece)
    return kept / total if total else 1.0


def template_shares(trajectories: Sequence[Trajectory], chat: ChatFormat) -> tuple[float, float]:
    """Shares of prompts that begin, and of replies that are opened, as the template does."""
    turns = [chat.start("a", "b"), chat.start("c", "d"), chat.observe("a"), chat.observe_error("c")]
    turns = [turn.tolist() for turn in turns]
    head, opening = _common(turns[:2]), _common([turn[::-1] for turn in turns])[::-1]
    heads = [t.tokens[: len(head)].tolist() == head for t in trajectories]
    openings = [
        t.tokens[max(0, start - len(opening)) : start].tolist() == opening
        for t in trajectories
        for start in np.flatnonzero(np.diff(t.loss_mask.astype(np.int8)) == 1) + 1
    ]
    return float(np.mean(heads)), float(np.mean(openings))


def _common(rows: Sequence[list[int]]) -> list[int]:
    """Their longest common beginning."""
    num = 0
    while all(len(row) > num and row[num] == rows[0][num] for row in rows):
        num += 1
    return rows[0][:num]
