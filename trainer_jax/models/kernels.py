"""Products of sorted rows with the matrices of their groups, by an accelerator's kernels.

Owns the package they come from (tokamax, optional), which of its kernels are asked, and the refusal
where none of them can. Must not know what a group is.

Shape letters: M rows, I and O their width before and after, E groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from contracts.errors import BadInputError

# without names it would take XLA's at last, which on some backends multiplies all with all
Kernel = Literal["mosaic", "triton"]
KERNELS: tuple[Kernel, ...] = ("mosaic", "triton")


def grouped_dot(kernels: tuple[Kernel, ...] = KERNELS) -> Callable[..., jax.Array]:
    """jax.lax.ragged_dot(rows [M, I], matrices [E, I, O], sizes [E]) and its gradients, each by
    the first kernel that can: on one GPU a kernel has the product, and not its gradients. What
    comes out in rows beyond the last group's may be anything.

    Raises:
        BadInputError: no package; and when it is traced, no kernel for this backend and these
            sizes.
    """
    subject = 'model.compute.ffn = "tokamax"'
    try:
        import tokamax
        from absl import flags
    except ImportError:
        raise BadInputError(
            subject, expected="the package tokamax (the extra `accelerator`)", found="none"
        ) from None
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # or tokamax takes this program's command line for its own

    def product(left: jax.Array, right: jax.Array, sizes_E: jax.Array, dims: Any) -> jax.Array:
        try:
            with jax.numpy_dtype_promotion("standard"):  # its own arithmetic mixes dtypes
                return tokamax.ragged_dot_general(
                    left, right, sizes_E, dims, implementation=kernels
                )
        except (NotImplementedError, ExceptionGroup) as error:
            found = "; ".join(map(str, getattr(error, "exceptions", (error,))))
            expected = "a GPU or TPU with kernels for these sizes"
            raise BadInputError(subject, expected=expected, found=found) from None

    @jax.custom_vjp
    def dot(rows_MxI: jax.Array, matrices_ExIxO: jax.Array, sizes_E: jax.Array) -> jax.Array:
        return product(rows_MxI, matrices_ExIxO, sizes_E, _by_group(1))

    def forward(*arguments: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return dot(*arguments), arguments

    def backward(arguments: tuple[jax.Array, ...], slope_MxO: jax.Array):
        rows_MxI, matrices_ExIxO, sizes_E = arguments
        d_rows = product(slope_MxO, matrices_ExIxO, sizes_E, _by_group(2))
        return d_rows, product(rows_MxI, slope_MxO, sizes_E, _OUTER), None

    dot.defvjp(forward, backward)
    return dot


def _by_group(dim: int) -> jax.lax.RaggedDotDimensionNumbers:
    """Of rows with their group's matrix, summed over this dimension of it."""
    return jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [dim]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )


_OUTER = jax.lax.RaggedDotDimensionNumbers(  # of rows with rows, summed over a group
    dot_dimension_numbers=(([0], [0]), ([], [])),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
