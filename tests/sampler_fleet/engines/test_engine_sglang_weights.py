"""Which module of the server a tensor is in, and what must change with it."""

from __future__ import annotations

import dataclasses

import pytest

from contracts.errors import BadInputError
from contracts.types import Manifest, TensorEntry, WeightFormat
from sampler_fleet.engines.sglang_weights import (
    check_has_place,
    check_same_tensors,
    server_module,
    wrong_modules,
)

LAYER = "model.layers.0"
TENSORS = {
    "model.embed_tokens.weight": "a",
    "lm_head.weight": "b",
    f"{LAYER}.self_attn.q_proj.weight": "c",
    f"{LAYER}.self_attn.k_proj.weight": "d",
    f"{LAYER}.mlp.experts.0.gate_proj.weight": "e",
    f"{LAYER}.mlp.experts.11.down_proj.weight_scale_inv": "f",
}
HELD = {
    "model.embed_tokens.weight": "1",
    "lm_head.weight": "2",
    f"{LAYER}.self_attn.qkv_proj.weight": "3",
    f"{LAYER}.self_attn.attn.k_scale": "4",
    f"{LAYER}.mlp.experts.w13_weight": "5",
    f"{LAYER}.mlp.experts.w2_weight": "6",
}


def manifest(**changed: str) -> Manifest:
    entries = (
        TensorEntry(name=n, dtype="BF16", shape=(2,), file="x", start=0, end=4, checksum=checksum)
        for n, checksum in (TENSORS | changed).items()
    )
    return Manifest(version=1, format=WeightFormat.BF16, tensors=tuple(entries))


@pytest.mark.parametrize(
    ("tensor", "module"),
    [
        ("model.norm.weight", "model.norm"),
        (f"{LAYER}.self_attn.v_proj.weight_scale_inv", f"{LAYER}.self_attn.qkv_proj"),
        (f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.self_attn.o_proj"),
        (f"{LAYER}.self_attn.q_norm.weight", f"{LAYER}.self_attn.q_norm"),
        (f"{LAYER}.mlp.gate.weight", f"{LAYER}.mlp.gate"),
        (f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.mlp.gate_up_proj"),
        (f"{LAYER}.mlp.down_proj.weight", f"{LAYER}.mlp.down_proj"),
        (f"{LAYER}.mlp.experts.127.up_proj.weight_scale_2", f"{LAYER}.mlp.experts"),
        (
            f"{LAYER}.mlp.shared_expert.gate_proj.weight",
            f"{LAYER}.mlp.shared_expert.gate_up_proj",
        ),
    ],
)
def test_tensors_are_in_the_modules_that_the_server_fuses(tensor, module):
    assert server_module(tensor) == module


def test_exactly_what_changed_in_the_checkpoint_must_change_in_the_server():
    before, query = manifest(), f"{LAYER}.self_attn.q_proj.weight"
    after = manifest(**{query: "changed"})
    fused, other = f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.experts.w2_weight"
    right, both = HELD | {fused: "9"}, HELD | {fused: "9", other: "9"}
    assert wrong_modules(before, after, (HELD,), (right,)) == []
    assert wrong_modules(before, after, (HELD, HELD), (HELD, right)) == []  # on one rank
    assert wrong_modules(before, after, (HELD,), (HELD,)) == [f"{LAYER}.self_attn.qkv_proj"]
    assert wrong_modules(before, after, (HELD,), (both,)) == [f"{LAYER}.mlp.experts"]
    assert wrong_modules(before, before, (HELD,), (HELD,)) == []


def test_a_tied_head_is_no_module_of_its_own():
    tied = {name: held for name, held in HELD.items() if name != "lm_head.weight"}
    head, changed = manifest(**{"lm_head.weight": "z"}), tied | {"model.embed_tokens.weight": "9"}
    check_has_place(head, (tied,))
    both = manifest(**{"lm_head.weight": "z", "model.embed_tokens.weight": "z"})
    assert wrong_modules(manifest(), both, (tied,), (changed,)) == []


def test_a_tensor_without_a_place_is_refused():
    check_has_place(manifest(), (HELD,))
    with pytest.raises(BadInputError, match=r"model\.extra"):
        check_has_place(manifest(**{"model.extra.weight": "x"}), (HELD,))


def test_weights_that_no_tensor_fills_are_refused():
    untied = manifest()
    tied = dataclasses.replace(
        untied, tensors=tuple(t for t in untied.tensors if t.name != "lm_head.weight")
    )
    with pytest.raises(BadInputError, match="lm_head"):
        check_has_place(tied, (HELD,))
    check_has_place(tied, ({n: h for n, h in HELD.items() if n != "lm_head.weight"},))


def test_names_dtypes_and_shapes_stay():
    check_same_tensors(manifest(), manifest(**{"lm_head.weight": "other bytes"}))
    one = manifest()
    wider = dataclasses.replace(one.tensors[0], shape=(3,))
    for tensors in (one.tensors[1:], (wider, *one.tensors[1:])):
        with pytest.raises(BadInputError, match="embed_tokens"):
            check_same_tensors(one, dataclasses.replace(one, tensors=tensors))
    with pytest.raises(BadInputError, match=r"model\.new"):
        check_same_tensors(one, manifest(**{"model.new.weight": "x"}))
