"""The system calls that a sandbox refuses, as a seccomp filter.

Owns the list and its assembly into classic BPF (linux/seccomp.h, linux/filter.h). It has only what
namespaces, user ids and the supervisor's own state leave open:

- keys outlive the sandbox, and the next one under that user id could read them;
- SysV shared memory belongs to no process, so that nothing frees it when memory runs out;
- limits and priorities of pid 1: it has the same user id as the commands, and whoever starves it
  makes a failure of the infrastructure out of a reward of 0.

Bubblewrap installs it; in a container the supervisor does, so that this runs there, too.
"""

from __future__ import annotations

import platform
import struct

_REFUSED = ("add_key", "request_key", "keyctl")
_SHARED_MEMORY = "shmget"
_NOT_OF_PID_1 = (
    *("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setattr", "sched_setaffinity"),
)
_PRIORITY = "setpriority"  # (which, who, value); which 0: of a process
_ARCHITECTURES = {  # AUDIT_ARCH_* of linux/audit.h, and numbers of asm/unistd.h
    "x86_64": (
        0xC000003E,
        {
            **{"add_key": 248, "request_key": 249, "keyctl": 250, "shmget": 29},
            **{"prlimit64": 302, "sched_setparam": 142, "sched_setscheduler": 144},
            **{"sched_setattr": 314, "sched_setaffinity": 203, "setpriority": 141},
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            **{"add_key": 217, "request_key": 218, "keyctl": 219, "shmget": 194},
            **{"prlimit64": 261, "sched_setparam": 118, "sched_setscheduler": 119},
            **{"sched_setattr": 274, "sched_setaffinity": 122, "setpriority": 140},
        },
    ),
}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF: ld abs, jeq, jge, ret
_NUMBER, _ARCH, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24  # in struct seccomp_data, low words
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
_X32 = 0x40000000  # numbers of the x32 ABI begin here


def make_filter(machine: str = platform.machine(), *, shared_memory: bool = False) -> bytes:
    """The filter's instructions; b"" for a machine whose numbers aren't known.

    `shared_memory` allows that of SysV: a container's ends with the container.
    """
    if machine not in _ARCHITECTURES:
        return b""
    architecture, numbers = _ARCHITECTURES[machine]
    program = [
        *_unless(_ARCH, architecture, _ENOSYS),  # other ABIs have other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ENOSYS),
    ]
    for name in _REFUSED if shared_memory else (*_REFUSED, _SHARED_MEMORY):
        program += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _EPERM)]
    for name in _NOT_OF_PID_1:
        program += _case(numbers[name], _if(_ARGUMENT_0, 1, _EPERM))
    own = [*_unless(_ARGUMENT_0, 0, _EPERM), *_if(_ARGUMENT_1, 1, _EPERM)]
    program += [*_case(numbers[_PRIORITY], own), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_Instruction = tuple[int, int, int, int]  # code, instructions to skip if true, if false, operand


def _if(offset: int, value: int, result: int) -> list[_Instruction]:
    return [(_LOAD, 0, 0, offset), (_EQUAL, 0, 1, value), (_RETURN, 0, 0, result)]


def _unless(offset: int, value: int, result: int) -> list[_Instruction]:
    return [(_LOAD, 0, 0, offset), (_EQUAL, 1, 0, value), (_RETURN, 0, 0, result)]


def _case(number: int, body: list[_Instruction]) -> list[_Instruction]:
    """What is done for one system call, which is allowed at the end."""
    return [(_EQUAL, 0, len(body) + 1, number), *body, (_RETURN, 0, 0, _ALLOW)]
