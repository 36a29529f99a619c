"""Read this rank's collectives from torch's flight recorder: the entered and the unfinished ones.

gloo and NCCL record in the same format; gloo leaves out point-to-point messages. Recording costs at most a
microsecond per collective; reading takes no lock that a collective holds.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from torch.distributed import distributed_c10d

_c10d = import_module("torch._C._distributed_c10d")  # missing in its stubs

SIZE = "2000"
"""Number of recorded collectives. The recorder reads it when the first process group is made."""


def enable() -> None:
    """Enable the recorder. Call before any process group exists; a size that the environment sets is kept."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", SIZE)


def status() -> str:
    """Return a text that changes whenever a collective begins or ends; cheap."""
    dumps = [_c10d._dump_fr_trace_json(includeCollectives=False)]
    if has_nccl():
        dumps.append(_c10d._dump_nccl_trace_json(includeCollectives=False))
    return json.dumps([json.loads(dump).get("pg_status") for dump in dumps])


def collectives() -> list[dict[str, Any]]:
    """Return this rank's state in each process group that it has used, in the format of ``hang``."""
    dumps = [_c10d._dump_fr_trace()]
    if has_nccl():
        dumps.append(_c10d._dump_nccl_trace())
    members = {
        str(name): sorted(distributed_c10d._world.pg_group_ranks[group])
        for group, name in list(distributed_c10d._world.pg_names.items())
    }
    return [state for dump in dumps for state in of_entries(pickle.loads(dump).get("entries", ()), members)]


def of_entries(entries: Iterable[dict[str, Any]], members: dict[str, list[int]]) -> Iterator[dict[str, Any]]:
    """Yield the state in each process group from a recorder's ``entries``, oldest first. ``members``: the
    ranks of each group by name."""
    entries = list(entries)
    forgotten = bool(entries) and entries[0]["record_id"] > 0
    by_group: dict[str, list[dict[str, Any]]] = {name: [] for name in members}
    for entry in entries:
        by_group.setdefault(entry["process_group"][0], []).append(entry)
    for name, mine in by_group.items():
        open_ = next((entry for entry in mine if not entry["retired"]), None)
        numbered = [entry["collective_seq_id"] for entry in mine if not entry["is_p2p"]]
        if not mine and not forgotten:
            continue
        described = mine[-1]["process_group"][1] if mine else ""
        yield {
            "group": name,
            "called": described if described not in ("", "undefined") else name,
            "ranks": members.get(name, []),
            "entered": max(numbered) if numbered else None if forgotten else 0,
            "waits_in": open_ and _waited(open_),
        }


def _waited(entry: dict[str, Any]) -> dict[str, Any]:
    frames = [f"{frame['filename']}:{frame['line']} in {frame['name']}" for frame in entry.get("frames", ())]
    return {
        "number": entry["collective_seq_id"],
        "operation": entry["profiling_name"],
        "sizes": entry["input_sizes"],
        "at": next((frame for frame in frames if "/torch/" not in frame), ""),
    }


def has_nccl() -> bool:
    return hasattr(_c10d, "_dump_nccl_trace_json")
