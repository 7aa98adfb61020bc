"""Grouped matrix product: each group of rows has a separate matrix, as the experts of a layer do."""

from __future__ import annotations

from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels.dispatch import choose, load_implementation

SAVED = "grouped_matmul"
"""Name of the results, for rematerialization policies."""


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"],
    sizes: Int[Array, "G"],
    *,
    preferred_element_type: DTypeLike | None = None,
    implementation: str = "auto",
) -> Float[Array, "M N"]:
    """Compute lhs[m] @ rhs[g] for each row m of a group g: the first sizes[0] rows are group 0, and so on.

    A group may start at any row and be empty. Rows after the last group are not read; their results and
    gradients are 0.

    Args:
        sizes: int32, rows of each group; their sum is at most M.
        preferred_element_type: of the result; None = the type of lhs. Sums are float32 on TPU and Hopper.
        implementation: "auto" or one of `dispatch.OPERATIONS`.

    Raises:
        ValueError: the implementation does not support the type.
    """
    assert (*sizes.shape, *lhs.shape[1:]) == rhs.shape[:2]
    name, _ = choose("grouped_matmul", lhs.dtype, implementation=implementation)
    compute = load_implementation("grouped_matmul", name).grouped_matmul
    return checkpoint_name(compute(lhs, rhs, sizes, preferred_element_type), SAVED)
