"""The seccomp filter of the sandbox: system calls refused in it, as a program that bubblewrap loads.

A process that cannot multiply is bounded by its own limits: RLIMIT_AS and RLIMIT_CPU are per process, and
RLIMIT_NPROC does not hold root. So fork, threads, and memory that RLIMIT_AS does not count are refused, and
so are rarely used system calls. Sockets reach the host (AF_VSOCK), and a listening one holds buffers of any
number of connections, which no limit counts: `socketpair` alone makes one, which asyncio needs, with the
buffer that it has by default.
"""

from __future__ import annotations

import errno
import platform
import socket
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
    "semget": (64, 190),
    "mq_open": (240, 180),
    "ptrace": (101, 117),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "socket": (41, 198),
    "setsockopt": (54, 208),
}
SOCKETPAIR = (53, 199)  # its first argument is the family
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT = 0, 4, 16  # bytes into seccomp_data; arguments are little-endian
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
REFUSE, REFUSE_FAMILY = ERROR | errno.EPERM, ERROR | errno.EAFNOSUPPORT
X32 = 0x40000000  # x86_64's second set of call numbers

Rule = tuple[int, int, int, int]  # operation, rules to skip if true, if false, operand


def refuse_filter(machine: str = "") -> bytes:
    """Return the filter for `machine` ("" = this one).

    Raises:
        ValueError: a processor whose call numbers are not in ARCHITECTURES.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(f"no list of system calls for {machine}, only for {', '.join(ARCHITECTURES)}")
    column = list(ARCHITECTURES).index(machine)
    rules: list[Rule] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),  # another one means 32-bit calls
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, KILL),
    ]
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            rules += [(JUMP_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, REFUSE)]
    rules += [
        (JUMP_EQUAL, 0, 3, SOCKETPAIR[column]),
        (LOAD, 0, 0, ARGUMENT_AT),
        (JUMP_EQUAL, 1, 0, int(socket.AF_UNIX)),
        (RETURN, 0, 0, REFUSE_FAMILY),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)
