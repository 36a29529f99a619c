"""Runs a sweep on this machine, one run or several at a time, each in a process that dies with this one: the
same command leaves finished runs alone and resumes the others from their checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_eqlen.experiments.cells import Cell, Plan
from megatron_eqlen.processes.lifeline import named
from megatron_eqlen.report.format import duration

LOG = "train.log"
"""File of a run's output, in its folder."""
LAST_LINES = 3
"""Number of last output lines shown of a failed run."""
INTERVAL = 0.5
"""Seconds between two looks at the runs."""


@dataclass
class RunningCell:
    cell: Cell
    process: subprocess.Popen[bytes]
    environ: dict[str, str]
    started: float


def start_process(arguments: Sequence[str], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start ``eqlen`` with additions to its environment, and a file for its output."""
    with open(log, "ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_eqlen.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environ},
        )


class Runner:
    """One attempt at all runs of a plan; prints a line for each event."""

    def __init__(self, plan: Plan, jobs: int) -> None:
        self.plan = plan
        # Every recipe is checked before the first run starts.
        recipes = plan.recipes()
        if wide := [recipe for recipe in recipes if recipe.cluster.nodes > 1]:
            found = f"{wide[0].name}: cluster.nodes is {wide[0].cluster.nodes}"
            instead = "--dry-run prints `eqlen submit` lines for SLURM"
            raise ValueError(f"{found}: expected 1 for runs of this command; {instead}")
        self.slots = slots(jobs, max(recipe.world_size for recipe in recipes))
        self.todo = [*plan.cells]
        self.done: set[Cell] = set()
        self.running: list[RunningCell] = []
        self.failed: list[Cell] = []

    def run(self) -> list[Cell]:
        """Run what is not finished; return the runs that failed, and those that did not start then."""
        while self.todo or self.running:
            self._collect()
            self._fill()
            if not self.running and self.todo:  # the remaining runs wait for runs that failed
                break
            if self.running:
                time.sleep(INTERVAL)
        for cell in self.todo:
            reference = self.plan.sweep.reference
            print(f"{cell.name} was not started: it may spend what runs of {reference} did", flush=True)
        return self.failed + self.todo

    def _collect(self) -> None:
        for child in [*self.running]:
            if (status := child.process.poll()) is None:
                continue
            self.running.remove(child)
            self.slots.append(child.environ)
            limits = self.plan.limits(child.cell)
            # Status 0 is not enough: a run that was asked to stop has not ended.
            if status == 0 and limits is not None and child.cell.ended(limits):
                self.done.add(child.cell)
                taken = duration(time.monotonic() - child.started)
                self._say(child.cell, f"ended after {child.cell.spent().steps} steps, {taken}")
            else:
                self.failed.append(child.cell)
                log = child.cell.folder / LOG
                self._say(child.cell, f"FAILED, status {status}; see {log}")
                said = log.read_text(errors="replace").splitlines() if log.is_file() else []
                print(*(f"    {line}" for line in said[-LAST_LINES:]), sep="\n", flush=True)

    def _fill(self) -> None:
        """Start runs while there are slots and runs that may start."""
        for cell in [*self.todo]:
            if not self.slots:
                return
            # Its budget is what the reference's runs spent, so these come first.
            if not self.done.issuperset(self.plan.references(cell)):
                continue
            self.todo.remove(cell)
            limits = self.plan.limits(cell)
            assert limits is not None, "the runs that say so have ended"
            # In an earlier call of the command.
            if cell.ended(limits):
                self.done.add(cell)
                self._say(cell, "was complete")
            else:
                self._start(cell, limits)

    def _start(self, cell: Cell, limits: Sequence[str]) -> None:
        cell.folder.mkdir(parents=True, exist_ok=True)
        environ = self.slots.pop(0)
        arguments = ["train", cell.recipe_file, *cell.overrides, *limits]
        # ``named`` makes the child end with this process.
        process = start_process(arguments, environ | named(), cell.folder / LOG)
        self.running.append(RunningCell(cell, process, environ, time.monotonic()))
        self._say(cell, "started")

    def _say(self, cell: Cell, text: str) -> None:
        print(f"[{len(self.done)}/{len(self.plan.cells)}] {cell.name} {text}", flush=True)


def slots(jobs: int, processes: int) -> list[dict[str, str]]:
    """Return the environment of each of ``jobs`` runs: its own GPUs. Raises ValueError for too few GPUs."""
    if not (gpus := visible_gpus()):
        return [{} for _ in range(jobs)]
    if jobs * processes > len(gpus):
        raise ValueError(f"--jobs {jobs} x {processes} GPUs a run: expected at most {len(gpus)} GPUs")
    shares = [gpus[job * processes : (job + 1) * processes] for job in range(jobs)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def visible_gpus() -> list[str]:
    """Return the GPUs as ``CUDA_VISIBLE_DEVICES`` names them."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in chosen.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
