"""Work of compiled programs, read from their text, and floors of phases: by hand, and by XLA's own count."""

import dataclasses
import functools
import io
import math

import jax
import jax.numpy as jnp
import pytest
from plan_recipe import CONFIG, SMALL
from rich.console import Console

from jaxrl_llm.builders.sizes import make_meshes
from jaxrl_llm.models import abstract, shardings
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.delta import STATE
from jaxrl_llm.models.experts.dispatch import grouped_experts
from jaxrl_llm.models.experts.weights import ExpertWeights
from jaxrl_llm.models.mixer_config import DeltaConfig
from jaxrl_llm.plan.compiled import CollectiveStats, count_collectives, synchronous_collectives
from jaxrl_llm.plan.experts import TILES, tile_trips
from jaxrl_llm.plan.floors import (
    Rows,
    copied_layers,
    forward_floor,
    kernel_flops,
    product_widths,
    rows_flops,
    training_floor,
    work_with_bubble,
)
from jaxrl_llm.plan.hlo import Hints, parse
from jaxrl_llm.plan.phases import phases
from jaxrl_llm.plan.plan import PhaseCost, Plan
from jaxrl_llm.plan.report import floor_table, slice_lines, stage_lines, synchronous_lines
from jaxrl_llm.plan.work import ATTENTION, ProgramWork, count_work
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, TRAIN, bytes_per_device, look_up, with_shardings

HINTS = Hints()


def module_of(*body: str, computations: str = ""):
    return parse(f"{computations}\nENTRY %main (p: f32[]) -> f32[] {{\n" + "\n".join(body) + "\n}\n")


UNROLLED = """\
%body (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %v = f32[8]{0} get-tuple-element(%x), index=1
  %sent = (f32[8]{0}, f32[8]{0}) collective-permute-start(%v), channel_id=1, source_target_pairs={{0,1}}
  %product = f32[4,4]{1,0} dot(f32[4,8]{1,0} %a, f32[8,4]{1,0} %b), lhs_contracting_dims={1}
  %got = f32[8]{0} collective-permute-done(%sent)
  %waits = f32[8]{0} all-reduce(%got), channel_id=2, replica_groups={{0,1}}, metadata={op_name="jit(f)/mlp"}
  %half = f32[4]{0} slice(%got), slice={[0:4]}
  %other = f32[4]{0} all-reduce(%half), channel_id=2, replica_groups={{0,1}}, metadata={op_name="jit(f)/mlp"}
  %fused = f32[4]{0} fusion(%waits), kind=kCustom, calls=%overlapped
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %waits)
}

%overlapped (q: f32[8]) -> f32[16] {
  %q = f32[8]{0} parameter(0)
  %g = f32[16]{0} all-gather(%q), channel_id=3, replica_groups={{0,1}}, dimensions={0}
  ROOT %start = f32[16]{0} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%condition (y: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(5)
  %y = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%y), index=0
  ROOT %lt = pred[] compare(%j, %limit), direction=LT
}
"""
LOOP = "  %w = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%body"


def test_a_loop_that_the_compiler_unrolled_runs_fewer_times():
    """0, 2 and 4 are below 5."""
    module = module_of(LOOP, computations=UNROLLED)
    counts = count_collectives(module, 2)
    assert counts["collective-permute"] == CollectiveStats(3, 3 * 32)
    assert counts["all-gather"] == CollectiveStats(3, 3 * 32)
    assert counts["all-reduce"] == CollectiveStats(6, 3 * 2 * (32 + 16) / 2)  # one channel, two collectives


def test_what_nothing_overlaps_is_named_with_the_operation_it_is_of():
    module = module_of(LOOP, computations=UNROLLED)
    (found,) = synchronous_collectives(module, 2)
    assert found == ("all-reduce", "jit(f)/mlp", 6, 3 * (32 + 16))
    outside = module_of("  %a = f32[8]{0} all-reduce(f32[8]{0} %p), replica_groups={{0,1}}")
    assert synchronous_collectives(outside, 2) == []


