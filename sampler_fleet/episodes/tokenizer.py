"""The demo policy's tokenizer: byte-level BPE of at most 1024 tokens, and its chat template.

Owns the pieces that text is cut into and the vocabulary built from them. Trained on generated
training tasks only; the same code gives the same files. Every text round-trips, because all bytes
are tokens.

The fixed wording of an episode, frequent words, operators with their spaces and the line numbers
of `cat -n` are one token each (`ignore_merges`: a piece that is in the vocabulary is taken whole);
other words fall back to merges, then to bytes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sampler_fleet.episodes.prompts import (
    BASH_TOOL,
    FORMAT_ERRORS,
    NO_OUTPUT,
    SUBMIT_COMMAND,
    SYSTEM_PROMPT,
    format_error,
)
from sampler_fleet.episodes.tasks.generate import Problem, generate_problems
from sampler_fleet.episodes.tasks.script import CONTEXT_LINES

MAX_VOCABULARY = 1024
_NUM_MERGED = 256  # bytes aside: parts of words that occur in no training task
_NUM_PROBLEMS = 4000
_MIN_OCCURRENCES = 20
_MAX_LINE_NUMBER = 20

STOP_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"
CONTROL_TOKENS = (
    PAD_TOKEN,
    "<|im_start|>",
    STOP_TOKEN,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

# Whole pieces wherever they occur. The JSON frame of a call is split only by control tokens.
FRAMES = (
    SYSTEM_PROMPT,
    "\n\n# Tools\n\n<tools>\n",
    json.dumps(BASH_TOOL, ensure_ascii=False),
    "\n</tools>\n\nCall one as ",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    '\n{"name": "bash", "arguments": {"command": "',
    '"}}\n',
    SUBMIT_COMMAND,
    "sed -i '",
    "cat -n ",
    f"grep -n -A{CONTEXT_LINES} 'def ",
    "' ",
    "cat README.md",
    NO_OUTPUT,
    format_error(""),
    *FORMAT_ERRORS,
    "\n(exit status ",
    "system\n",
    "user\n",
    "assistant\n",
    " returned ",
    " raised ",
    ", expected ",
)

_CODE = (
    r"\n? +\d+\t",  # a line number of cat -n
    r"(?:def|return|if|for|not|from|import|assert) ",
    r" (?:if|else|and|or|in|import|for) ",
    r" (?:\*\*|//|[-+*/%<>=!]=|[-+*/%<>=]) ",
    r"\):|\(\)|, |: |s\||\|' |\.py|=",
    r"-1(?=[\]|])|//|[-+<>=!]=",
    r"\d{1,2}",
    r"_?[A-Za-z]+",  # a word of a name
    r" [A-Za-z]+",  # a word of a sentence
    r"\n+",
    r" +",
    r"[^\sA-Za-z0-9_]",
    r"[\s\S]",
)
PIECE = "|".join([*map(re.escape, sorted(FRAMES, key=len, reverse=True)), *_CODE])


def write_tokenizer(directory: str | Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json (with the chat template)."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "eos_token": STOP_TOKEN,
        "pad_token": PAD_TOKEN,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def build_tokenizer() -> Tokenizer:
    """Control tokens first, then bytes, merged parts of words, whole pieces by frequency."""
    problems = itertools.islice(generate_problems("train", 0), _NUM_PROBLEMS)
    texts = [text for problem in problems for text in _texts(problem)]
    texts += [*FRAMES] * _MIN_OCCURRENCES
    splitter = _splitter()
    counts = Counter(piece for text in texts for piece, _ in splitter.pre_tokenize_str(text))
    for number in range(1, _MAX_LINE_NUMBER + 1):
        for piece, _ in splitter.pre_tokenize_str(f"\n{number:6d}\t{number}"):
            counts[piece] += _MIN_OCCURRENCES

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = _merge_words(counts, alphabet)
    pieces = sorted(
        (piece for piece, count in counts.items() if count >= _MIN_OCCURRENCES),
        key=lambda piece: (-counts[piece], piece),
    )
    parts = [token for token, _ in sorted(merged.get_vocab().items(), key=lambda item: item[1])]
    tokens = list(dict.fromkeys([*CONTROL_TOKENS, *alphabet, *parts, *pieces]))[:MAX_VOCABULARY]
    merges = [tuple(merge) for merge in json.loads(merged.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=True,
        )
    )
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    assert tokenizer.get_vocab_size() == len(tokens)
    return tokenizer


def _texts(problem: Problem) -> Iterator[str]:
    task = problem.task
    yield task.issue
    for path, content in task.tree.items():
        yield path
        yield content
    lines = task.tree[problem.path].splitlines()
    yield "\n".join(f"{number:6d}\t{line}" for number, line in enumerate(lines, 1))
    for edit in (problem.repair, *problem.near_misses):
        yield edit.command


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _merge_words(counts: Counter[str], alphabet: list[str]) -> Tokenizer:
    """A plain BPE of the words alone, for words that never occurred."""
    words: Iterable[str] = sorted(
        piece
        for piece, count in counts.items()
        if count >= _MIN_OCCURRENCES and re.fullmatch(r"[a-z]+", piece)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(
        words,
        trainers.BpeTrainer(
            vocab_size=len(alphabet) + _NUM_MERGED,
            initial_alphabet=alphabet,
            min_frequency=2,
            show_progress=False,
        ),
    )
    return tokenizer
