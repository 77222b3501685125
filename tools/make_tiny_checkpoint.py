"""`python -m tools.make_tiny_checkpoint OUT`: a random tiny Qwen3-MoE for experiments and tests.

Owns the command line and its defaults. What a checkpoint is belongs to `trainer_jax.hf`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import jax

from contracts.errors import BadInputError, exits_politely
from trainer_jax.hf import DTYPES, EXPERTS, check_tokenizer, save_checkpoint
from trainer_jax.models.config import ModelConfig
from trainer_jax.models.parameters import count_parameters, init_params


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a directory not yet there, or empty")
    parser.add_argument("--seed", type=int, default=0)
    for flag, default, text in (
        ("--vocab", 512, "ids"),
        ("--hidden", 64, "width of the model"),
        ("--layers", 2, "transformer blocks"),
        ("--heads", 4, "query heads"),
        ("--kv-heads", 2, "key-value heads"),
        ("--head-dim", 16, "width of a head"),
        ("--experts", 8, "experts of a layer"),
        ("--experts-per-token", 2, "experts that see a token"),
        ("--ffn", 32, "width of an expert"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=text)
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument(
        "--scale", type=float, default=0.1, help="standard deviation of the matrices' values"
    )
    parser.add_argument("--layout", choices=list(EXPERTS), default="per-expert")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="its tokenizer travels along")
    return parser.parse_args()


@exits_politely
def main() -> None:
    arguments = _arguments()
    out: Path = arguments.out
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise BadInputError("OUT", expected="a new or empty directory", found=out)
    if not 0 <= arguments.scale < math.inf:
        raise BadInputError("--scale", expected="a number from 0 on", found=arguments.scale)
    config = ModelConfig(
        vocab_size=arguments.vocab,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.experts_per_token,
        moe_intermediate_size=arguments.ffn,
        tie_word_embeddings=arguments.tied,
        initializer_range=arguments.scale,
    )
    if arguments.tokenizer:
        if not (arguments.tokenizer / "tokenizer.json").is_file():
            raise BadInputError(
                "--tokenizer", expected="a directory with tokenizer.json", found=arguments.tokenizer
            )
        check_tokenizer(arguments.tokenizer, config)
    params = init_params(config, jax.random.key(arguments.seed))
    save_checkpoint(
        out,
        config,
        params,
        layout=arguments.layout,
        dtype=arguments.dtype,
        copy_from=arguments.tokenizer,
    )
    num_bytes = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {count_parameters(config):,} parameters, {num_bytes:,} bytes")


if __name__ == "__main__":
    main()