def test_a_collective_without_products_between_start_and_end_is_synchronous():
    idle = UNROLLED.replace("dot(", "add(")
    found = synchronous_collectives(module_of(LOOP, computations=idle), 2)
    assert [(one.kind, one.count) for one in found] == [("all-reduce", 6), ("collective-permute", 3)]


SPARSECORE = """\
%gather (q: f32[8]) -> f32[16] {
  %q = f32[8]{0} parameter(0)
  ROOT %g = f32[16]{0} all-gather(%q), channel_id=3, replica_groups={{0,1}}, dimensions={0}
}, execution_thread="sparsecore"

%body (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = (s32[], f32[8]{0}) parameter(0)
  %v = f32[8]{0} get-tuple-element(%x), index=1
  %start = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%gather
FIRST
  %update = ((f32[8]{0}), f32[16]{0}) call-update(%start, %v)
SECOND
  %done = f32[16]{0} call-done(%update)
  ROOT %t = (s32[], f32[8]{0}) tuple(%x, %v)
}
"""


@pytest.mark.parametrize("place", ["FIRST", "SECOND"])
def test_a_sparsecore_gathers_beside_the_products_that_follow_its_operands(place):
    """32 bytes are gathered and 64 written; the kernel reads 32, and its result is in vector memory."""
    kernel = '  %k = f32[4]{0:S(1)} custom-call(%v), custom_call_target="tpu_custom_call"'
    loop = f'{LOOP}, backend_config={{"known_trip_count":{{"n":"3"}}}}'
    module = module_of(loop, computations=SPARSECORE.replace(place, kernel))
    assert bool(synchronous_collectives(module, 2)) == (place == "FIRST")
    assert count_collectives(module, 2) == {"all-gather": CollectiveStats(3, 3 * 32)}
    assert count_work(module, HINTS).memory == 3 * (32 + 64 + 32)


def test_loops_of_unknown_length_take_theirs_from_hints():
    loop = f'{LOOP}, metadata={{op_name="jit(f)/while"}}'
    unknown = module_of(loop, computations=UNROLLED.replace("direction=LT", "direction=NE"))
    hints = Hints({r"^jit\(f\)/while$": 32}, steps=16)
    assert count_collectives(unknown, 2, hints)["collective-permute"] == CollectiveStats(2, 64)


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        (
            "dot(f32[4,8]{1,0} %a, f32[8,2]{1,0} %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            2 * 8 * 8,
        ),
        ("convolution(f32[4,8]{1,0} %a, f32[8,2]{1,0} %b), dim_labels=bf_io->bf", 2 * 8 * 8),
        # A TPU's product with heads: 4 tokens, 8 inputs, 2 outputs in each of 3 heads; the rest is padding.
        (
            "convolution(f32[4,8,1]{2,1,0} %a, f32[3,8,2]{2,1,0} %b), "
            "window={size=3 pad=2_2 rhs_reversal=1}, dim_labels=bf0_0io->b0f",
            2 * 4 * 8 * 2 * 3,
        ),
        (
            'custom-call(f32[4,8]{1,0} %a, f32[8,2]{1,0} %b), custom_call_target="__cublas$gemm", '
            'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}',
            2 * 8 * 8,
        ),
    ],
)
def test_flops_of_products(line, flops):
    shape = "f32[4,3,2]{2,1,0}" if "bf0" in line else "f32[4,2]{1,0}"
    assert count_work(module_of(f"  %c = {shape} {line}"), HINTS).flops == flops


FUSED = """\
%layer (stack: f32[6,8], i: s32[], old: f32[6,8], x: f32[8]) -> (f32[6,8], f32[8]) {
  %stack = f32[6,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %old = f32[6,8]{1,0} parameter(2)
  %x = f32[8]{0} parameter(3)
  %slice = f32[1,8]{1,0} dynamic-slice(%stack, %i, %i), dynamic_slice_sizes={1,8}
  %flat = f32[8]{0} bitcast(%slice)
  %sum = f32[8]{0} add(%flat, %x)
  %row = f32[1,8]{1,0} bitcast(%sum)
  %new = f32[6,8]{1,0} dynamic-update-slice(%old, %row, %i, %i)
  ROOT %both = (f32[6,8]{1,0}, f32[8]{0}) tuple(%new, %sum)
}
"""


