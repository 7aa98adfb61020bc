"""The seccomp filter of the sandbox: system calls refused in it, as a program that bubblewrap loads.

A process that cannot multiply is bounded by its own limits: RLIMIT_AS and RLIMIT_CPU are per process, and
RLIMIT_NPROC does not hold root. So fork, threads, and memory that RLIMIT_AS does not count are refused, and
with them the kernel's less trodden doors.
"""

from __future__ import annotations

import errno
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {  # name: (number on x86_64, on aarch64); None = it has no such call
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "unshare": (272, 97),
    "setns": (308, 268),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "ptrace": (101, 117),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
X32 = 0x40000000  # x86_64's second set of call numbers


def refuse_filter(machine: str = "") -> bytes:
    """The filter for `machine` ("" = this one).

    Raises:
        ValueError: a processor whose call numbers are not known here.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(f"no list of system calls for {machine}, only for {', '.join(ARCHITECTURES)}")
    column = list(ARCHITECTURES).index(machine)
    numbers = [pair[column] for pair in REFUSED.values() if pair[column] is not None]
    rules = [
        (LOAD, 0, 0, 4),  # seccomp_data.arch: another means 32-bit calls
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # seccomp_data.nr
        (JUMP_AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, KILL),
    ]
    for number in numbers:
        rules += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *rule) for rule in [*rules, (RETURN, 0, 0, ALLOW)])
