"""Landlock: from here on this process can read below a few paths, and touch no other file, port or
socket.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System-call numbers, the same on every machine."""
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""By ABI version: all file rights the kernel knows; every one is taken away unless a rule gives it back."""
NETWORK_ABI, SCOPE_ABI = 4, 6
BIND_AND_CONNECT, ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3

_libc = ctypes.CDLL(None, use_errno=True)


def abi_version() -> int:
    """The kernel's Landlock version, 0 where it has none."""
    return max(0, _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def restrict_files(readable: Sequence[str]) -> None:
    """Leave this process only reading below ``readable``. Raises OSError where the kernel has no
    Landlock.
    """
    abi = abi_version()
    if abi == 0:
        raise OSError("the kernel has no Landlock")
    rights = FILE_RIGHTS[min(abi, max(FILE_RIGHTS))]
    attributes = struct.pack("=Q", rights)
    if abi >= NETWORK_ABI:
        attributes += struct.pack("=Q", BIND_AND_CONNECT)
    if abi >= SCOPE_ABI:
        attributes += struct.pack("=Q", ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = _check(
        _libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "create ruleset"
    )
    for path in readable:
        if os.path.exists(path):
            _allow_reading(ruleset, path)
    pr_set_no_new_privs, zero = 38, ctypes.c_ulong(0)
    _check(_libc.prctl(pr_set_no_new_privs, ctypes.c_ulong(1), zero, zero, zero), "no_new_privs")
    _check(_libc.syscall(RESTRICT_SELF, ruleset, 0), "restrict")
    os.close(ruleset)


def _allow_reading(ruleset: int, path: str) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rights = EXECUTE | READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
    rule = struct.pack("=Qi", rights, descriptor)
    _check(_libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"rule for {path}")
    os.close(descriptor)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {what}")
    return result
