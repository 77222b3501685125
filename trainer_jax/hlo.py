"""Reading a compiled program's text: what is sent between devices, and the largest arrays.

Owns the parsing of XLA's module text (as `jax.stages.Compiled.as_text` gives it). Must not lower,
compile, or know what the program computes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Collective -> bytes that a device receives, from the bytes of its result and the group's size, by
# the algorithms that send least (rings).
_RECEIVED = {
    "all-gather": lambda size, g: size * (g - 1) / g,
    "all-reduce": lambda size, g: 2 * size * (g - 1) / g,
    "reduce-scatter": lambda size, g: size * (g - 1),
    "all-to-all": lambda size, g: size * (g - 1) / g,
    "collective-permute": lambda size, g: size,
}
_BITS = {"pred": 8, "bf16": 16, "f16": 16}
_ARRAY = re.compile(r"([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_MOVES = ("bitcast", "copy", "reshape", "transpose")  # that change no value
_VIEWS = ("parameter", "get-tuple-element", "bitcast", "while", "call", "conditional", "tuple")


class Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.rest.split(")", 1)[0])

    @property
    def op_name(self) -> str:
        """The name in the traced program."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclass(frozen=True)
class Traffic:
    """What one device receives in a run of the program, of one kind along one set of mesh axes."""

    axes: tuple[str, ...]
    kind: str
    received_bytes: float
    num_calls: int


@dataclass(frozen=True)
class Array:
    """An array of the program. `widened`: bfloat16 that this backend holds as float32."""

    shape: str  # as XLA writes it: f32[8,128]
    size_bytes: float
    op_name: str
    widened: bool


class Module:
    """A compiled module. Loops whose number of turns the compiler does not know count as one."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, dict[str, Instruction]] = {}
        self._roots: dict[str, Instruction] = {}
        self._entry = ""
        current: dict[str, Instruction] = {}
        name = ""
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                name = found[2]
                current = self._computations.setdefault(name, {})
                self._entry = name if found[1] else self._entry
            elif found := _INSTRUCTION.match(line):
                instruction = Instruction(*found.groups())
                current[instruction.name] = instruction
                if line.lstrip().startswith("ROOT "):
                    self._roots[name] = instruction
        self._turns: Counter[str] = Counter()
        self._visit(self._entry, 1)

    def _visit(self, computation: str, turns: int) -> None:
        """Adds up how often each computation runs; those inside fusions are not told apart."""
        self._turns[computation] += turns
        for instruction in self._computations[computation].values():
            if instruction.opcode not in ("while", "call", "conditional"):
                continue
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.rest)
            branches = _BRANCHES.search(instruction.rest)
            called = _CALLED.findall(instruction.rest)
            called += re.findall(r"%([\w.-]+)", branches[1]) if branches else []
            for one in called:
                self._visit(one, turns * (int(trips[1]) if trips else 1))

    def _instructions(self) -> Iterator[tuple[str, Instruction, int]]:
        for computation, turns in self._turns.items():
            for instruction in self._computations[computation].values():
                yield computation, instruction, turns

    def traffic(self, mesh: Mapping[str, int]) -> list[Traffic]:
        """By axes of a mesh whose devices are numbered in row-major order, the most first.

        What was bfloat16 before this backend widened it counts as bfloat16.
        """
        received: Counter[tuple[tuple[str, ...], str]] = Counter()
        calls: Counter[tuple[tuple[str, ...], str]] = Counter()
        for computation, instruction, turns in self._instructions():
            if instruction.opcode not in _RECEIVED:
                continue
            groups = _groups(instruction.rest)
            axes = _axes(groups, mesh)
            if not axes:
                continue
            arrays = _ARRAY.findall(instruction.type)
            operands = instruction.operands
            size = 0.0
            for array, operand in zip(arrays, operands, strict=len(arrays) == len(operands)):
                halved = 2 if self._is_widened(computation, operand) else 1
                size += _size(*array) / halved
            key = axes, instruction.opcode
            received[key] += turns * _RECEIVED[instruction.opcode](size, len(groups[0]))
            calls[key] += turns
        return [Traffic(*key, size, calls[key]) for key, size in received.most_common()]

    def _is_widened(self, computation: str, name: str) -> bool:
        """Whether a float32 array is bfloat16, converted just before."""
        instruction = self._computations[computation].get(name)
        while instruction is not None:
            operands = instruction.operands
            if instruction.opcode == "fusion":
                found = re.search(r"calls=%?([\w.-]+)", instruction.rest)
                computation = found[1] if found else ""
                instruction = self._roots.get(computation)
            elif instruction.opcode == "convert" and instruction.type.startswith("f32"):
                source = self._computations[computation].get(operands[0])
                return source is not None and source.type.startswith("bf16")
            elif instruction.opcode in _MOVES and operands:
                instruction = self._computations[computation].get(operands[0])
            else:
                return False
        return False

    def largest(self, num: int) -> list[Array]:
        """The largest arrays that the program makes, one of each shape."""
        arrays: dict[str, Array] = {}
        for computation, instruction, _ in self._instructions():
            if instruction.opcode in _VIEWS or instruction.type.startswith("("):
                continue
            if found := _ARRAY.match(instruction.type):
                widened = self._is_widened(computation, instruction.name)
                array = Array(found[0], _size(*found.groups()), instruction.op_name, widened)
                arrays.setdefault(array.shape, array)
        return sorted(arrays.values(), key=lambda array: -array.size_bytes)[:num]


def _size(dtype: str, dims: str) -> float:
    """Bytes."""
    found = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype) or int(found[0] if found else 0)
    return math.prod(int(dim) for dim in dims.split(",") if dim) * bits / 8


def _groups(attributes: str) -> list[list[int]]:
    """Devices that exchange something, in any of XLA's notations: a group that stands for all, or
    the pairs of a permutation.
    """
    if found := re.search(r"source_target_pairs=\{(\{.*?\})\}", attributes):
        pairs = re.findall(r"\{(\d+),(\d+)\}", found[1])
        return [[int(source), int(target)] for source, target in pairs if source != target]
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return [[int(i) for i in found[1].split(",")]]
    order = r"\[[\d,]+\](?:T\([\d,]+\))?"
    if found := re.search(rf"replica_groups=\[(\d+),(\d+)\]<=({order})", attributes):
        return [_order(found[3]).reshape(int(found[1]), int(found[2]))[0].tolist()]
    named_mesh = rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\(({order})\))? \{{(.*?)\}}"
    found = re.search(named_mesh, attributes)
    if not found or ":" in found[3]:
        raise ValueError(f"replica groups in an unknown notation: {attributes[:200]}")
    sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", found[1])}
    named = re.findall(r"\w+", found[3])
    ids = _order(found[2]) if found[2] else np.arange(math.prod(sizes.values()))
    index = tuple(slice(None) if name in named else 0 for name in sizes)
    return [ids.reshape(list(sizes.values()))[index].ravel().tolist()]


def _order(notation: str) -> np.ndarray:
    """[4,2]T(1,0): 0 to 7 as [4, 2], transposed, flat."""
    dims, _, transposed = notation.partition("]")
    shape = [int(dim) for dim in dims[1:].split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    if transposed:
        ids = ids.transpose([int(dim) for dim in transposed[2:-1].split(",")])
    return ids.ravel()


def _axes(groups: list[list[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of a group differ."""
    places = [np.unravel_index(group, list(mesh.values())) for group in groups]
    return tuple(
        axis for i, axis in enumerate(mesh) if any(np.ptp(place[i]) > 0 for place in places)
    )