RESULTS = "(f32[6,8]{1,0}, f32[8]{0})"
OPERANDS = "(f32[6,8]{1,0}, s32[], f32[6,8]{1,0}, f32[8]{0:T(128)S(1)})"


@pytest.mark.parametrize(
    "lines",
    [
        [f"  %f = {RESULTS} fusion(%stack, %i, %stack, %x), kind=kLoop, calls=%layer"],
        [  # as CUDA's compiler of jax 0.12 writes those that run beside others
            f"  %f = ({OPERANDS}, {RESULTS}, u32[]) fusion-start(%stack, %i, %stack, %x), calls=%layer",
            f"  %g = {RESULTS} fusion-done(%f)",
        ],
    ],
    ids=["fusion", "fusion-start"],
)
def test_memory_traffic_is_that_of_slices_and_updates(lines):
    """A row of the stack is read and a row written, 32 bytes each; x is in vector memory, the sum is not."""
    module = module_of(
        "  %stack = f32[6,8]{1,0} parameter(0)",
        "  %i = s32[] constant(0)",
        "  %x = f32[8]{0:T(128)S(1)} copy(%y)",
        *lines,
        computations=FUSED,
    )
    assert count_work(module, HINTS).memory == 3 * 32 + 4  # and the index


def test_a_stack_that_a_fusion_reads_in_another_tiling_is_read_by_slices():
    """As a TPU7x does, which tiles 16-bit arrays by 16 rows in memory and by 8 in a fusion."""
    tiled = "kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%tile"
    fused = FUSED.replace("(%stack, %i, %i)", "(%read, %i, %i)").replace("(%old, %row", "(%written, %row")
    views = "".join(
        f"  %{name} = f32[6,8]{{1,0}} fusion(%{of}), {tiled}\n"
        for name, of in (("read", "stack"), ("written", "old"))
    )
    fused = fused.replace("  %slice = ", f"{views}  %slice = ")
    tile = (
        "%tile (w: f32[6,8]) -> f32[6,8] {\n  %w = f32[6,8] parameter(0)\n  ROOT %c = f32[6,8] copy(%w)\n}\n"
    )
    module = module_of(
        "  %stack = f32[6,8]{1,0} parameter(0)",
        "  %i = s32[] constant(0)",
        "  %x = f32[8]{0:T(128)S(1)} copy(%y)",
        f"  %f = {RESULTS} fusion(%stack, %i, %stack, %x), kind=kLoop, calls=%layer",
        computations=tile + fused,
    )
    assert count_work(module, HINTS).memory == 3 * 32 + 4


def test_kernels_count_as_their_operands_and_by_their_hints():
    """A kernel of the cache gets that of all layers, and reads its own; updates in place move nothing."""
    call = 'custom_call_target="tpu_custom_call"'
    source = 'metadata={op_name="attention/decode_attention"}'
    module = module_of(
        "  %cache = bf16[4,100]{1,0} parameter(0)",
        "  %q = bf16[10]{0} parameter(1)",
        f"  %w = bf16[4,100]{{1,0}} custom-call(%q, %cache), {call}, "
        "output_to_operand_aliasing={{}: (1, {})}",
        f"  %a = bf16[10]{{0}} custom-call(%q, %cache), {call}, {source}",
        f"  %b = bf16[10]{{0}} custom-call(%q, %cache), {call}, {source}",
    )
    hints = Hints(kernels={"attention": 7.0, "experts": 5.0})
    assert count_work(module, hints) == ProgramWork(flops=7.0, memory=20 + 2 * (20 + 800 + 20))
    work = count_work(module, hints._replace(reads_cache=True))
    assert work == ProgramWork(flops=7.0, memory=20 + (20 + 800 + 20))


