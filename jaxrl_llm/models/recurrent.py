"""The kinds of layers that mix tokens by a state of fixed size, in place of attention.

A kind is a module with the functions of `RecurrentKind`, and a field of TransformerConfig with its name and
sizes. Its layers project each token, mix the tokens of a sequence, and project the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxrl_llm.models import delta, mamba, short_conv
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.linear import Initializer
from jaxrl_llm.models.mixer_config import LayerKind
from jaxrl_llm.models.paths import find_paths
from jaxrl_llm.models.rows import Packing
from jaxrl_llm.sharding.rules import constrain

if TYPE_CHECKING:
    from jaxrl_llm.models.layers import Layers

State = delta.DeltaState | short_conv.ConvState | mamba.MambaState
"""State of a layer for S sequences: dim -4 of each array is S, dim -3 is sharded like key heads. Its
`inputs` are the last inputs of its convolution, in the type of the cache."""


class RecurrentKind(Protocol):
    """The functions of a kind's module. `w` has the weights of a layer, cast by `cast_weights`."""

    def add_weights(self, layers: Layers, c: TransformerConfig, init: Initializer) -> None:
        """Add the weights that mix tokens to a stack of layers."""

    def empty_state(self, c: TransformerConfig, shape: tuple[int, ...], dtype: DTypeLike) -> State:
        """Return the state before the first token.

        Args:
            shape: (layers, sequences), or (sequences,).
            dtype: of the inputs of the convolution.
        """

    def project_inputs(self, c: TransformerConfig, w: Layers, h: Float[Array, "B T D"]) -> tuple[Any, ...]:
        """Return (inputs of the convolution, *others, gate), each token separately; dim 2 of the others are
        heads."""

    def split_channels(self, c: TransformerConfig, x: Float[Array, "B T C"]) -> tuple[Array, ...]:
        """Return the parts of the channels of the convolution that devices divide, each in order of heads."""

    def make_rows_fn(self, c: TransformerConfig, w: Layers, rows: Packing, *, strict: bool = False):
        """Return the function (parts, *others) -> (out, state after each row) for whole rows.

        Args:
            rows: `with_paths`.
            strict: the bits are those of steps.
        """

    def make_step_fn(
        self,
        c: TransformerConfig,
        w: Layers,
        state: State,
        valid: Bool[Array, "S T"],
        *,
        strict: bool = False,
    ):
        """Return the function (inputs, *others) -> (out, state) for the next T tokens of each sequence.

        Args:
            valid: False = padding, after the tokens of a sequence, which does not change the state.
        """

    def finish_mixed(self, c: TransformerConfig, w: Layers, out: Array, gate: Array) -> Float[Array, "B T D"]:
        """Return the output of the layer's first half, each token separately."""

    def mixer_weights(self, c: TransformerConfig) -> int:
        """Return the number of weights in matrices that a token is multiplied with."""

    def state_flops(self, c: TransformerConfig) -> float:
        """Return the FLOPs of updating and reading a layer's state for a token."""


RECURRENT: dict[LayerKind, RecurrentKind] = {"delta": delta, "conv": short_conv, "mamba": mamba}
"""Kind of layers -> its module."""


def with_paths(c: TransformerConfig, rows: Packing) -> Packing:
    """Return the rows with the tokens that the convolution of each token reads, if the model has one."""
    if not c.recurrent_kind:
        return rows
    rows = jax.tree.map(lambda x: constrain(x, "batch", None), rows)
    width = getattr(c, c.recurrent_kind).conv_width
    return rows._replace(paths=find_paths(rows.segments, rows.last, positions=rows.positions, width=width))
