"""Number formats as the engine computes with them: weights, activations, the KV cache.

Owns the decoding of packed weights, the quantization of activations, the storage of the KV cache
and the one matrix product that everything uses. Must not know a model or a file.

All arithmetic is float32 on values that the format can represent: products of bfloat16, E4M3 and
E2M1 numbers are exact in float32, and sums are accumulated in float32 as tensor cores do. Results
between operations are rounded to bfloat16.

Formats
    NVFP4  E2M1 codes (sign, 3 bits), two per byte, the even column in the low nibble; one E4M3
           scale per 16 columns, one float32 scale per tensor: w = e2m1 * sf * scale_2
    FP8    E4M3 codes, one float32 multiplier per 128 x 128 block
    BF16   as is

Shape letters: N tokens, I inputs, O outputs, P parts of a split reduction, S inputs of a part,
L context, `...` leading dimensions (experts).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from contracts.errors import BadInputError
from contracts.types import KvFormat, WeightFormat

FP8_BLOCK = 128
NVFP4_BLOCK = 16
MXFP8_BLOCK = 32
E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEAST_AMAX = 1e-10  # keeps the scale of an all-zero activation group finite


class ActivationFormat(enum.StrEnum):
    """What activations are quantized to before a product with weights of the same format."""

    NONE = "none"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a group computes. `exact` switches all rounding off (float32 throughout, for tests)."""

    kv_format: KvFormat = KvFormat.BF16
    activation_format: ActivationFormat = ActivationFormat.NONE
    split_k: int = 1
    exact: bool = False

    def __post_init__(self) -> None:
        if self.split_k < 1:
            raise BadInputError("split_k", expected="at least 1", found=self.split_k)

    def round(self, x: Tensor) -> Tensor:
        """x rounded to bfloat16, kept as float32."""
        return x if self.exact else x.bfloat16().float()

    def quantizes(self, format: WeightFormat) -> bool:
        """Whether activations are quantized for weights of this format."""
        return (format, self.activation_format) in (
            (WeightFormat.FP8_BLOCK, ActivationFormat.FP8),
            (WeightFormat.NVFP4, ActivationFormat.NVFP4),
        )


def round_e4m3(x: Tensor) -> Tensor:
    """Float32 rounded to the nearest E4M3 value, ties to even, saturating at 448.

    Equal to a cast to float8_e4m3fn and back, and many times faster on a CPU.
    """
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    bits = x.view(torch.int32)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)).bitwise_and_(~0xFFFFF).view(torch.float32)
    subnormal = (x + 24576.0) - 24576.0  # 1.5 * 2**14: its unit in the last place is 2**-9
    return torch.where(x.abs() < 2.0**-6, subnormal, normal)


