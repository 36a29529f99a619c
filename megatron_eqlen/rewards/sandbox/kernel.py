"""System calls that Python has no function for. Linux only, as the sandbox is."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from itertools import count

libc = ctypes.CDLL(None, use_errno=True)

SET_PDEATHSIG, SET_DUMPABLE, SET_SECCOMP, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
CAPBSET_DROP, SET_SECUREBITS, CAP_AMBIENT = 24, 28, 47
"""prctl options."""
CAP_AMBIENT_CLEAR_ALL = 4
SECUREBITS = 0x01 | 0x02 | 0x20 | 0x40 | 0x80
"""Securebits, locked: root gains no capability by exec, and none survives a change of user or becomes
ambient."""
CAPABILITY_VERSION = 0x20080522


def prctl(option: int, *arguments: int) -> int:
    """Call prctl. Raises OSError."""
    values = (*arguments, 0, 0, 0, 0)[:4]
    return checked(libc.prctl(option, *map(ctypes.c_ulong, values)), f"prctl {option}")


def checked(result: int, what: str) -> int:
    """Return ``result`` of a libc function. Raises OSError if it is negative."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def die_with(parent: int) -> None:
    """Make the kernel kill this process when ``parent``, the thread that forked it, ends."""
    prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before
        os._exit(1)


def drop_capabilities() -> None:
    """Give up every capability, and every way back to one. Raises OSError if the kernel refuses."""
    prctl(SET_NO_NEW_PRIVS, 1)
    try:
        prctl(SET_SECUREBITS, SECUREBITS)
        for capability in count():
            prctl(CAPBSET_DROP, capability)
    except OSError as end:
        # EINVAL: past the last one; EPERM: no right to narrow what an exec gives, which no_new_privs does
        if end.errno not in (errno.EINVAL, errno.EPERM):
            raise
    prctl(CAP_AMBIENT, CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
