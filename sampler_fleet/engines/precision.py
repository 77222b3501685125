"""Number formats as the engine computes with them: weights, activations, the KV cache.

Owns the decoding of packed weights, the quantization of activations, the storage of the KV cache
and the one matrix product that everything uses; `kernels.py` has the loops. Must not know a model
or a file.

All arithmetic is float32 on values that the format can represent: products of bfloat16, E4M3 and
E2M1 numbers are exact in float32, and sums are accumulated in float32 as tensor cores do. Results
between operations are rounded to bfloat16.

Formats
    NVFP4  E2M1 codes (sign, 3 bits), two per byte, the even column in the low nibble; one E4M3
           scale per 16 columns, one float32 scale per tensor: w = e2m1 * sf * scale_2
    FP8    E4M3 codes, one float32 multiplier per 128 x 128 block
    BF16   as is

Shape letters: N tokens, I inputs, O outputs, E experts, P parts of a split reduction, S inputs of
a part, G groups of inputs that share a scale, M rows of a product.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contracts.errors import BadInputError
from contracts.types import KvFormat, WeightFormat
from sampler_fleet.engines import kernels

FP8_BLOCK = 128
NVFP4_BLOCK = 16
MXFP8_BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NO_SCALE = np.empty((0, 0, 0), np.float32)
_NO_TOKEN_SCALE = np.empty((0, 0), np.float32)


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

    def quantizes(self, format: WeightFormat) -> bool:
        """Whether activations are quantized for weights of this format."""
        return (format, self.activation_format) in (
            (WeightFormat.FP8_BLOCK, ActivationFormat.FP8),
            (WeightFormat.NVFP4, ActivationFormat.NVFP4),
        )


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
    """y = x W^T, its reduction cut into P parts whose float32 sums are added in order, rounded.

    It may be stacked over E experts, each of which computes rows of its own.
    """

    format: WeightFormat
    quantizes: bool
    exact: bool
    parts: tuple[Tensor, ...]  # of each expert, float32 [P, S, O]
    scale: np.ndarray  # float32 [E, P, O], or none
    groups: np.ndarray  # int64 [P]: the group of the inputs that a part lies in

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
        groups, scale = np.zeros(size // part, np.int64), _NO_SCALE
        if format in (WeightFormat.NVFP4, WeightFormat.FP8_CHANNEL):
            columns = [_scale(w).reshape(-1).expand(len(w.values_OxI)) for w in weights]
            scale = torch.cat(columns).expand(1, len(groups), -1).contiguous().numpy()
        elif format == WeightFormat.FP8_BLOCK:
            groups = np.arange(0, size, part) // FP8_BLOCK
            rows = [
                _scale(w).repeat_interleave(FP8_BLOCK, dim=0)[: len(w.values_OxI)] for w in weights
            ]
            scale = torch.cat(rows).T[groups].unsqueeze(0).contiguous().numpy()
        return Linear(
            format=format,
            quantizes=precision.quantizes(format),
            exact=precision.exact,
            parts=(parts,),
            scale=scale,
            groups=groups,
        )

    @staticmethod
    def stack(linears: Sequence[Linear]) -> Linear:
        """Linears of one shape and format as one for that many experts."""
        first = linears[0]
        return dataclasses.replace(
            first,
            parts=tuple(itertools.chain.from_iterable(linear.parts for linear in linears)),
            scale=np.concatenate([linear.scale for linear in linears]),
        )

    def __call__(
        self, x: Tensor, *, rows: np.ndarray | None = None, bounds: np.ndarray | None = None
    ) -> Tensor:
        """float32 [N, I] to float32 [N, O].

        With experts, [M, O]: row m is of x[rows[m]], by the expert e with
        bounds[e] <= m < bounds[e + 1].
        """
        token_scale = _NO_TOKEN_SCALE
        if self.quantizes:
            quantize = quantize_nvfp4 if self.format == WeightFormat.NVFP4 else quantize_fp8
            x, scales = quantize(x)
            token_scale = scales.numpy()
        if rows is not None:
            x = x.index_select(0, torch.from_numpy(rows))
            token_scale = token_scale[rows] if self.quantizes else token_scale
        num_rows = x.shape[0]
        num_parts, part, num_outputs = self.parts[0].shape
        x_PxMxS = x.view(num_rows, num_parts, part).transpose(0, 1)
        sums_PxMxO = torch.empty(num_parts, num_rows, num_outputs)
        if bounds is None:
            bounds = np.array([0, num_rows])
            torch.bmm(x_PxMxS, self.parts[0], out=sums_PxMxO)
        else:
            shares = (bounds[1:] - bounds[:-1]).tolist()
            for share, inputs, parts, sums in zip(
                shares,
                x_PxMxS.split_with_sizes(shares, 1),
                self.parts,
                sums_PxMxO.split_with_sizes(shares, 1),
                strict=True,
            ):
                if share:
                    torch.bmm(inputs, parts, out=sums)
        if self.exact and num_parts == 1 and not self.scale.size:
            return sums_PxMxO[0]
        y = torch.empty(num_rows, num_outputs)
        kernels.finish(
            sums_PxMxO.numpy(), bounds, self.scale, token_scale, self.groups, self.exact, y.numpy()
        )
        return y


def _scale(weight: Weight) -> Tensor:
    assert weight.scale is not None
    return weight.scale


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic scales per token and group of 128 inputs: E4M3 values [..., I], scales [..., I/128].

    x ~ values * scale of its group; scale = amax / 448.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    values, scale = torch.empty_like(rows), torch.empty(len(rows), -(-x.shape[-1] // FP8_BLOCK))
    kernels.quantize_fp8(rows.numpy(), values.numpy(), scale.numpy())
    return values.view(x.shape), scale.view(*x.shape[:-1], -1)


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic scales per token and block of 16 inputs: e2m1 * sf [..., I], token scale [..., 1].

    x ~ values * token scale; the token scale is amax / (6 * 448), the block scale sf is E4M3.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    values, scale = torch.empty_like(rows), torch.empty(len(rows), 1)
    kernels.quantize_nvfp4(rows.numpy(), values.numpy(), scale.numpy())
    return values.view(x.shape), scale.view(*x.shape[:-1], 1)


class KvCache:
    """Keys and values of all slots, stored in the group's KV precision.

    One tensor [layers, 2 * slots, kv heads, max context, head dim]: row `slot` holds the keys,
    row `num_slots + slot` the values. FP8 is stored as E4M3 with scale 1. NVFP4 values take the
    place of bfloat16 ones: what they are is emulated, not how few bytes they need.
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
        fp4 = precision.kv_format == KvFormat.NVFP4
        if fp4 and head_dim % NVFP4_BLOCK:
            raise BadInputError(
                "head_dim with an NVFP4 KV cache",
                expected=f"a multiple of {NVFP4_BLOCK}",
                found=head_dim,
            )
        if precision.exact:
            dtype = torch.float32
        else:
            fp8 = precision.kv_format == KvFormat.FP8
            dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.data = torch.zeros(
            num_layers, 2 * num_slots, num_kv_heads, max_context, head_dim, dtype=dtype
        )
        self.num_bytes = self.data.element_size()  # of an element, as `kernels` needs to know
        self.stored_as = 0 if dtype == torch.bfloat16 and fp4 else self.num_bytes
        raw = {1: torch.uint8, 2: torch.uint16, 4: torch.float32}[self.num_bytes]
        self.layers = list(self.data.view(raw).numpy())

    def read(self, layer: int, slot: int, length: int) -> Tensor:
        """Keys and values, float32 [2, kv heads, length, head dim]."""
        stored = self.layers[layer][slot :: self.num_slots, :, :length]
        x = torch.empty(stored.shape)
        kernels.load(stored, self.num_bytes, x.numpy())
        return x
