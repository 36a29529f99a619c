"""What torch's flight recorder knows of this rank's collectives: which it has come to, which have not ended.

gloo's and NCCL's record alike, but for point-to-point messages, which gloo's leaves out. Recording costs a
microsecond or less a collective; reading takes no lock that a collective holds.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from torch.distributed import distributed_c10d

_c10d = import_module("torch._C._distributed_c10d")  # its stubs leave the recorder out

SIZE = "2000"
"""Collectives that are remembered. The recorder reads its size when the first process group is made."""


def enable() -> None:
    """Before any process group exists; a size that the environment sets is kept."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", SIZE)


def status() -> str:
    """Changes whenever a collective begins or ends; cheap."""
    dumps = [_c10d._dump_fr_trace_json(includeCollectives=False)]
    if has_nccl():
        dumps.append(_c10d._dump_nccl_trace_json(includeCollectives=False))
    return json.dumps([json.loads(dump).get("pg_status") for dump in dumps])


def collectives() -> list[dict[str, Any]]:
    """This rank's part in each process group that it has used, as ``hang`` describes it."""
    dumps = [_c10d._dump_fr_trace()]
    if has_nccl():
        dumps.append(_c10d._dump_nccl_trace())
    members = {
        str(name): sorted(distributed_c10d._world.pg_group_ranks[group])
        for group, name in list(distributed_c10d._world.pg_names.items())
    }
    return [one for dump in dumps for one in of_entries(pickle.loads(dump).get("entries", ()), members)]


def of_entries(entries: Iterable[dict[str, Any]], members: dict[str, list[int]]) -> Iterator[dict[str, Any]]:
    """The same of a recorder's ``entries``, oldest first; ``members``: the ranks of each group by name."""
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
    frames = [f"{one['filename']}:{one['line']} in {one['name']}" for one in entry.get("frames", ())]
    return {
        "number": entry["collective_seq_id"],
        "operation": entry["profiling_name"],
        "sizes": entry["input_sizes"],
        "at": next((one for one in frames if "/torch/" not in one), ""),
    }


def has_nccl() -> bool:
    return hasattr(_c10d, "_dump_nccl_trace_json")
