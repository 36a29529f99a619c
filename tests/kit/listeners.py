"""TCP sockets on which processes listen, as the kernel knows them."""

from __future__ import annotations

import ipaddress
import os
import re
from contextlib import suppress
from pathlib import Path


def listeners(pid: int) -> set[tuple[str, int]]:
    """Return addresses and ports at which a process listens; empty if it is gone."""
    found = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.exists()}
        inodes = {match[1] for name in sockets if (match := re.match(r"socket:\[(\d+)\]", name))}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and inode in inodes:
                    address, _, port = local.partition(":")
                    found.add((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """Return the address that the kernel writes as hexadecimal words of the machine's byte order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
