"""System-call filters, as classic BPF: an allowlist for programs, and a list of what commands may not call.

Programs may do what CPython and NumPy need to compute, read files and write to open descriptors; everything
else fails with EPERM: no sockets, no processes, no file made, changed or removed, and no signal to others,
sent or ordered from the kernel (a descriptor's or timer's owner, a parent's death, a poisoned page).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from dataclasses import dataclass, field

from megatron_eqlen.graders.sandbox.kernel import SET_NO_NEW_PRIVS, SET_SECCOMP, prctl

ALLOW, DENY, KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000
NO_SUCH_CALL = 0x00050000 | 38
"""ENOSYS: glibc then falls back from clone3 to clone, whose flags a filter can read."""

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_IF_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_OFFSET, ARCH_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
X32_BIT = 0x40000000
MODE_FILTER = 2

CLONE_THREAD = 0x10000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
O_ASYNC = 0x2000
"""It makes the kernel send signals to a descriptor's owner; a program may never set it."""
THREAD_FLAGS = 0x7D0F00
"""Flags of clone that pthread_create of glibc and musl sets; no namespace, no exit signal."""
SET_FLAGS = 4
HARMLESS_COMMANDS = (0, 1030, 1, 2, 3, 5)
"""fcntl: F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_SETFD, F_GETFL, F_GETLK; and F_SETFL without O_ASYNC. Not
allowed: setting owners, signals, leases, notifications, locks, seals and pipe sizes."""
HARMLESS_ADVICE = (*range(5), 8, 14, 15, 16, 17, 20, 21, 22, 23, 102, 103)
"""madvise: NORMAL to DONTNEED, FREE, (NO)HUGEPAGE, (DONT|DO)DUMP, COLD, PAGEOUT, POPULATE, GUARD. Not
HWPOISON: it kills all who share the page."""
TERMINAL_QUERIES = (0x5401, 0x5450, 0x5451, 0x541B)
"""ioctl requests: TCGETS (is it a terminal?), FIONCLEX, FIOCLEX, FIONREAD."""


@dataclass(frozen=True)
class Calls:
    """System-call numbers of one machine."""

    audit_arch: int
    plain: dict[str, int]
    """Calls allowed with any arguments."""
    openers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(number, argument that holds the flags) of calls allowed for reading."""
    clone: int = 0
    clone3: int = 435
    fcntl: int = 0
    ftruncate: int = 0
    ioctl: int = 0
    madvise: int = 0
    tgkill: int = 0
    prlimit64: int = 0
    socket: int = 0
    pivot_root: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Calls that commands may not make, besides ``REFUSED``."""


REFUSED = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "mount_setattr": 442, "memfd_secret": 447, "open_tree_attr": 467,
}  # fmt: skip
"""Numbers that are the same on every machine."""
NEW_NAMESPACES = 0x7E020000
"""Flags of clone for new namespaces: in one of its own a process has every capability."""
AF_UNIX = 1


X86_64 = Calls(
    audit_arch=0xC000003E,
    plain={
        "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
        "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
        "rt_sigreturn": 15, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21,
        "pipe": 22, "select": 23, "sched_yield": 24, "mremap": 25, "dup": 32, "dup2": 33, "pause": 34,
        "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "exit": 60, "uname": 63,
        "getdents": 78, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98,
        "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
        "getppid": 110, "getpgrp": 111, "sigaltstack": 131, "arch_prctl": 158, "gettid": 186, "time": 201,
        "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218,
        "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
        "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "newfstatat": 262, "readlinkat": 267,
        "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "epoll_pwait": 281,
        "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "getrandom": 318, "membarrier": 324,
        "statx": 332, "rseq": 334, "faccessat2": 439,
    },
    openers={"open": (2, 1), "openat": (257, 2)},
    clone=56, fcntl=72, ftruncate=77, ioctl=16, madvise=28, tgkill=234, prlimit64=302, socket=41,
    pivot_root=155,
    refused={
        "shmget": 29, "ptrace": 101, "syslog": 103, "mount": 165, "add_key": 248, "request_key": 249,
        "keyctl": 250, "unshare": 272, "perf_event_open": 298, "name_to_handle_at": 303,
        "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
        "kcmp": 312, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
    },
)  # fmt: skip
AARCH64 = Calls(
    audit_arch=0xC00000B7,
    plain={
        "getcwd": 17, "eventfd2": 19, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "dup": 23,
        "dup3": 24, "faccessat": 48, "close": 57, "pipe2": 59, "getdents64": 61, "lseek": 62, "read": 63,
        "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68, "pselect6": 72, "ppoll": 73,
        "readlinkat": 78, "newfstatat": 79, "fstat": 80, "exit": 93, "exit_group": 94, "set_tid_address": 96,
        "futex": 98, "set_robust_list": 99, "nanosleep": 101, "getitimer": 102, "setitimer": 103,
        "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "sched_getaffinity": 123,
        "sched_yield": 124, "restart_syscall": 128, "sigaltstack": 132, "rt_sigaction": 134,
        "rt_sigprocmask": 135, "rt_sigreturn": 139, "times": 153, "uname": 160, "getrlimit": 163,
        "getrusage": 165, "gettimeofday": 169, "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175,
        "getgid": 176, "getegid": 177, "gettid": 178, "sysinfo": 179, "brk": 214, "munmap": 215,
        "mremap": 216, "mmap": 222, "mprotect": 226, "getrandom": 278, "membarrier": 283, "statx": 291,
        "rseq": 293, "faccessat2": 439,
    },
    openers={"openat": (56, 2)},
    clone=220, fcntl=25, ftruncate=46, ioctl=29, madvise=233, tgkill=131, prlimit64=261, socket=198,
    pivot_root=41,
    refused={
        "mount": 40, "unshare": 97, "syslog": 116, "ptrace": 117, "shmget": 194, "add_key": 217,
        "request_key": 218, "keyctl": 219, "perf_event_open": 241, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
        "kcmp": 272, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
    },
)  # fmt: skip
MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}


