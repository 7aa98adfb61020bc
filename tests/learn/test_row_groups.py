"""Short items have rows of their own where the mesh divides long rows (`learn.row_groups`)."""

import jax
import numpy as np

from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.row_groups import row_groups
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.flops import update_flops
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh


def items_of(*lengths):
    return [PackItem(np.full(n, i, np.int32), np.ones(n, np.float32)) for i, n in enumerate(lengths)]


DIVIDED = MeshConfig(fsdp=2, sequence=4)


def groups_of(lengths, rows=2, mesh=DIVIDED, group_size=1):
    config = StepConfig(row_tokens=128, rows=rows)
    mesh = make_mesh(mesh, jax.devices()[:8])
    groups = row_groups(items_of(*lengths), config, rows, mesh=mesh, group_size=group_size)
    return [
        (list(group.indices), group.rows, group.row_tokens, group.mesh.axis_names[-1]) for group in groups
    ]


def test_items_within_a_devices_share_have_rows_of_that_length():
    """Rows of 128 on 4 devices: 33 tokens are more than a share of 32."""
    assert groups_of([128, 33] + [32] * 16) == [
        ([0, 1], 2, 128, "sequence"),
        ([*range(2, 18)], 8, 32, "rows"),
    ]
    assert groups_of([32] * 8) == [(list(range(8)), 8, 32, "rows")]
    assert groups_of([64, 64, 64]) == [([0, 1, 2], 2, 128, "sequence")]


def test_short_items_fill_the_rows_of_long_ones():
    """18 items of 32 are one micro-batch of 8 rows more than 16; beside the 33, 95 tokens are free for 2."""
    assert groups_of([128, 33] + [32] * 18) == [
        ([0, 1, 2, 3], 2, 128, "sequence"),
        ([*range(4, 20)], 8, 32, "rows"),
    ]


def test_no_division_takes_more_microbatches():
    """One item of 20 tokens a row of 32 wastes 12, five fit a row of 100 tokens of 128."""
    lengths = [20] * 48
    assert groups_of(lengths) == [(list(range(48)), 2, 128, "sequence")]


def test_a_mesh_that_does_not_divide_rows_has_one_kind():
    assert groups_of([128, 8, 8], mesh=MeshConfig(fsdp=8), rows=8) == [([0, 1, 2], 8, 128, "sequence")]


def test_compared_items_stay_together():
    """Pairs of 40 and 8 tokens need 48, more than a share."""
    assert groups_of([40, 8] * 2 + [8, 8] * 16, group_size=2) == [
        ([0, 1, 2, 3], 2, 128, "sequence"),
        ([*range(4, 36)], 8, 32, "rows"),
    ]


def test_a_mixed_batch_takes_half_of_the_flops_of_long_rows():
    """Padded FLOPs of Qwen3-0.6B on 8 devices: a row of 32k and 512 items of 512 tokens."""
    model = TransformerConfig(
        vocab_size=151_936,
        hidden_size=1024,
        mlp_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
    )
    lengths, mesh = [32_768] + [512] * 512, make_mesh(MeshConfig(fsdp=1, sequence=8), jax.devices()[:8])
    config = StepConfig(row_tokens=32_768, rows=1)

    def flops(groups):
        return sum(
            update_flops(
                model,
                group.microbatches(config, 1) * group.rows * group.row_tokens,
                group.row_tokens / 2,
                "full",
                with_logits=True,
            )
            for group in groups
        )

    groups = row_groups(items_of(*lengths), config, 1, mesh=mesh)
    together = [groups[0]._replace(items=items_of(*lengths))]
    assert [group.microbatches(config, 1) for group in (*groups, *together)] == [1, 8, 9]
    assert flops(groups) < 0.6 * flops(together)