def test_a_kernel_with_its_slices_in_a_fusion_counts_its_flops():
    """As CUDA's compiler fuses them: the kernel reads its layer's slice of a stack in place."""
    fused = """\
%sliced (w: f32[6,8]) -> f32[8] {
  %w = f32[6,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} slice(%w), slice={[2:3], [0:8]}
  ROOT %k = f32[8]{0} custom-call(%row), custom_call_target="mosaic_gpu_v2", metadata={op_name="attention/k"}
}
"""
    lines = "  %s = f32[6,8]{1,0} parameter(0)", "  %f = f32[8]{0} fusion(%s), kind=kCustom, calls=%sliced"
    work = count_work(module_of(*lines, computations=fused), Hints(kernels={"attention": 7.0}))
    assert work == ProgramWork(flops=7.0, memory=32 + 32)


@pytest.mark.parametrize(
    "branches", ["branch_computations={%a, %b}", "true_computation=%a, false_computation=%b"]
)
def test_a_kernel_in_a_condition_counts(branches):
    """As compilers of TPUs and of GPUs print it: a pair of chunks of a ring."""
    kernel = 'custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="attention/k"}'
    bodies = f"""\
%a (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %k = f32[8]{{0}} {kernel}
}}
%b (y: f32[8]) -> f32[8] {{
  ROOT %y = f32[8]{{0}} parameter(0)
}}
"""
    lines = "  %p = pred[] parameter(0)", f"  %c = f32[8]{{0}} conditional(%p, %v, %v), {branches}"
    work = count_work(module_of(*lines, computations=bodies), Hints(kernels={"attention": 7.0}))
    assert work == ProgramWork(flops=7.0, memory=32 + 32)


def test_reduce_scatters_of_one_channel_are_several_collectives():
    """Those of `shard_map` share a channel."""
    scatter = "f32[4]{0} reduce-scatter(f32[8]{0} %p), channel_id=1, replica_groups={{0,1}}, dimensions={0}"
    module = module_of(f"  %a = {scatter}", f"  %b = {scatter}")
    assert count_collectives(module, 2) == {"reduce-scatter": CollectiveStats(2, 2 * 16)}


def test_counts_are_those_of_xla_and_a_loop_counts_every_time():
    def step(x, w):
        return jnp.tanh(x @ w), None

    x, stack = jnp.zeros((8, 128)), jnp.zeros((3, 128, 128))
    once = jax.jit(lambda x, w: x @ w).lower(x, stack[0]).compile()
    counted = count_work(parse(once.as_text()), HINTS)
    expected = once.cost_analysis()
    assert (counted.flops, counted.memory) == (expected["flops"], expected["bytes accessed"])
    scanned = jax.jit(lambda x, stack: jax.lax.scan(step, x, stack)[0]).lower(x, stack).compile()
    looped = count_work(parse(scanned.as_text()), HINTS)
    assert looped.flops == 3 * counted.flops
    assert looped.memory >= 3 * counted.memory


def test_floors_of_a_dense_model():
    """4 shards of 16 tokens, two devices each; a layer has 9,216 weights, norms of 80, and a token has 512
    numbers in and out of its products, of which 7 x 32 are hidden states that both devices have, and 96 of
    attention."""
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    rows = Rows(64, 4.0, True)
    flops = 2 * 64 * 2 * 9216 + 2 * 64 * 64 * 8 + 2 * 64 * 32 * 64
    assert product_widths(SMALL, make_mesh(MeshConfig(fsdp=8))) == 2 * (512 + 96)
    assert product_widths(SMALL, mesh) == 2 * (224 + (288 + 96) / 2) == 832
    activations = 2 * 16 * (832 + 32)
    layers, norms, table = 2 * 9216, 2 * 2 * 80, 2 * 32 * 32  # bytes: half of 2-byte weights
    gathers = 0.75 * layers, 0.75 * table
    around = 2 * 16 * 32 * (4 * 2 + 1) / 2  # tokens to the other device of tensor
    assert forward_floor(SMALL, mesh, "bfloat16", rows) == (
        flops / 8, activations + layers + norms + table, sum(gathers) + around
    )  # fmt: skip
    final_norm = 2 * 32
    assert training_floor(SMALL, mesh, "bfloat16", rows, grads=1000.0) == (
        3 * flops / 8,
        3 * (activations + layers + norms + table) + final_norm + 1000,
        3 * gathers[0] + 2 * gathers[1] + 2 * around,
    )
    decoding = forward_floor(SMALL, mesh, "bfloat16", rows, rules=ROLLOUT)
    assert decoding.links == around  # all weights are there


