"""A rank in the test of two ranks that are two replicas or one split engine: ``OLD_MODEL NEW_MODEL``."""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file

from tests.kit.rollout_kit import generate, open_engine, requests


def main(old: Path, new: Path) -> None:
    """Print, on rank 0, the output of a split engine and of two replicas after a sync, a line each."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for size in (1, 2):
        engine = open_engine(old, temperature=1.0, tensor_parallel=size, keep_routes=True)
        generate(engine, requests(4 if size == 2 else 2 + 5 * rank))
        engine.update_weights(iter(load_file(new / "model.safetensors").items()), 1)
        routes: dict[str, list] = {}
        out = generate(engine, requests(8), routes), routes
        engine.close()
        every = [None, None]
        dist.all_gather_object(every, out)
        assert every[0] == every[1]
        dist.barrier()  # the trainer's group must have survived
        if rank == 0:
            print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
