"""Landlock: limits this process to reading below a few paths, with no access to any other file, port or
socket."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from megatron_eqlen.rewards.sandbox.kernel import SET_NO_NEW_PRIVS, checked, libc, prctl

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System-call numbers, the same on every machine."""
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file rights that the kernel knows, for each ABI version. All are taken away except where a rule allows
one."""
NETWORK_ABI, SCOPE_ABI = 4, 6
BIND_AND_CONNECT, ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3


def abi_version() -> int:
    """Return the kernel's Landlock version, 0 where it has none."""
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def restrict_files(readable: Sequence[str]) -> None:
    """Allow this process only to read, and only below ``readable``. Raises OSError if the kernel has no
    Landlock."""
    abi = abi_version()
    if abi == 0:
        raise OSError("the kernel has no Landlock")
    rights = FILE_RIGHTS[min(abi, max(FILE_RIGHTS))]
    attributes = struct.pack("=Q", rights)
    if abi >= NETWORK_ABI:
        attributes += struct.pack("=Q", BIND_AND_CONNECT)
    if abi >= SCOPE_ABI:
        attributes += struct.pack("=Q", ABSTRACT_SOCKETS_AND_SIGNALS)
    size = ctypes.c_size_t(len(attributes))
    ruleset = checked(libc.syscall(CREATE_RULESET, attributes, size, 0), "landlock: create ruleset")
    for path in readable:
        if os.path.exists(path):
            _allow_reading(ruleset, path)
    prctl(SET_NO_NEW_PRIVS, 1)
    checked(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock: restrict")
    os.close(ruleset)


def _allow_reading(ruleset: int, path: str) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rights = EXECUTE | READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
    rule = struct.pack("=Qi", rights, descriptor)
    checked(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"landlock: rule for {path}")
    os.close(descriptor)
