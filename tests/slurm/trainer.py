#!/usr/bin/env python3
"""Stands in for ``EQLEN_PYTHON`` in ``slurm/train.sbatch``: counts steps, without a model.

``-m megatron_eqlen.cli plan RUN ...`` prints the run folder,
``check --short RUN ...`` leaves RUN/checked-NODE, waits while RUN/hold-check is there, and fails on the
nodes of faults.json's ``unready``.
``train RUN ...``, under ``-m torch.distributed.run`` on several nodes, takes steps, in which the nodes wait
for each other and for all ``rollout.servers``, and the first writes. ``RECIPE run_dir=RUN`` may stand for
RUN.
RUN/faults.json says what goes wrong in which restart, as in ``{"1": {"dies_at": 3, "rank": 1}}``:
    dies_at: it fails in the step after this one
    outlived_at: after this step it wants to write when a later try has written
    holds_at: it waits after this step until RUN/go-on is there
The run folder is held as the real trainer does (``tests/job`` has that). Jobs run it with the system's
Python, so its imports need nothing but the standard library.
"""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

from megatron_eqlen.processes.hold import Hold
from tests.kit.processes import within
from tests.slurm import server

STEPS = 6


class Node:
    """Processes of one node in one try."""

    def __init__(self, run: Path, servers: list[str]) -> None:
        self.run, self.rank = run, int(os.environ["SLURM_PROCID"])
        self.servers = servers
        self.restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        self.fault = faults(run).get(self.restart, faults(run).get("always", {}))
        node = os.environ["SLURMD_NODENAME"]
        self.write("tries.jsonl", {"restart": int(self.restart), "rank": self.rank, "node": node})

    def sync(self) -> None:
        """Take servers back that were started again, like a weight sync."""
        assert all(within(30, lambda url=url: _answers(url)) for url in self.servers)

    def train(self) -> int:
        if (self.run / "export").exists():
            return 0
        hold = Hold(self.run) if self.rank == 0 else None
        while (taken := self.taken()) < STEPS:
            time.sleep(float(os.environ.get("STEP_SECONDS", "0.2")))
            if self.fault.get("dies_at") == taken and self.fault.get("rank", 0) == self.rank:
                return 17
            if self.fault.get("outlived_at") == taken:
                assert within(300, lambda: self.taken() > taken), "no later try"
            if self.fault.get("holds_at") == taken:
                assert within(300, (self.run / "go-on").exists), "nobody lets it go on"
            self.meet(taken)
            self.sync()
            if hold is not None:
                hold.check()
                self.write("metrics.jsonl", {"step": taken + 1, "restart": int(self.restart)})
                if (self.run / "STOP").exists():
                    (self.run / "STOP").rename(self.run / f"stopped-{self.restart}")
            self.meet(taken + 0.5)
            if (self.run / f"stopped-{self.restart}").exists():
                return 0
        if self.rank == 0:
            (self.run / "export").mkdir()
        return 17 if self.fault.get("dies_at") == STEPS else 0

    def taken(self) -> int:
        file = self.run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def meet(self, number: float) -> None:
        """Wait for all nodes, as a collective does: if one is gone, until RUN/peer-lost is there."""
        (self.run / f"met-{self.restart}-{number}-{self.rank}").touch()
        everyone = int(os.environ["SLURM_NTASKS"])
        while len(list(self.run.glob(f"met-{self.restart}-{number}-*"))) < everyone:
            if (lost := self.run / "peer-lost").exists():
                lost.unlink()
                raise ConnectionError("a peer is gone")
            time.sleep(0.02)

    def write(self, name: str, line: dict) -> None:
        with open(self.run / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def faults(run: Path) -> dict:
    path = run / "faults.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True


def main() -> int:
    module, arguments = sys.argv[2], sys.argv[3:]
    if module == "megatron_eqlen.cli":
        command, *rest = arguments
        if command == "check":
            run, node = server.run_folder(rest[1:]), os.environ["SLURMD_NODENAME"]
            (run / f"checked-{node}").touch()
            assert within(300, lambda: not (run / "hold-check").exists())
            return int(node in faults(run).get("unready", []))
        if command == "plan":
            print(f"run folder  {server.run_folder(rest)}")
            return 0
    if module == "megatron_eqlen.engines.server":
        server.main()
    several = int(os.environ["SLURM_NTASKS"]) > 1
    assert module == ("torch.distributed.run" if several else "megatron_eqlen.cli")
    assert "--rdzv-backend=static" in arguments or not several
    assert os.environ.get("PET_NODE_RANK") == os.environ["SLURM_PROCID"]
    assert len(os.environ["EQLEN_SECRET"]) == 32
    recipe = arguments[arguments.index("train") + 1 :]
    listed = [word.partition("=[")[2].rstrip("]") for word in recipe if word.startswith("rollout.servers=")]
    return Node(server.run_folder(recipe), listed[0].split(",") if listed else []).train()


if __name__ == "__main__":
    sys.exit(main())