def test_floors_of_experts():
    """2 of 8 experts of 3 x 32 x 16 weights, a quarter of them on a device, which gathers half of each; a
    token is sent to 1.5 other devices and back."""
    c = dataclasses.replace(SMALL, moe=MoEConfig(8, 2, 16))
    mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
    floor = forward_floor(c, mesh, "bfloat16", Rows(64, 4.0, False))
    attention, table = 2 * 2 * 3072 * 7 / 8, 2 * 2048 * 7 / 8
    experts = 2 * 2 * 8 * 3 * 32 * 16 / 4 / 2
    assert floor.links == attention + table + experts + 2 * 8 * 2 * 2 * 1.5 * 32
    assert kernel_flops(c, mesh, Rows(64, 4.0, False))["experts"] == 2 * 64 * 2 * 2 * 3 * 32 * 16 / 8


def test_kernels_of_the_delta_rule_count_apart_from_attention():
    """One layer of each: 4 states of 8 x 16, six FLOPs a number and token, backward twice and the forward
    pass again; attention of 4 keys in 4 heads of 8."""
    delta = DeltaConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    c = dataclasses.replace(SMALL, delta=delta, layer_kinds=("delta", "attention"))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    counted = kernel_flops(c, mesh, Rows(64, 4.0, False), trained=True)
    assert counted[STATE] == 64 * 6 * 4 * 8 * 16 * 4
    assert counted[ATTENTION] == 64 * 2 * 4 * 2 * SMALL.num_heads * SMALL.head_dim * 4.5
    kernel = f'metadata={{op_name="attention/{STATE}/k"}}, custom_call_target="tpu_custom_call"'
    module = module_of("  %q = f32[8]{0} parameter(0)", f"  %k = f32[8]{{0}} custom-call(%q), {kernel}")
    assert count_work(module, Hints(kernels=counted)).flops == counted[STATE]


def test_floors_of_a_pipeline():
    """4 parts of 16 tokens; a device gathers the other half of its stage's layer, and three quarters of the
    embedding. Each of 2 stages sends half of all hidden states to the next, and half to the first or back."""
    mesh, rows = make_mesh(MeshConfig(stage=2, fsdp=2), jax.devices()[:4]), Rows(64, 4.0, False, bubble=0.25)
    floor = forward_floor(SMALL, mesh, "bfloat16", rows)
    assert floor.links == 2 * 9216 / 2 + 2 * 2048 * 3 / 4 + 2 * 16 * 32 * 2
    assert 4 * floor.flops == rows_flops(SMALL, rows)
    computed = work_with_bubble(lambda rows: rows_flops(SMALL, rows), rows._replace(logits=True))
    assert computed == 1.25 * rows_flops(SMALL, rows) + 2 * 64 * 32 * 64
    attention = kernel_flops(SMALL, mesh, rows)[ATTENTION]
    assert attention == 1.25 * kernel_flops(SMALL, mesh, rows._replace(bubble=0.0))[ATTENTION]


