"""Read this rank's collectives from torch's flight recorder: NCCL's, and gloo's but for point-to-point
messages. Recording costs at most a microsecond each; reading takes no lock that a collective holds."""

from __future__ import annotations

import json
import os
import pickle
from importlib import import_module

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


def traces() -> dict[str, bytes]:
    """Return the recorded collectives, by the prefix of the files that ``torchfrtrace`` reads."""
    gloo, world = pickle.loads(_c10d._dump_fr_trace()), distributed_c10d._world
    gloo["pg_config"] = {  # gloo leaves it empty
        name: {"name": name, "desc": group.group_desc, "ranks": str(sorted(world.pg_group_ranks[group]))}
        for group, name in list(world.pg_names.items())
    }
    recorded = {"gloo_": pickle.dumps(gloo)}
    if has_nccl():
        recorded["nccl_"] = _c10d._dump_nccl_trace()
    return recorded


def has_nccl() -> bool:
    return hasattr(_c10d, "_dump_nccl_trace_json")