def round_e2m1(x: Tensor) -> Tensor:
    """Float32 rounded to the nearest E2M1 value, ties to even, saturating at 6."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def decode_nvfp4(packed_OxJ: Tensor, scale_OxB: Tensor) -> Tensor:
    """uint8 [O, I/2] and float8_e4m3fn [O, I/16] to float32 [O, I], without the tensor's scale."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    low, high = packed_OxJ & 15, packed_OxJ >> 4
    codes_OxI = torch.stack([low, high], dim=-1).flatten(-2)
    return table[codes_OxI.int()] * scale_OxB.float().repeat_interleave(NVFP4_BLOCK, dim=-1)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One decoded weight: `values` carries everything but `scale`.

    `scale` is None (bf16, mxfp8), float32 [ceil(O/128), ceil(I/128)] (fp8-block), [O, 1]
    (fp8-channel) or a scalar (nvfp4); kernels apply it to the accumulator, not to the values.
    """

    format: WeightFormat
    values_OxI: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Linear:
    """y = x W^T, its reduction cut into P parts whose float32 sums are added in order."""

    format: WeightFormat
    quantizes: bool
    parts: Tensor  # float32 [..., P, S, O]
    scale: Tensor | None  # float32 [..., P or 1, 1, O]
    blocks: Tensor | None  # int64 [P]: which scale block of the inputs a part lies in (fp8-block)

    @staticmethod
    def of(weights: Sequence[Weight], precision: Precision) -> Linear:
        """Weights of one format that share their inputs, concatenated along the outputs.

        Raises:
            BadInputError: mixed formats, or a reduction that split_k does not divide.
        """
        format = weights[0].format
        if any(weight.format != format for weight in weights):
            raise BadInputError(
                "weights that are multiplied together",
                expected="one format",
                found=", ".join(sorted({str(weight.format) for weight in weights})),
            )
        size = weights[0].values_OxI.shape[1]
        if size % precision.split_k:
            raise BadInputError("split_k", expected=f"a divisor of {size}", found=precision.split_k)
        part = size // precision.split_k
        if format == WeightFormat.FP8_BLOCK and size > FP8_BLOCK:
            part = math.gcd(FP8_BLOCK, part)  # no part straddles two scale blocks
        values_OxI = torch.cat([weight.values_OxI for weight in weights])
        parts = values_OxI.T.reshape(-1, part, len(values_OxI)).contiguous()
        scale = blocks = None
        if format in (WeightFormat.NVFP4, WeightFormat.FP8_CHANNEL):
            columns = [_scale(w).reshape(-1).expand(len(w.values_OxI)) for w in weights]
            scale = torch.cat(columns).reshape(1, 1, -1)
        elif format == WeightFormat.FP8_BLOCK:
            blocks = torch.arange(0, size, part) // FP8_BLOCK
            rows = [
                _scale(w).repeat_interleave(FP8_BLOCK, dim=0)[: len(w.values_OxI)] for w in weights
            ]
            scale = torch.cat(rows).T[blocks].unsqueeze(-2).contiguous()
        return Linear(
            format=format,
            quantizes=precision.quantizes(format),
            parts=parts,
            scale=scale,
            blocks=blocks,
        )

    @staticmethod
    def stack(linears: Sequence[Linear]) -> Linear:
        """Linears of one shape and format with a new leading dimension, for a batched product."""
        first = linears[0]
        scales = [linear.scale for linear in linears if linear.scale is not None]
        return Linear(
            format=first.format,
            quantizes=first.quantizes,
            parts=torch.stack([linear.parts for linear in linears]),
            scale=torch.stack(scales) if scales else None,
            blocks=first.blocks,
        )

    def outputs(self, start: int, end: int) -> Linear:
        """A view of some of the outputs."""
        return Linear(
            format=self.format,
            quantizes=self.quantizes,
            parts=self.parts[..., start:end],
            scale=None if self.scale is None else self.scale[..., start:end],
            blocks=self.blocks,
        )

    def item(self, index: int) -> Linear:
        """A view of one of the stacked linears."""
        return Linear(
            format=self.format,
            quantizes=self.quantizes,
            parts=self.parts[index],
            scale=None if self.scale is None else self.scale[index],
            blocks=self.blocks,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [..., N, I] to float32 [..., N, O], not rounded."""
        token_scale = None
        if self.quantizes:
            x, token_scale = self._quantize(x)
        num_parts = self.parts.shape[-3]
        if num_parts == 1:
            y = x @ self.parts.squeeze(-3)
            if self.scale is not None:
                y = y * self.scale.squeeze(-3)
            return y if token_scale is None else y * token_scale.squeeze(-3)
        x = x.unflatten(-1, (num_parts, -1)).transpose(-3, -2)  # [..., P, N, S]
        y = x @ self.parts
        if self.scale is not None:
            y = y * self.scale
        if token_scale is not None:
            y = y * token_scale
        return y.sum(-3)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values [..., N, I] and what their partial sums are multiplied by [..., P or 1, N, 1]."""
        if self.format == WeightFormat.NVFP4:
            values, scale = quantize_nvfp4(x)
            return values, scale.unsqueeze(-3)
        values, scale = quantize_fp8(x)
        assert self.blocks is not None
        if len(self.blocks) != scale.shape[-1]:
            scale = scale[..., self.blocks]
        return values, scale.transpose(-1, -2).unsqueeze(-1)


def _scale(weight: Weight) -> Tensor:
    assert weight.scale is not None
    return weight.scale


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic scales per token and group of 128 inputs: E4M3 values [..., I], scales [..., I/128].

    x ~ values * scale of its group; scale = amax / 448.
    """
    size = x.shape[-1]
    groups = F.pad(x, (0, -size % FP8_BLOCK)) if size > FP8_BLOCK else x
    groups = groups.unflatten(-1, (-1, min(size, FP8_BLOCK)))
    scale = groups.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_AMAX) / E4M3_MAX
    values = round_e4m3(groups / scale).flatten(-2)
    return values[..., :size], scale.squeeze(-1)


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic scales per token and block of 16 inputs: e2m1 * sf [..., I], token scale [..., 1].

    x ~ values * token scale; the token scale is amax / (6 * 448), the block scale sf is E4M3.
    """
    amax = x.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_AMAX)
    scale = amax / (E2M1_MAX * E4M3_MAX)
    blocks = (x / scale).unflatten(-1, (-1, NVFP4_BLOCK))
    block_scale = round_e4m3(blocks.abs().amax(-1, keepdim=True) / E2M1_MAX)
    divisor = torch.where(block_scale > 0, block_scale, 1.0)
    return (round_e2m1(blocks / divisor) * block_scale).flatten(-2), scale


class KvCache:
    """Keys and values of all slots, stored in the group's KV precision.

    One tensor [layers, 2 * slots, kv heads, max context, head dim]: row `slot` holds the keys,
    row `num_slots + slot` the values. FP8 is stored as E4M3 with scale 1.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_context: int,
        head_dim: int,
        precision: Precision,
    ) -> None:
        self.num_slots = num_slots
        self.max_context = max_context
        if precision.exact:
            dtype = torch.float32
        else:
            fp8 = precision.kv_format == KvFormat.FP8
            dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.data = torch.zeros(
            num_layers, 2 * num_slots, num_kv_heads, max_context, head_dim, dtype=dtype
        )
        self._fp8 = dtype == torch.float8_e4m3fn
        # indexing of 1-byte floats is slow; of bytes it isn't
        self._raw = self.data.view(torch.uint8) if self._fp8 else self.data
        # `read` returns values divided by this power of two; callers fold it into their scales
        self.read_scale = 256.0 if self._fp8 else 1.0

    def write(self, layer: int, rows_M: Tensor, positions_M: Tensor, x_MxKxh: Tensor) -> None:
        """Stores float32 keys (row < num_slots) or values at their positions."""
        if self._fp8:
            x = x_MxKxh.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            x = x_MxKxh.to(self.data.dtype)
        self._raw[layer][rows_M, :, positions_M] = x

    def read(self, layer: int, rows_M: Tensor, length: int) -> Tensor:
        """float32 [M, kv heads, length, head dim], divided by `read_scale`."""
        x = self._raw[layer, :, :, :length].index_select(0, rows_M)
        if not self._fp8:
            return x.float()
        # The bits of E4M3 moved into float16: same sign, exponent bias 15 instead of 7, so the
        # value is 2**-8 of the original, subnormals included. Ten times faster than a cast.
        bits = x.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        return bits.view(torch.float16).float()
