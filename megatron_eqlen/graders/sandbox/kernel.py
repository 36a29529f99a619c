"""System calls that Python has no function for: prctl, capabilities, namespaces, mounts, Landlock (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from itertools import count

libc = ctypes.CDLL(None, use_errno=True)

SET_PDEATHSIG, SET_DUMPABLE, SET_SECCOMP, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
CAPBSET_DROP, SET_SECUREBITS, CAP_AMBIENT = 24, 28, 47
"""prctl options."""
CAP_AMBIENT_CLEAR_ALL = 4
PERSONALITY, ADDR_NO_RANDOMIZE = 0xFFFFFFFF, 0x0040000
SECUREBITS = 0x01 | 0x02 | 0x20 | 0x40 | 0x80
"""Locked securebits: root gains no capability by exec; none survives a change of user or becomes ambient."""
CAPABILITY_VERSION = 0x20080522


def prctl(option: int, *arguments: int) -> int:
    """Call prctl. Raises OSError."""
    # The C function takes five arguments, of which missing ones must be 0.
    values = (*arguments, 0, 0, 0, 0)[:4]
    return checked(libc.prctl(option, *map(ctypes.c_ulong, values)), f"prctl {option}")


def checked(result: int, what: str) -> int:
    """Return ``result`` of a libc function. Raises OSError if it is negative."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


@contextlib.contextmanager
def fixed_addresses() -> Iterator[None]:
    """Start programs from this thread without address randomization, so that equal programs print equal
    addresses. Where the kernel refuses (a container's filter of system calls), nothing changes."""
    before = libc.personality(PERSONALITY)
    libc.personality(before | ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        libc.personality(before)


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
    # All three sets (effective, permitted, inheritable), two words each, are empty.
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


NEW_MOUNTS, NEW_HOST, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = (1 << n for n in (17, 26, 27, 28, 29, 30))
"""Flags of unshare and clone."""
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
"""Flags of mount."""
READ_ONLY, NO_SUID, NO_DEVICES = 1, 2, 4
"""Flags of mount and of mount_setattr."""
DETACH = 2
MOUNT_SETATTR, CURRENT_FOLDER, AT_RECURSIVE = 442, -100, 0x8000


def unshare(flags: int) -> None:
    """Give this process new namespaces. Raises OSError, which names them."""
    names = {NEW_MOUNTS: "mount", NEW_PIDS: "process", NEW_NETWORK: "network", NEW_USER: "user"}
    wanted = ", ".join(name for flag, name in names.items() if flags & flag)
    checked(libc.unshare(flags), f"new namespaces ({wanted})")


def mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    """Call mount. Raises OSError, which names the target."""
    texts = (source.encode(), target.encode(), kind.encode())
    done = libc.mount(*texts, ctypes.c_ulong(flags), options.encode())
    checked(done, f"mount of {source} at {target}")


def restrict_mount(target: str, flags: int, recursive: bool = False) -> None:
    """Add READ_ONLY, NO_SUID or NO_DEVICES to a mount (Linux 5.12). Raises OSError."""
    attributes = struct.pack("=4Q", flags, 0, 0, 0)
    scope, size = AT_RECURSIVE * recursive, ctypes.c_size_t(len(attributes))
    done = libc.syscall(MOUNT_SETATTR, CURRENT_FOLDER, target.encode(), scope, attributes, size)
    checked(done, f"mount_setattr of {target}")


CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System-call numbers, the same on every machine."""
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file rights that the kernel knows, by ABI version. A process keeps only what a rule allows."""
NETWORK_ABI, SCOPE_ABI = 4, 6
BIND_AND_CONNECT, ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3


def restrict_files(readable: Sequence[str]) -> None:
    """Let this process only read, and only below ``readable``. Raises OSError without Landlock."""
    # With the flag 1 the call only tells the version.
    abi = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if abi <= 0:
        raise OSError("the kernel has no Landlock")
    # The structure grows with the version: rights to files, then to the network, then scopes.
    rights = FILE_RIGHTS[min(abi, max(FILE_RIGHTS))]
    attributes = struct.pack("=Q", rights)
    if abi >= NETWORK_ABI:
        attributes += struct.pack("=Q", BIND_AND_CONNECT)
    if abi >= SCOPE_ABI:
        attributes += struct.pack("=Q", ABSTRACT_SOCKETS_AND_SIGNALS)
    size = ctypes.c_size_t(len(attributes))
    ruleset = checked(libc.syscall(CREATE_RULESET, attributes, size, 0), "landlock: create ruleset")
    # All rights are taken away; reading below these paths comes back.
    for path in filter(os.path.exists, readable):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", EXECUTE | READ_FILE | (READ_DIR if os.path.isdir(path) else 0), descriptor)
        checked(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"landlock: rule for {path}")
        os.close(descriptor)
    # Without it the kernel lets only root restrict itself.
    prctl(SET_NO_NEW_PRIVS, 1)
    checked(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock: restrict")
    os.close(ruleset)