def build_filter(calls: Calls, pid: int) -> bytes:
    """Return the BPF program for the process ``pid``: 8 bytes an instruction."""
    program = _same_machine(calls)
    for number in calls.plain.values():
        # Equal: the next instruction allows; else it is skipped.
        program += [_pack(JUMP_EQUAL, number, 0, 1), _return(ALLOW)]
    for number, argument in calls.openers.values():
        program += _guard(number, [_load_argument(argument), _pack(JUMP_IF_BITS, WRITING, 1, 0)])
    program += _guard(calls.clone, _thread_flags())
    program += _guard(calls.fcntl, _harmless_command())
    program += _allow_values(calls.ftruncate, 0, (1,))  # standard output: a file of the process's own
    program += _allow_values(calls.ioctl, 1, TERMINAL_QUERIES)
    program += _allow_values(calls.madvise, 2, HARMLESS_ADVICE)
    program += _allow_values(calls.tgkill, 0, (pid,))
    program += _allow_values(calls.prlimit64, 0, (0, pid))
    program += [_pack(JUMP_EQUAL, calls.clone3, 0, 1), _return(NO_SUCH_CALL), _return(DENY)]
    return b"".join(program)


def build_command_filter(calls: Calls) -> bytes:
    """Return the BPF program for commands: no namespace, no other process's memory or limits, no memory
    beside the process's own and the folder's, no key, no socket but a Unix one."""
    program = _same_machine(calls)
    for number in (*calls.refused.values(), *REFUSED.values()):
        program += [_pack(JUMP_EQUAL, number, 0, 1), _return(DENY)]
    program += _guard(calls.clone, [_load_argument(0), _pack(JUMP_IF_BITS, NEW_NAMESPACES, 1, 0)])
    program += _allow_values(calls.socket, 0, (AF_UNIX,))
    program += _allow_values(calls.prlimit64, 0, (0,))
    program += [_pack(JUMP_EQUAL, calls.clone3, 0, 1), _return(NO_SUCH_CALL), _return(ALLOW)]
    return b"".join(program)


def machine_calls() -> Calls:
    """Return the table of this machine. Raises OSError if there is none."""
    calls = MACHINES.get(platform.machine())
    if calls is None:
        raise OSError(f"no system-call table for {platform.machine()}")
    return calls


def restrict_system_calls(code: bytes) -> None:
    """Put a filter on this process, permanently. Raises OSError if the kernel has none."""
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: number of instructions, padding, address.
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    prctl(SET_NO_NEW_PRIVS, 1)
    prctl(SET_SECCOMP, MODE_FILTER, ctypes.addressof(program))


def _same_machine(calls: Calls) -> list[bytes]:
    """Kill a process that calls by another machine's numbers; then load the call's number."""
    x32 = [_pack(JUMP_AT_LEAST, X32_BIT, 0, 1), _return(KILL)] if calls is X86_64 else []
    right = _pack(JUMP_EQUAL, calls.audit_arch, 1, 0)
    return [_pack(LOAD, ARCH_OFFSET), right, _return(KILL), _pack(LOAD, NUMBER_OFFSET), *x32]


def _thread_flags() -> list[bytes]:
    """Allow clone only to make a thread: no process, no namespace, no other parent."""
    return [
        _load_argument(0),
        # Without CLONE_THREAD over the next test and ALLOW, to DENY; with another flag, too.
        _pack(JUMP_IF_BITS, CLONE_THREAD, 0, 2),
        _pack(JUMP_IF_BITS, 0xFFFFFFFF ^ THREAD_FLAGS, 1, 0),
    ]


def _harmless_command() -> list[bytes]:
    tests = [
        # Over the other tests and the three instructions of F_SETFL, to ALLOW.
        _pack(JUMP_EQUAL, command, len(HARMLESS_COMMANDS) - i + 2, 0)
        for i, command in enumerate(HARMLESS_COMMANDS)
    ]
    set_flags = [_pack(JUMP_EQUAL, SET_FLAGS, 0, 3), _load_argument(2), _pack(JUMP_IF_BITS, O_ASYNC, 1, 0)]
    return [_load_argument(1), *tests, *set_flags]


def _guard(number: int, check: list[bytes]) -> list[bytes]:
    """Run ``check`` for the call ``number``. To deny, ``check`` jumps to the second instruction after it."""
    body = [*check, _return(ALLOW), _return(DENY)]
    return [_pack(JUMP_EQUAL, number, 0, len(body)), *body]


def _allow_values(number: int, argument: int, values: tuple[int, ...]) -> list[bytes]:
    """Allow the call ``number`` if the argument is one of ``values``, else deny it."""
    # Over the other tests and DENY, to ALLOW.
    tests = [_pack(JUMP_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)]
    body = [_load_argument(argument), *tests, _return(DENY), _return(ALLOW)]
    return [_pack(JUMP_EQUAL, number, 0, len(body)), *body]


def _load_argument(index: int) -> bytes:
    return _pack(LOAD, ARGUMENTS_OFFSET + 8 * index)


def _return(action: int) -> bytes:
    return _pack(RETURN, action)


def _pack(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    # struct sock_filter: code, jump if true, jump if false, value.
    return struct.pack("=HBBI", code, if_true, if_false, value)
