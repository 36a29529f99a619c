"""``eqlen submit``: a recipe's run as a SLURM job. The batch script holds the recipe's numbers and calls
``slurm/train.sbatch``, or ``slurm/het.sbatch`` where vLLM servers get their own nodes. It is kept in the run
folder, and ``sbatch`` submits it again as it is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import megatron_eqlen
from megatron_eqlen.files import write_text
from megatron_eqlen.job import Job, load
from megatron_eqlen.plan.memory import memory
from megatron_eqlen.plan.sbatch import replicas_on_node, server_options, train_environment, train_options
from megatron_eqlen.processes import events
from megatron_eqlen.processes.hold import FILE as LOCK
from megatron_eqlen.processes.hold import is_locked
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.inputs import PINS, pinned
from megatron_eqlen.run.run_folder import RunFolder

SCRIPTS = Path(megatron_eqlen.__file__).resolve().parents[1] / "slurm"
KEPT = ("CONTAINER_IMAGE", "CONTAINER_MOUNTS", "EQLEN_CHECK", "EQLEN_PYTHON", "MAX_RESTARTS", "MAX_STALLED")
"""Environment variables that the batch scripts read: the script keeps those that are set."""


class Submission:
    """A job to submit. ``servers``: number of nodes full of vLLM servers; ``options``: further sbatch
    options, which overrule the others. Raises RecipeError or LayoutError for a run that could not start."""

    def __init__(self, file: Path, overrides: Sequence[str], servers: int = 0, options: Sequence[str] = ()):
        self.file, self.overrides, self.servers, self.options = file, [*overrides], servers, options
        recipe = load_with_servers(file, overrides, servers)
        self.recipe = pinned(recipe, recipe.run_folder)
        self.job = Job(self.recipe)
        self.job.check_layout()
        self.folder = RunFolder(self.recipe)
        self.folder.check(self.recipe)

    def script(self) -> str:
        train = SCRIPTS / "train.sbatch"
        if not train.is_file():
            raise FileNotFoundError(f"{train}: not found; submit with the eqlen of a checkout (tools/setup)")
        # Directives of the batch script hold for all runs; of two of a kind sbatch takes the later one.
        text = train.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        output = str(self.folder.path.absolute() / "slurm-%j.out")
        places = f"--chdir={Path.cwd()}", f"--output={output}"
        lines += [_directive([each]) for each in (*places, *train_options(self.job, self.recipe.name))]
        lines += [_directive(self.options)] if self.options else []
        if self.servers:
            # A second component of the job: nodes for servers, with options of their own.
            lines += ["#SBATCH hetjob"]
            options = server_options(self.job, f"{self.recipe.name}-servers", self.servers)
            lines += [_directive([each]) for each in options]
            lines += [_directive(self.options)] if self.options else []
        called = SCRIPTS / ("het.sbatch" if self.servers else "train.sbatch")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self._environment().items()]
        lines += [shlex.join(["exec", "bash", str(called), str(self.file), *self.overrides])]
        return "\n".join(["#!/bin/bash", "# Written by eqlen submit; sbatch submits it again.", *lines, ""])

    def submit(self) -> int:
        """Keep the script, submit it and print where to look; return the exit status."""
        from megatron_eqlen.report.status import is_complete

        if is_complete(self.folder.path, self.recipe):
            print(f"{self.folder.path}: complete; see {self.folder.report}")
            return 0
        if "CONTAINER_IMAGE" not in os.environ:  # the container's mounts may give files other names
            self.job.fetch()
        for problem in memory(self.job).problems():
            print(f"WARNING: the plan says that it does not fit: {problem}", file=sys.stderr)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        # A STOP file would end the new job at its start; one for a run that continues is left.
        if self.folder.stop.exists() and not is_locked(self.folder.path / LOCK):
            self.folder.stop.unlink()
            print(f"removed {self.folder.stop}, which asked an earlier try to stop")
        script = self.folder.path / "submit.sbatch"
        write_text(script, self.script())
        job = _sbatch(script)
        events.append(self.folder.path, "submitted", job=job, recipe=self.recipe.model_dump(mode="json"))
        run, stop = (shlex.quote(str(path)) for path in (self.folder.path, self.folder.stop))
        print(
            f"job {job}: {script}\n"
            f"its output   {self.folder.path}/slurm-{job}.out\n"
            f"its state    squeue --job {job}, eqlen status {run}\n"
            f"its page     eqlen report {run}\n"
            f"to stop it   touch {stop} (after its step, with a checkpoint), or scancel {job}"
        )
        return 0

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in (*KEPT, PINS) if os.environ.get(name)}
        # In a container this Python need not exist.
        if "CONTAINER_IMAGE" not in kept:
            kept.setdefault("EQLEN_PYTHON", sys.executable)
        return kept | {"EQLEN_RUN": str(self.folder.path)} | train_environment(self.recipe.cluster)


def load_with_servers(file: Path, overrides: Sequence[str], nodes: int) -> Recipe:
    """Load a recipe, with servers on so many nodes, which get their names at start; 0: with its own."""

    def with_count(count: int) -> Recipe:
        # Names that stand for addresses: only their number decides layout and plan.
        urls = ", ".join(f"http://not-started-{number}" for number in range(count))
        return load(file, [*overrides, "rollout.engine=server", f"rollout.servers=[{urls}]"])

    if nodes > 10_000:
        raise ValueError(f"--servers: expected at most 10000 nodes, found {nodes}")
    named = [word for word in overrides if word.startswith(("rollout.servers", "rollout.engine=c"))]
    if nodes and named:
        raise ValueError(f"{named[0]}: --servers {nodes} starts the servers and names them: leave it out")
    # One server says how many fit on a node, which gives the number.
    return with_count(nodes * replicas_on_node(with_count(1))) if nodes else load(file, overrides)


def _directive(options: Sequence[str]) -> str:
    """Return a line of ``options`` for sbatch, which takes the last of each. ValueError for a line break."""
    if any(len(option.splitlines()) > 1 for option in options):
        raise ValueError(f"sbatch options: expected each in one line, found {options}")
    return "#SBATCH " + shlex.join(options)


def _sbatch(script: Path) -> str:
    """Submit the script and return the job's id. Raises ValueError with the message of sbatch."""
    try:
        said = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    except FileNotFoundError:
        remedy = f"submit where SLURM's commands are (the script is {script})"
        raise ValueError(f"sbatch: not found on the PATH; {remedy}") from None
    if said.returncode:
        # A cluster without GPUs refuses ``--gpus-per-node``.
        no_gpus = re.search("generic resource|gres|gpus", said.stderr, re.IGNORECASE)
        hint = " (cluster.device=cpu asks for no GPUs)" if no_gpus else ""
        raise ValueError(f"sbatch refused {script}: {said.stderr.strip()}{hint}")
    # ``4711;cluster`` on a federation.
    return said.stdout.strip().partition(";")[0]
