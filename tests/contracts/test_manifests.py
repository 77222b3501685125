"""The text of a manifest: all of it is vouched for, and a large one stays small and quick."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import codec
from contracts.errors import RetryError
from contracts.manifests import manifest_from_text, manifest_to_text
from contracts.rpc import MAX_MESSAGE_BYTES
from contracts.types import FileEntry, Manifest, TensorEntry, WeightFormat


def tensor(number: int, **changed: object) -> TensorEntry:
    given: dict = {
        "name": f"model.layers.{number // 1536}.mlp.experts.{number % 1536}.up_proj.weight",
        **{"dtype": "U8", "shape": (1536, 2048), "file": "model-00012-of-00118.safetensors"},
        **{"start": number << 20, "end": (number + 1) << 20, "checksum": f"{number**9:032x}"[-32:]},
    }
    return TensorEntry(**{**given, **changed})


def manifest(num_tensors: int = 3) -> Manifest:
    return Manifest(
        version=7,
        format=WeightFormat.NVFP4,
        recipe="modelopt",
        files=(FileEntry(name="größe.json", num_bytes=2**40, checksum="ab"),),
        tensors=(tensor(0, shape=()), *(tensor(n) for n in range(1, num_tensors))),
    )


TEXT = manifest_to_text(manifest())


def test_the_text_is_the_manifest() -> None:
    assert manifest_from_text(TEXT) == manifest()
    empty = Manifest(version=1, format=WeightFormat.BF16)
    assert manifest_from_text(manifest_to_text(empty)) == empty


@given(position=st.integers(0, 8 * len(TEXT) - 1))
def test_any_flipped_bit_is_found(position: int) -> None:
    changed = bytearray(TEXT)
    changed[position // 8] ^= 1 << position % 8
    with pytest.raises(RetryError, match="not those of its checksum"):
        manifest_from_text(bytes(changed))


@pytest.mark.parametrize("text", [b"", b"{}", TEXT[:-1], TEXT + b"\n", TEXT[:60]])
def test_what_is_no_whole_text_is_refused(text: bytes) -> None:
    with pytest.raises(RetryError, match="not those of its checksum"):
        manifest_from_text(text)


@pytest.mark.parametrize(
    "changed", [{"shape": (1.5,)}, {"start": "0"}, {"name": 3}, {"end": True}, {"file": None}]
)
def test_other_types_than_ours_are_refused(changed: dict) -> None:
    """A peer can compute a checksum too."""
    odd = Manifest(version=1, format=WeightFormat.BF16, tensors=(tensor(1, **changed),))
    with pytest.raises(RetryError, match="another software version"):
        manifest_from_text(manifest_to_text(odd))


def test_any_flipped_bit_of_a_message_is_found() -> None:
    whole = codec.manifest_to_pb(manifest()).content
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 0x10
        message = codec.weights_pb2.Manifest(content=bytes(changed))
        try:
            same = codec.manifest_from_pb(message) == manifest()
        except RetryError:
            same = True
        assert same, position  # a bit of zstd's header that changes nothing may flip


def test_a_message_that_would_unpack_to_too_much_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(codec, "MAX_MANIFEST_BYTES", len(TEXT) - 1)
    with pytest.raises(RetryError, match="are the most"):
        codec.manifest_from_pb(codec.manifest_to_pb(manifest()))


def test_a_large_mixture_is_far_from_the_limit_of_a_message() -> None:
    """60 layers of 512 experts have 370,000 tensors; so many as protobuf messages had 57 MiB."""
    num = 20_000
    message = codec.manifest_to_pb(manifest(num))
    assert message.ByteSize() * 370_000 / num < MAX_MESSAGE_BYTES / 3
    assert len(codec.manifest_from_pb(message).tensors) == num
