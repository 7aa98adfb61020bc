"""Collectives in the text of a compiled program: how many, of how many bytes, and between which devices."""

import pytest

from jaxrl_llm.plan.compiled import count_collectives, replica_groups
from jaxrl_llm.plan.hlo import arrays_of, parse

HLO = """\
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[8,16]) -> f32[2,16] {
  %input = f32[8,16]{1,0:T(8,128)} parameter(0)
  %all-reduce.3 = f32[8,16]{1,0:T(8,128)} all-reduce(%input), channel_id=5, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = f32[2,16]{1,0:T(8,128)S(1)} dynamic-slice(%all-reduce.3), dynamic_slice_sizes={2,16}
}

%async.1 (p: bf16[4,16]) -> (bf16[4,16], bf16[16,16]) {
  %p = bf16[4,16]{1,0} parameter(0)
  %all-gather.1 = bf16[16,16]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
  ROOT %start = (bf16[4,16], bf16[16,16]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%async.2 (q: bf16[4,16]) -> bf16[16,16] {
  %q = bf16[4,16]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[16,16]{1,0} all-gather(%q), channel_id=7, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
}

%body (x: (s32[], bf16[4,16], f32[8,16])) -> (s32[], bf16[4,16], f32[8,16]) {
  %x = (s32[]{:T(128)}, bf16[4,16]{1,0}, /*index=2*/f32[8,16]{1,0}) parameter(0)
  %w = bf16[4,16]{1,0} get-tuple-element(%x), index=1
  %g = f32[8,16]{1,0} get-tuple-element(%x), index=2
  %fusion.1 = (bf16[4,16], bf16[16,16]) fusion(%w), kind=kCustom, calls=%async.1
  %fusion.2 = bf16[16,16]{1,0} fusion(%w), kind=kCustom, calls=%async.2
  %fusion.3 = f32[2,16]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %out = (s32[], bf16[4,16], f32[8,16]) tuple(%x, %w, %g)
}

%condition (y: (s32[], bf16[4,16], f32[8,16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(28)
  %y = (s32[]{:T(128)}, bf16[4,16]{1,0}, f32[8,16]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%y), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (t: (s32[], bf16[4,16], f32[8,16])) -> f32[8,16] {
  %t = (s32[]{:T(128)}, bf16[4,16]{1,0}, f32[8,16]{1,0}) parameter(0)
  %loop = (s32[]{:T(128)}, bf16[4,16]{1,0}, f32[8,16]{1,0}) while(%t), condition=%condition, body=%body
  %g = f32[8,16]{1,0} get-tuple-element(%loop), index=2
  %start = (f32[8,16]{1,0}, f32[8,16]{1,0}) collective-permute-start(f32[8,16]{1,0} %g), channel_id=9, source_target_pairs={{0,1},{1,0}}
  %done = f32[8,16]{1,0} collective-permute-done(%start)
  ROOT %all = f32[8,16]{1,0} all-reduce(%done), replica_groups=[1,8]<=[8], to_apply=%add
}
"""  # noqa: E501


def test_collectives_are_counted_with_their_loops_and_asynchronous_ones_once():
    assert count_collectives(parse(HLO), devices=8) == {
        "all-gather": (28, 28 * 4 * 16 * 2 * 3, 0),  # 4 devices: its own shard to 3 others
        "reduce-scatter": (28, 28 * 8 * 16 * 4 * 3 / 4, 0),
        "collective-permute": (1, 8 * 16 * 4, 0),
        "all-reduce": (1, 2 * 8 * 16 * 4 * 7 / 8, 0),
    }


@pytest.mark.parametrize(
    ("slices", "across"),
    [
        # The groups of four are slices. Of 512 bytes, the first stage leaves each of 4 devices 128.
        ([0, 0, 0, 0, 1, 1, 1, 1], {"all-reduce": 2 * 128 / 2}),
        # Two devices of each group are in each slice, and the pair of the permute is in two.
        (
            [0, 1, 0, 1, 0, 1, 0, 1],
            {
                "all-gather": 28 * 128,
                "reduce-scatter": 28 * 256 / 2,
                "collective-permute": 512,
                "all-reduce": 2 * 128 / 2,
            },
        ),
    ],
    ids=["groups within slices", "groups across slices"],
)
def test_bytes_between_slices_by_hand(slices, across):
    counted = count_collectives(parse(HLO), 8, slices=slices)
    assert {kind: stats.across for kind, stats in counted.items() if stats.across} == across


HOSTS_SEND = """\
HloModule jit_add

ENTRY %main (x: f32[1,256,512]) -> f32[256,512] {
  %x = f32[1,256,512]{2,1,0} parameter(0)
  %token = token[] after-all()
  %cast = f32[128,8,128]{2,1,0} bitcast(%x)
  %send = (f32[128,8,128]{2,1,0}, u32[], token[]) send(%cast, %token), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[128,8,128]{2,1,0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %got = (f32[128,8,128]{2,1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %value = f32[128,8,128]{2,1,0} get-tuple-element(%got), index=0
  ROOT %sum = f32[256,512]{1,0} bitcast(%value)
}
"""  # noqa: E501


@pytest.mark.parametrize(("slices", "factor"), [(2, 1), (4, 1.5)])
def test_what_the_hosts_of_tpu_slices_send_is_counted(slices, factor):
    """As the TPU compiler writes a sum over two slices: each device adds its part to its peers' parts."""
    sent = 4 * 256 * 512 * factor
    numbers = [device // 4 for device in range(4 * slices)]
    assert count_collectives(parse(HOSTS_SEND), 4 * slices, slices=numbers) == {"all-reduce": (1, sent, sent)}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,2},{2,0}}", [[0, 2], [2, 0]]),
    ],
)
def test_groups_of_devices_in_every_form(text, groups):
    assert replica_groups(f"channel_id=1, {text}, dimensions={{0}}", 4) == groups


def test_a_loop_that_the_compiler_has_counted_and_one_of_unknown_length():
    counted = HLO.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert count_collectives(parse(counted), 8)["all-gather"].count == 5
    unknown = HLO.replace("direction=LT", "direction=NE")
    assert count_collectives(parse(unknown), 8)["all-gather"].count == 1


def test_sizes_of_shapes():
    arrays = arrays_of("(f32[2,3]{1,0:T(8,128)}, bf16[4], pred[], s8[16]{0}, u32[]{:S(2)})")
    assert sum(array.bytes for array in arrays) == 24 + 8 + 1 + 16 + 4
