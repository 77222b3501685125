"""What the filter of system calls decides, by an interpreter of its instructions.

That the kernel takes it and decides the same is in test_sandbox.py, for this machine's numbers.
"""

from __future__ import annotations

import struct

import pytest

from sampler_fleet.episodes.seccomp import make_filter

ALLOWED, NOT_PERMITTED, UNKNOWN = 0x7FFF0000, 0x00050001, 0x00050026
X86 = ("x86_64", 0xC000003E)
ARM = ("aarch64", 0xC00000B7)


def decide(
    machine: str, architecture: int, number: int, *arguments: int, filter: bytes = b""
) -> int:
    program = list(struct.iter_unpack("=HBBI", filter or make_filter(machine)))
    padded = (*arguments, *[0] * 6)[:6]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *padded)
    at = value = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        else:
            is_true = {0x15: value == operand, 0x35: value >= operand}[code]
            at += if_true if is_true else if_false


@pytest.mark.parametrize(
    ("machine", "refused", "not_of_pid_1", "priority"),
    [
        (X86, (248, 249, 250, 29), (302, 142, 144, 314, 203), 141),
        (ARM, (217, 218, 219, 194), (261, 118, 119, 274, 122), 140),
    ],
)
def test_decisions(machine, refused, not_of_pid_1, priority):
    special = {*refused, *not_of_pid_1, priority}
    for number in set(range(500)) - special:
        assert decide(*machine, number, 1, 1) == ALLOWED
    for number in refused:
        assert decide(*machine, number) == NOT_PERMITTED
    for number in not_of_pid_1:
        assert decide(*machine, number, 1) == NOT_PERMITTED
        assert decide(*machine, number, 0) == decide(*machine, number, 77) == ALLOWED
        assert decide(*machine, number, 5 << 32 | 1) == NOT_PERMITTED  # the kernel reads 32 bits
    own, server, group, user = (0, 0), (0, 1), (1, 0), (2, 0)
    assert decide(*machine, priority, *own) == ALLOWED
    for which in (server, group, user):
        assert decide(*machine, priority, *which) == NOT_PERMITTED


def test_shared_memory_of_a_container():
    filter = make_filter("x86_64", shared_memory=True)
    assert len(filter) < len(make_filter("x86_64"))
    assert decide(*X86, 29, filter=filter) == ALLOWED
    assert decide(*X86, 250, filter=filter) == NOT_PERMITTED


def test_other_abis_have_other_numbers():
    assert decide("x86_64", 0x40000003, 1) == UNKNOWN  # i386
    assert decide("x86_64", 0xC000003E, 0x40000001) == UNKNOWN  # x32
    assert decide("aarch64", 0x40000028, 1) == UNKNOWN  # arm


def test_machine_with_unknown_numbers():
    assert make_filter("riscv64") == b""
