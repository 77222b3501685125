"""Plain values as bytes, and bytes as messages: how the host and sandboxed programs talk.

Owns the encoding. It carries None, bool, int, float, str, bytes, list, tuple, set, frozenset and
dict, by exact type, and reading it runs nothing: unlike pickle and marshal it is safe on bytes that
an enemy wrote. Runs inside sandboxes too, so it imports nothing.

A value is a tag, a decimal number and a colon, then as many bytes (of a scalar) or values (of a
container). A message is its length in 4 bytes, big endian, and a value.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SCALARS: dict[type, tuple[bytes, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    type(None): (b"n", lambda value: b"", lambda data: None),
    bool: (b"t", lambda value: b"1" if value else b"", bool),
    int: (b"i", lambda value: b"%x" % value, lambda data: int(data, 16)),
    float: (b"d", lambda value: value.hex().encode(), lambda data: float.fromhex(data.decode())),
    str: (
        b"s",
        lambda value: value.encode("utf-8", "surrogatepass"),
        lambda data: data.decode("utf-8", "surrogatepass"),
    ),
    bytes: (b"b", bytes, bytes),
}
_READ = {tag: read for tag, _, read in _SCALARS.values()}
_CONTAINERS: dict[type, bytes] = {list: b"l", tuple: b"u", set: b"e", frozenset: b"z", dict: b"m"}
_MAKE = {tag: kind for kind, tag in _CONTAINERS.items()}


def encode(value: Any, refer: Callable[[Any], tuple[Any, ...]] | None = None) -> bytes:
    """A value as bytes. `refer` describes by a plain tuple what isn't plain.

    Raises:
        TypeError: there is something that isn't plain, and no `refer`.
    """
    kind = type(value)
    if kind in _SCALARS:
        tag, write, _ = _SCALARS[kind]
        data = write(value)
        return b"%s%d:%s" % (tag, len(data), data)
    if kind in _CONTAINERS:
        items = [part for item in value.items() for part in item] if kind is dict else value
        parts = [encode(item, refer) for item in items]
        return b"%s%d:%s" % (_CONTAINERS[kind], len(value), b"".join(parts))
    if refer is None:
        raise TypeError(f"{kind.__name__} is no plain value")
    return b"r1:" + encode(refer(value))


def decode(data: bytes, resolve: Callable[..., Any] | None = None) -> Any:
    """The value; descriptions made by `refer` go through `resolve`.

    Raises:
        ValueError, TypeError, LookupError, RecursionError: these bytes are no value.
    """
    value, end = _decode(data, 0, resolve)
    if end != len(data):
        raise ValueError("bytes after the value")
    return value


def _decode(data: bytes, start: int, resolve: Callable[..., Any] | None) -> tuple[Any, int]:
    colon = data.index(b":", start, start + 24)
    tag, number = data[start : start + 1], int(data[start + 1 : colon])
    position = colon + 1
    if tag in _READ:
        end = position + number
        if not position <= end <= len(data):
            raise ValueError("a value is cut off")
        return _READ[tag](data[position:end]), end
    items = []
    for _ in range(2 * number if tag == b"m" else number):
        item, position = _decode(data, position, resolve)
        items.append(item)
    if tag == b"r" and resolve is not None:
        return resolve(*items[0]), position
    if tag == b"m":
        return dict(zip(items[::2], items[1::2], strict=True)), position
    return _MAKE[tag](items), position


def frame(data: bytes) -> bytes:
    """An encoded value as a message."""
    return len(data).to_bytes(4, "big") + data
