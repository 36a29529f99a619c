"""A sweep as SLURM jobs: an array for each recipe and method, a task for each seed, the tables at the end.

The arrays of the reference come first. The others wait for them, because their budgets are known only then:
each task asks ``eqlen sweep --cell`` for its arguments when it starts.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megatron_eqlen.plan.sbatch import train_options
from megatron_eqlen.report.run_folder import RunFolder
from megatron_eqlen.sweep.cells import Cell, Plan

HEAD = """#!/bin/bash
# Submits what is left of the sweep {name}; from the folder that holds slurm/.
set -euo pipefail"""


SUBMITTED = re.compile(r"^job (\d+)\S*: (.+)$", re.MULTILINE)
"""Line that the script prints for each array: its id, and the group of runs that it belongs to."""


def submit(plan: Plan, file: Path, overrides: Sequence[str] = ()) -> int:
    """Run ``script``, and note in each run's folder its SLURM task; return the script's status."""
    left = {group: _left(plan, group) for group in dict.fromkeys(cell.group for cell in plan.cells)}
    ran = subprocess.run(
        ["bash", "-c", script(plan, file, overrides)], stdout=subprocess.PIPE, text=True, check=False
    )
    print(ran.stdout, end="")
    for job, group in SUBMITTED.findall(ran.stdout):
        for cell in left[group]:
            recipe = cell.recipe(plan.limits(cell) or [])
            cell.folder.mkdir(parents=True, exist_ok=True)
            RunFolder(recipe).submitted(f"{job}_{cell.seed}", recipe)
    return ran.returncode


def script(plan: Plan, file: Path, overrides: Sequence[str] = ()) -> str:
    """Return a bash script that submits all runs that have not ended, and the job that writes the tables."""
    lines = [HEAD.format(name=plan.sweep.name)]
    jobs: dict[str, str] = {}
    """Variable that holds an array's job id, by the array's group."""
    for group in dict.fromkeys(cell.group for cell in plan.cells):
        if left := _left(plan, group):
            waits = dict.fromkeys(
                jobs[reference.group] for reference in plan.references(left[0]) if reference.group in jobs
            )
            lines.append(f"job{len(jobs)}=$({_array(plan, left, waits, file, overrides)})")
            lines.append(f'echo "job $job{len(jobs)}: {group}"')
            jobs[group] = f"$job{len(jobs)}"
    lines.append(_tables(plan, [*jobs.values()], file, overrides))
    return "\n".join(lines) + "\n"


def _left(plan: Plan, group: str) -> list[Cell]:
    """Return the runs of ``group`` that have not ended."""
    return [cell for cell in plan.cells if cell.group == group and not _ended(plan, cell)]


def _ended(plan: Plan, cell: Cell) -> bool:
    limits = plan.limits(cell)
    return limits is not None and cell.ended(limits)


def _array(
    plan: Plan, cells: list[Cell], waits: Sequence[str] | dict, file: Path, overrides: Sequence[str]
) -> str:
    name = f"{plan.sweep.name}-{cells[0].group}".replace("/", "-")
    options = train_options(plan.some_recipe(cells[0]), name)
    options += [f"--array={','.join(str(cell.seed) for cell in cells)}"]
    options += [f"--dependency=afterok:{':'.join(waits)}", "--kill-on-invalid-dep=yes"] if waits else []
    arguments = ["--sweep", str(file), cells[0].group, *overrides]
    return f"sbatch --parsable {_quoted(options)} slurm/train.sbatch {shlex.join(arguments)}"


def _tables(plan: Plan, jobs: list[str], file: Path, overrides: Sequence[str]) -> str:
    command = "${EQLEN_PYTHON:-.venv/bin/python} -m megatron_eqlen.cli sweep --tables " + shlex.join(
        [str(file), *overrides]
    )
    options = [f"--job-name={plan.sweep.name}-tables"]
    options += [f"--dependency=afterany:{':'.join(jobs)}"] if jobs else []
    return f"sbatch {_quoted(options)} --wrap={shlex.quote(command)}"


def _quoted(options: Sequence[str]) -> str:
    """Quote the options; shell variables in them stay variables."""
    return " ".join(option if "$job" in option else shlex.quote(option) for option in options)