def test_the_bubble_is_printed():
    """8 rows on 4 stages of one device: 3 of 11 ticks."""
    plan = Plan(
        "a model", "h100x4", {"stage": 4}, 1e9, phases=[], derived={"rows_per_microbatch": 8}, versions={}
    )
    [line] = stage_lines(plan)
    assert line.startswith(
        "Pipeline: 4 stages compute 8 chunks of a micro-batch in 11 ticks: a bubble of 27%."
    )
    assert not stage_lines(dataclasses.replace(plan, mesh={"fsdp": 4}))
    plan = dataclasses.replace(plan, layers_before_stages=2, copied_layers=1.5 * 2**30)
    assert stage_lines(plan)[1] == (
        "All devices compute the first 2 layers, before the 4 stages; these copy the others' weights, "
        "1.50 GiB among activations."
    )


@pytest.mark.parametrize(("layers", "before"), [(4, 0), (5, 1)])
def test_layers_that_stages_do_not_divide_are_copied(layers, before):
    """Of 5 layers 4 are copied, a quarter of each on a device."""
    c = dataclasses.replace(SMALL, num_layers=layers)
    mesh = make_mesh(MeshConfig(stage=2, fsdp=2), jax.devices()[:4])
    params = with_shardings(abstract(c), shardings(c, mesh, TRAIN))
    size = bytes_per_device(params.layers)
    assert copied_layers(params, mesh.shape) == (before, pytest.approx(before * 4 / 5 * size))
    matrices = 4 * 9216 * layers / 4
    assert matrices < size < 1.1 * matrices


def test_tiles_of_experts_are_counted_at_an_even_load():
    """Two assignments of a token to 4 experts: 100 rows each of 200 tokens are two tiles of 64. Tiles of more
    tokens have 128 rows. Devices that divide the experts gather all tokens, others compute their own."""
    c = dataclasses.replace(SMALL, moe=MoEConfig(4, 2, 16))

    def trips(tokens, **sizes):
        mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
        return tile_trips(c, mesh, TRAIN, "float32", tokens=tokens)

    assert trips(200, fsdp=1) == {TILES: 2}
    assert trips(256, fsdp=1) == trips(256, fsdp=1, expert=2) == {TILES: 1}
    assert trips(2048, fsdp=1) == {TILES: 8} and trips(2048, fsdp=2) == {TILES: 4}
    assert tile_trips(SMALL, make_mesh(MeshConfig()), TRAIN, "float32", tokens=64) == {}


def test_products_in_tiles_are_counted():
    """Three products of the 128 rows of each of 4 experts, and six for the gradients."""
    experts = ExpertWeights(jnp.ones((4, 32, 16)), jnp.ones((4, 32, 16)), jnp.ones((4, 16, 32)))
    chosen, shares = jnp.tile(jnp.arange(4), 128).reshape(1, 256, 2), jnp.ones((1, 256, 2))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def run(h, experts):
        with jax.named_scope("experts"):
            return jnp.sum(jnp.sin(grouped_experts(h, chosen, shares, experts, gated=jnp.multiply)))

    module = parse(run.lower(jnp.ones((1, 256, 32)), experts).compile().as_text())
    counted = lambda trips: count_work(module, Hints(trips)).flops
    assert counted({TILES: 1}) == counted({TILES: 2}) / 2 == 9 * 2 * 512 * 32 * 16


@pytest.mark.slow
def test_phases_have_floors():
    """16 trajectories of 8 tokens in mini-batches of 8 rows; a slot's cache is read once a token."""
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(fsdp=4, tensor=2))
    by_name = {phase.name: phase for phase in phases(config, make_meshes(config))}
    update, decode = by_name["update: accumulate"], by_name["rollout: decode"]
    head = 2 * 64 * 32 * 64
    assert 8 * update.floor.flops == update.flops - head  # logits are computed again, layers are not
    assert 8 * decode.floor.flops == decode.flops
    assert decode.hints.steps == config.rollout.chunk
    weights = 4 * (2 * 9216 + 2048) / 2
    assert decode.floor.memory > weights
    full = dataclasses.replace(config, model=dataclasses.replace(config.model, remat="full"))
    again = {phase.name: phase for phase in phases(full, make_meshes(full))}["update: accumulate"]
    assert again.floor == update.floor and again.flops > update.flops


