"""The reader of compiled modules, on text; test_aot holds it against compiled programs."""

import pytest

from trainer_jax.hlo import Module

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
TEXT = """HloModule m

%region (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %b = f32[] parameter(1)
}

%widen (p: bf16[8,4]) -> f32[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %c = f32[8,4]{1,0} convert(%p)
}

%body (t: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %t = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%t), index=1
  %r = f32[8,4]{1,0} all-reduce(%x), channel_id=1, GROUPS, to_apply=%region
  ROOT %o = (s32[], f32[8,4]{1,0}) tuple(%t, %r)
}

%condition (t.1: (s32[], f32[8,4])) -> pred[] {
  %t.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %l = pred[] constant(true)
}

ENTRY %main (q: bf16[8,4]) -> f32[16,4] {
  %q = bf16[8,4]{1,0} parameter(0)
  %f = f32[8,4]{1,0} fusion(%q), kind=kLoop, calls=%widen
  %w = (s32[], f32[8,4]{1,0}) while(%f), condition=%condition, body=%body, TRIPS
  ROOT %g = f32[16,4]{1,0} all-gather(%f), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
}
"""
TRIPS = 'backend_config={"known_trip_count":{"n":"5"}}'


def module(groups: str = "replica_groups={{0,1},{2,3},{4,5},{6,7}}", trips: str = TRIPS) -> Module:
    return Module(TEXT.replace("GROUPS", groups).replace("TRIPS", trips))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "fsdp", "tensor")),
        ("[4,2]<=[8]", ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("fsdp", "tensor")),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", ("data",)),
    ],
)
def test_groups_in_any_notation_name_their_axes(groups, axes):
    found = module(f"replica_groups={groups}").traffic(MESH)
    assert axes in [traffic.axes for traffic in found if traffic.kind == "all-reduce"]


def test_a_loop_counts_as_often_as_it_turns():
    (reduce,) = [t for t in module().traffic(MESH) if t.kind == "all-reduce"]
    assert (reduce.num_calls, reduce.received_bytes) == (5, 5 * 128)  # 2 * 128 * 1 / 2 each
    (once,) = [t for t in module(trips="").traffic(MESH) if t.kind == "all-reduce"]
    assert (once.num_calls, once.received_bytes) == (1, 128)


def test_what_was_bfloat16_counts_as_bfloat16():
    (gather,) = [t for t in module().traffic(MESH) if t.kind == "all-gather"]
    assert (gather.axes, gather.received_bytes) == (("data",), 64)  # of 256 bytes, half, half


def test_devices_alone_send_nothing():
    groups = "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    assert [t.kind for t in module(groups).traffic(MESH)] == ["all-gather"]


def test_an_unknown_notation_is_not_guessed():
    with pytest.raises(ValueError, match="unknown notation"):
        module("replica_groups=mesh['a'=8] {'a':(1)2}").traffic(MESH)


def test_the_largest_arrays_are_those_that_are_made():
    arrays = module().largest(9)
    assert [(a.shape, a.size_bytes, a.widened) for a in arrays] == [
        ("f32[16,4]", 256, False),
        ("f32[8,4]", 128, True),
        ("pred[]", 1, False),
    ]
    assert len(module().largest(1)) == 1
