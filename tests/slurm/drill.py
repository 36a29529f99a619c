"""Real training on a real SLURM of three nodes, struck by faults at random moments.

    python -m tests.slurm.drill --faults 30 --out FOLDER

At the end of each run all its files are checked. Not among the tests, since each start of two trainers with
their engines takes half a minute; ``test_train_sbatch.py`` has each fault once, with a trainer that only
counts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from transformers import AutoModelForCausalLM

from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.record.reader import read_step
from tests.kit import ROOT
from tests.kit.jobs import stop_zygote
from tests.kit.processes import command_line, descendants, running, within
from tests.kit.train_runs import make_home, metrics
from tests.slurm.bed import Bed, missing

STEPS = 40
PROMPTS, STREAMS = 4, 2
"""Prompts and streams per step, of ``make_home``'s recipe."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Drill:
    """One run after the other, until enough faults have struck."""

    def __init__(self, bed: Bed, folder: Path, seed: int) -> None:
        self.bed, self.home, self.random = bed, make_home(folder), random.Random(seed)
        self.seed, self.job, self.run = seed, "", folder
        self.struck: Counter[str] = Counter()
        self.earned: dict[Path, str] = {}
        """Digests of the streams of steps that had been trained when a fault struck."""

    def go(self, faults: int) -> None:
        while self.struck.total() < faults:
            self._submit()
            while self.struck.total() < faults and self._struck_at_random():
                self._remember_streams()
            self._check()

    def _submit(self) -> None:
        self.seed += 1
        self.run = self.home / f"run-{self.seed}"
        arguments = [self.home / "recipe.yaml", f"run_dir={self.run}", f"steps={STEPS}", f"seed={self.seed}"]
        environ = {
            "EQLEN_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "PROCESSES_PER_NODE": "1",
            "MAX_RESTARTS": "1000", "MAX_STALLED": "1000", "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        script = ROOT / "slurm/train.sbatch"
        options = ("--nodes=2", "--partition=low")
        self.job = self.bed.submit(*options, script, *arguments, folder=self.home, **environ)

    def _struck_at_random(self) -> bool:
        """Return True if a fault struck before the run ended."""
        self._wait(lambda: self._state() == "RUNNING" or self._is_over(), 300, "the run starts")
        if within(self.random.uniform(2, 60), self._is_over):
            return False
        fault = self.random.choice(list(FAULTS))
        tries = self.bed.job(self.job)["Restarts"]
        mend = FAULTS[fault](self)
        self._wait(lambda: self.bed.job(self.job)["Restarts"] != tries or self._is_over(), 300, fault)
        mend()
        self.struck[fault] += 1
        print(f"{self.struck.total():3} {fault}: {self.run.name} had taken {self._taken()} steps", flush=True)
        return True

    def _remember_streams(self) -> None:
        for step in range(self._taken()):
            for file in (self.run / f"streams/step-{step:08d}").glob("*.arrow"):
                self.earned.setdefault(file, _digest(file))

    def _check(self) -> None:
        self._wait(self._is_over, 900, "the run ends")
        assert self._state() == "COMPLETED", self._state()
        assert [record["step"] for record in metrics(self.run)] == [*range(1, STEPS + 1)]
        for step in range(STEPS):
            rollouts = read_step(self.run / f"streams/step-{step:08d}")
            assert (
                len(rollouts)
                == PROMPTS * STREAMS
                == len({(rollout.prompt_id, rollout.index) for rollout in rollouts})
            )
            assert all(segment.grade is not None for rollout in rollouts for segment, _ in rollout.ended())
        changed = [file for file, digest in self.earned.items() if _digest(file) != digest]
        assert changed == [], "streams of steps that had been trained"
        for checkpoint in checkpoint_folder.steps(self.run / "checkpoints"):
            checkpoint_folder.verify(checkpoint)
        AutoModelForCausalLM.from_pretrained(self.run / "export")
        assert within(30, lambda: not self._those_of_the_run(running())), "processes run on"
        assert [path for path in self.run.rglob("*") if "partial" in path.name or ".tmp" in path.name] == []
        resumed = sum(record.get("harvest/resumed_tokens", 0) for record in metrics(self.run))
        restarts = self.bed.job(self.job)["Restarts"]
        print(f"{self.run.name}: whole after {restarts} restarts, {resumed:.0f} tokens resumed", flush=True)

    # ---- what the faults need -----------------------------------------------------------------------

    def a_node(self) -> str:
        hosts = self.bed.run("scontrol", "show", "hostnames", self.bed.job(self.job)["NodeList"]).split()
        return self.random.choice(hosts)

    def kill_one(self, node: str) -> None:
        """Kill any process of the run on that node."""
        if mine := self._those_of_the_run(descendants(self.bed.processes[node].pid)):
            os.kill(self.random.choice(mine), signal.SIGKILL)

    def _those_of_the_run(self, pids: Iterable[int]) -> list[int]:
        return [pid for pid in pids if str(self.run) in command_line(pid)]

    def _taken(self) -> int:
        """Return the number of steps that the run has taken."""
        return len(metrics(self.run)) if (self.run / "metrics.jsonl").exists() else 0

    def _state(self) -> str:
        return self.bed.state(self.job)

    def _is_over(self) -> bool:
        return self._state() in ENDED

    def _wait(self, true: Callable[[], bool], seconds: float, what: str) -> None:
        assert within(seconds, true), f"{what}: not within {seconds:.0f} s\n{self.bed.logs()}"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# ---- faults: each strikes, and returns its repair for when the run continues ----------------------------


def process_killed(drill: Drill) -> Callable[[], object]:
    drill.kill_one(drill.a_node())
    return lambda: None


def node_crashes(drill: Drill) -> Callable[[], object]:
    node = drill.a_node()
    drill.bed.crash(node)
    return lambda: drill.bed.start(node)


def node_off_the_network(drill: Drill) -> Callable[[], object]:
    node = drill.a_node()
    drill.bed.cut(node)
    return lambda: drill.bed.heal(node)


def asked_to_stop(drill: Drill) -> Callable[[], object]:
    """Ask the run to stop, as before the time limit."""
    drill.bed.run("scancel", "--batch", "--signal=USR1", drill.job)
    return lambda: None


def preempted(drill: Drill) -> Callable[[], object]:
    drill.bed.run("srun", "--partition=high", "--nodes=3", "--exclusive", "sleep", "1", folder=drill.home)
    return lambda: None


def requeued_by_hand(drill: Drill) -> Callable[[], object]:
    drill.bed.run("scontrol", "requeue", drill.job)
    return lambda: None


def node_drained(drill: Drill) -> Callable[[], object]:
    """Drain the node, then let something fail there."""
    node = drill.a_node()
    drill.bed.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=drill")
    time.sleep(1)
    drill.kill_one(node)
    return lambda: drill.bed.run("scontrol", "update", f"nodename={node}", "state=resume")


FAULTS = {
    fault.__name__: fault
    for fault in (
        process_killed, node_crashes, node_off_the_network, node_drained,
        asked_to_stop, preempted, requeued_by_hand,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments")
    parser.add_argument("--out", type=Path, help="a new folder for the runs; by default one that is removed")
    arguments = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.out or Path(scratch) / "runs"
        folder.mkdir(parents=True)
        with Bed(Path(scratch) / "bed", nodes=3) as bed:
            drill = Drill(bed, folder, arguments.seed)
            drill.go(arguments.faults)
            print(f"{drill.struck.total()} faults: {dict(drill.struck)}")
        stop_zygote()


if __name__ == "__main__":
    main()
