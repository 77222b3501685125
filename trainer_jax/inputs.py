"""Arrays and numbers from outside of training: notebooks, other trainers, tools.

Owns the sentence for one that is of the wrong kind. Must not know what it means to its receiver.
Kinds and shapes are known under tracing too; values are looked at only where they are concrete.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from contracts.errors import BadInputError

Kind = Literal["integers", "floating-point numbers", "real numbers", "booleans"]

_DTYPES: dict[Kind, tuple[Any, ...]] = {
    "integers": (jnp.integer,),
    "floating-point numbers": (jnp.floating,),
    "real numbers": (jnp.integer, jnp.floating),
    "booleans": (jnp.bool_, jnp.integer, jnp.floating),  # 0 and 1 are as good
}


def is_concrete(*values: Any) -> bool:
    """Whether the values are known now, not only when the traced function runs."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values))


def array_of(name: str, value: Any, kind: Kind) -> jax.Array:
    """The value as an array.

    Raises:
        BadInputError: no array, or one of another kind.
    """
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        found = getattr(value, "dtype", type(value).__name__)
        raise BadInputError(name, expected=f"an array of {kind}", found=found) from None
    if not any(jnp.issubdtype(array.dtype, dtype) for dtype in _DTYPES[kind]):
        raise BadInputError(
            name, expected=f"an array of {kind}", found=f"an array of {array.dtype}"
        )
    return array


def is_number(value: Any) -> bool:
    """Whether the value is one real number, concrete; not a truth value."""
    if isinstance(value, Tracer | str) or value is None:
        return False
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        return False
    return array.ndim == 0 and any(
        jnp.issubdtype(array.dtype, dtype) for dtype in _DTYPES["real numbers"]
    )


def check_positive(name: str, value: Any) -> None:
    """Refuses what is not a finite number above 0; a traced value passes."""
    if isinstance(value, Tracer):
        return
    if not is_number(value) or not 0 < float(value) < math.inf:
        raise BadInputError(name, expected="a finite number above 0", found=repr(value))


def check_flag(name: str, value: Any) -> None:
    """Refuses what is neither True nor False."""
    if not isinstance(value, bool | np.bool_):
        raise BadInputError(name, expected="True or False", found=repr(value))
