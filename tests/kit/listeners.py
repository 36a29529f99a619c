"""TCP sockets on which processes listen, as the kernel knows them and as docs/cluster.md says."""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
from contextlib import suppress
from pathlib import Path

from tests.kit import ROOT


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


def documented() -> dict[str, set[str]]:
    """Return, for each process of a run, at which addresses it listens on one machine."""
    rows = re.findall(r"^\|(.*)\|$", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    (begin,) = (number for number, row in enumerate(cells) if row[:3] == ["listener", "of", "on one machine"])
    found: dict[str, set[str]] = {}
    for _, of, here, *_ in itertools.takewhile(lambda row: len(row) == 6, cells[begin + 2 :]):
        found.setdefault(of, set()).update(re.findall(r"[\d.]+", here))
    return found