def test_ratios_and_synchronous_collectives_are_printed():
    waits = {"kind": "all-gather", "source": "jit(f)/mlp/dot_general", "count": 28.0, "bytes": 3.0 * 2**20}
    sent = {"all-reduce": {"count": 1.0, "bytes": 2.0**21, "across": 2.0**20}}
    cost = PhaseCost(
        "update: accumulate", {"activations": 1.0}, 2, "call", 1e12, sent, {}, 1.0, "",
        compiled={"flops": 3e12, "memory": 2.0**30, "links": 2.0**20},
        floor={"flops": 2e12, "memory": 2.0**29, "links": 0.0},
        synchronous=[waits, waits | {"bytes": 100.0}],
    )  # fmt: skip
    plan = Plan("a model", "v5e-4", {}, 1e9, phases=[cost], derived={}, versions={})
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(floor_table(plan))
    row = next(line for line in console.export_text().splitlines() if "accumulate" in line)
    assert [cell.strip() for cell in row.strip("\u2502").split("\u2502")][1:] == [
        "3 T", "2 T", "1.50", "1.00 GiB", "512.00 MiB", "2.00", "1.00 MiB", "-", "-",
    ]  # fmt: skip
    assert synchronous_lines(plan) == [
        "Synchronous in update: accumulate: all-gather, 3.00 MiB (28), of jit(f)/mlp/dot_general"
    ]
    assert slice_lines(plan) == [
        "Between slices or hosts each device sends 2.00 MiB a step: update: accumulate 2.00 MiB."
    ]


def test_a_wide_table_is_not_gathered():
    """8 devices exchange 8 x 4 rows of 128 numbers, not tables of 1024 x 128, with one device's values."""
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    tokens = jax.random.randint(jax.random.key(0), (8, 4), 0, 1024)
    table = jax.random.normal(jax.random.key(1), (1024, 128))
    place, rows = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in (("tensor", "fsdp"), ("fsdp",)))
    look = jax.jit(lambda *args: look_up(*args, jnp.float32, True), in_shardings=(place, rows))
    with jax.set_mesh(mesh):
        compiled = look.lower(table, tokens).compile()
        found = compiled(jax.device_put(table, place), jax.device_put(tokens, rows))
    sent = sum(stats.bytes for stats in count_collectives(parse(compiled.as_text()), 8).values())
    assert sent < 2 * 4 * tokens.size * 128 < 4 * table.size / 8
    assert jnp.array_equal(found, table[tokens])


@pytest.mark.slow
def test_the_gradient_of_a_lookup_is_no_all_reduce_of_tables():
    """8 devices exchange the gradients of tokens, 8 x 4 x 128 numbers, not tables of 1024 x 128; the values
    are those of one device."""
    mesh = make_mesh(MeshConfig(fsdp=8))
    tokens = jax.random.randint(jax.random.key(0), (8, 4), 0, 1024)
    table = jax.random.normal(jax.random.key(1), (1024, 128))
    look = lambda table: look_up(table, tokens, jnp.float32)
    gradient = jax.grad(lambda table: jnp.sum(jnp.sin(look(table))))
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, jax.P(None, ("fsdp",)))
        rows = jax.NamedSharding(mesh, jax.P(("fsdp",)))

        def sharded(table, tokens):
            loss = lambda table: jnp.sum(jnp.sin(look_up(table, tokens, jnp.float32)))
            return jax.grad(loss)(table)

        compiled = (
            jax.jit(sharded, in_shardings=(place, rows), out_shardings=place).lower(table, tokens).compile()
        )
        found = compiled(jax.device_put(table, place), jax.device_put(tokens, rows))
    sent = count_collectives(parse(compiled.as_text()), 8)
    others = sum(stats.bytes for kind, stats in sent.items() if kind != "all-gather")
    assert others < 4 * 1024 * 128 / 8
    assert jnp.array_equal(found, gradient(table))
