"""What quantization costs a model as a whole: perplexity of a text, and KL per token.

Owns the two measures and the loading of both models by transformers, in float32 and in memory
together, so that nothing but the weights differs. A quantized directory is decoded by the converter
into a temporary one beside it. Nothing here knows a format.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contracts.errors import BadInputError
from contracts.types import WeightFormat
from weight_sync.convert import Options, convert_directory, read_config
from weight_sync.plan import ConversionPlan

if TYPE_CHECKING:
    import torch

_WINDOW_TOKENS = 512  # of context; each window starts without any
_ROWS = 64  # whose log-probabilities are held in float64 at once
_LOAD_ERRORS = (ValueError, KeyError, OSError, ImportError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Over the predicted tokens of a text; KL in nats, of the source from the result."""

    num_tokens: int
    source_perplexity: float
    result_perplexity: float
    mean_kl: float
    p99_kl: float


def check_comparable(
    source: Path, plan: ConversionPlan, text: str, *, available_bytes: int
) -> list[int]:
    """The text's tokens, if both models of a conversion can be loaded.

    Raises:
        BadInputError: too little memory for both in float32, an architecture that transformers
            does not know as a causal language model, no tokenizer.json, or a text of one token.
    """
    num_weights = sum(math.prod(shape) for shape in _dense_shapes(plan))
    needed = 2 * 4 * num_weights
    if needed > available_bytes:
        raise BadInputError(
            "memory for both models in float32",
            expected=f"{needed / 1e9:.1f} GB",
            found=f"{available_bytes / 1e9:.1f} GB available",
        )
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    except _LOAD_ERRORS as error:
        raise _refusal(source, error) from None
    if not known:
        raise _refusal(source, f"model_type {config.model_type}")
    tokens = _tokens(source, text)
    vocab_size = config.get_text_config().vocab_size
    if max(tokens) >= vocab_size:
        raise BadInputError(
            f"{source}", expected=f"token ids below {vocab_size}", found=max(tokens)
        )
    return tokens


def _dense_shapes(plan: ConversionPlan) -> Iterator[tuple[int, ...]]:
    """Of the model's tensors in full: packed nibbles count as two, scales as nothing."""
    for action in plan.actions:
        for specs in action.outputs:
            first = specs[0]
            yield (2, *first.shape) if first.dtype == "U8" else first.shape


def _refusal(directory: Path, found: object) -> BadInputError:
    expected = "a causal language model that transformers loads"
    return BadInputError(f"{directory}", expected=expected, found=str(found).strip().split("\n")[0])


def _tokens(source: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    path = source / "tokenizer.json"
    if not path.is_file():
        raise BadInputError(f"{source}", expected="tokenizer.json", found="none")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise BadInputError(f"{path}", expected="a tokenizer", found=error) from None
    tokens = tokenizer.encode(text).ids
    if len(tokens) < 2:
        raise BadInputError("text to predict", expected="at least 2 tokens", found=len(tokens))
    return tokens


def compare_models(source: Path, result: Path, tokens: list[int]) -> Difference:
    """Predicts each token of a text from those before it in its window of 512, with both models.

    Raises:
        BadInputError: weights that transformers does not find its model in.
    """
    import torch

    with _plain(source) as directory:
        first = _load(directory)
    with _plain(result) as directory:
        second = _load(directory)
    losses: list[np.ndarray] = []
    divergences: list[np.ndarray] = []
    for start in range(0, len(tokens) - 1, _WINDOW_TOKENS):
        window = torch.tensor([tokens[start : start + _WINDOW_TOKENS + 1]])
        with torch.no_grad():
            source_NxV, result_NxV = (model(window[:, :-1]).logits[0] for model in (first, second))
        loss, kl = _measure(source_NxV, result_NxV, window[0, 1:])
        losses.append(loss)
        divergences.append(kl)
    loss_2xN, kl_N = np.concatenate(losses, axis=1), np.concatenate(divergences)
    source_loss, result_loss = loss_2xN.mean(axis=1)
    return Difference(
        num_tokens=len(kl_N),
        source_perplexity=float(np.exp(source_loss)),
        result_perplexity=float(np.exp(result_loss)),
        mean_kl=float(kl_N.mean()),
        p99_kl=float(np.quantile(kl_N, 0.99)),
    )


def _measure(
    source_NxV: torch.Tensor, result_NxV: torch.Tensor, targets_N: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Negative log-likelihood [2, N] of the targets, and KL(source || result) [N]; float64."""
    losses, divergences = [], []
    for start in range(0, len(targets_N), _ROWS):
        rows = slice(start, start + _ROWS)
        p, q = (x[rows].double().log_softmax(dim=-1) for x in (source_NxV, result_NxV))
        targets = targets_N[rows, None]
        losses.append(np.stack([-x.gather(1, targets)[:, 0].numpy() for x in (p, q)]))
        divergences.append((p.exp() * (p - q)).sum(dim=-1).numpy())
    return np.concatenate(losses, axis=1), np.concatenate(divergences)


@contextlib.contextmanager
def _plain(directory: Path) -> Iterator[Path]:
    """The directory, or its decoded form in float32 while the block runs."""
    if read_config(directory)[1] is None:
        yield directory
        return
    parent = directory.absolute().parent
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{directory.name}.plain-") as temporary:
        decoded = Path(temporary) / "checkpoint"
        convert_directory(directory, decoded, Options(format=WeightFormat.BF16, dtype="F32"))
        yield decoded


def _load(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
    except _LOAD_ERRORS as error:
        raise _refusal(directory, error) from None
    model, report = loaded
    for fault in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, report[fault])):
            raise _refusal(directory, f"{len(names)} {fault.replace('_', ' ')}, first {names[0]}")
    return model.eval()
