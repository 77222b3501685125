"""The parts of parameters that a process holds, and where they lie in a checkpoint's tensors.

Owns which parts of arrays spread over devices this process writes, their copies on the host, and
the way from an index of the tree to one of a file. Must not open files.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from trainer_jax.models.parameters import Path
from trainer_jax.tensor_map import FileTensor

Index = tuple[slice, ...]


class Part:
    """A rectangle of one parameter, on a device until it is asked for."""

    def __init__(self, path: Path, start: tuple[int, ...], data: Any) -> None:
        """`start`: where it begins in each dimension of the whole."""
        self.path, self.start = path, start
        self._data = data
        self._lock = threading.Lock()
        if isinstance(data, jax.Array):
            data.copy_to_host_async()

    def on_host(self) -> np.ndarray:
        """Waits for whatever computes it. Afterwards its device's memory is not needed."""
        with self._lock:
            if not isinstance(self._data, np.ndarray):
                self._data = np.asarray(self._data)
            return self._data

    def release(self) -> None:
        """Forgets the values: they are written."""
        with self._lock:
            self._data = np.empty(0)


def own_parts(params: Any) -> list[Part]:
    """Of a tree of arrays the parts that this process writes: together, all processes' are all.

    Of devices that hold the same part one is asked, of each part another one in turn. Plain numpy
    is one part each.
    """
    parts = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(key.key for key in keys)
        if not isinstance(leaf, jax.Array):
            parts.append(Part(path, (0,) * np.ndim(leaf), np.asarray(leaf)))
            continue
        devices = leaf.sharding.devices_indices_map(leaf.shape)
        starts = sorted({_start(index) for index in devices.values()})
        num_replicas = len(devices) // len(starts)
        parts += [
            Part(path, _start(shard.index), shard.data)
            for shard in leaf.addressable_shards
            if shard.replica_id == starts.index(_start(shard.index)) % num_replicas
        ]
    return parts


def _start(index: Index) -> tuple[int, ...]:
    return tuple(here.start or 0 for here in index)


def by_path(tensors: Iterable[FileTensor]) -> Mapping[Path, Sequence[tuple[FileTensor, int]]]:
    """For each parameter the tensors it goes to, and which of their parts it is there."""
    found = defaultdict(list)
    for tensor in tensors:
        for number, path in enumerate(tensor.paths):
            found[path].append((tensor, number))
    return found


def regions(
    part: Part, tensors: Sequence[tuple[FileTensor, int]]
) -> Iterator[tuple[FileTensor, Index, np.ndarray]]:
    """What of which tensors a part is: values to be assigned to tensor[index]."""
    data = part.on_host()
    for tensor, number in tensors:
        lead = len(tensor.index)
        place = [i - start for i, start in zip(tensor.index, part.start, strict=False)]
        if any(not 0 <= i < size for i, size in zip(place, data.shape, strict=False)):
            continue  # of other layers or experts
        value = data[tuple(place)]
        sizes = zip(part.start[lead:], value.shape, strict=True)
        index = [slice(start, start + size) for start, size in sizes]
        if len(tensor.paths) > 1:  # side by side on the output dimension
            outputs = tensor.shape[-2 if tensor.transposed else -1]
            shift = number * (outputs // len(tensor.paths))
            index[-1] = slice(index[-1].start + shift, index[-1].stop + shift)
        if tensor.transposed:
            index[-2:] = index[:-3:-1]
            value = value.swapaxes(-1, -2)
        if tensor.unit is not None:
            index.insert(tensor.unit, slice(0, 1))
            value = np.expand_dims(value, tensor.unit)
        yield tensor, tuple(index), value
