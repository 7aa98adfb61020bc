"""Rematerialization: which results of a layer are saved for the backward pass."""

from __future__ import annotations

import jax

from jaxrl_kernels.flash_attention.api import SAVED as ATTENTION
from jaxrl_kernels.gated_delta.reference import SAVED as DELTA
from jaxrl_kernels.grouped_matmul.api import SAVED as GROUPED_PRODUCT
from jaxrl_llm.models.experts.dispatch import GATHERED_EXPERTS
from jaxrl_llm.models.experts.weights import ADAPTED
from jaxrl_llm.sharding.rules import HOST

LAYER_INPUT = "layer_input"
SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(ATTENTION)
REMAT = {
    "none": jax.checkpoint_policies.save_anything_except_these_names(GATHERED_EXPERTS),
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names(ADAPTED, ATTENTION, DELTA, GROUPED_PRODUCT),
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ),
    "attention": SAVE_ATTENTION,
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst=HOST,
    ),
}
"""Name -> policy that saves results of a layer besides its input, most memory first. "offload" saves the
input itself in host memory."""
