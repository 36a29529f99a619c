"""``eqlen check``: what works on this machine, and how to mend the rest. New checks go into ``CHECKS``."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from subprocess import SubprocessError
from threading import Timer

from megatron_eqlen.check import machine, software
from megatron_eqlen.check.finding import Check, Finding, Place
from megatron_eqlen.job import Job

PATIENCE = 20
"""Seconds after which a check that still runs is named."""
CHECKS = [*software.CHECKS, *machine.CHECKS]


def check(job: Job | None, short: bool = False, checks: Sequence[Check] = CHECKS) -> int:
    """Run the checks and print what they find; return 1 if something that ``job`` needs is missing or fails.
    ``short``: run quick checks and print only lines that are not ok, for a job's nodes."""
    place = Place(job, job.recipe.run_folder if job else Path("runs"), short)
    wanting = []
    for entry in checks:
        if (short and not entry.in_short) or (entry.of_inputs and "inputs" in wanting):
            continue
        finding = look(entry, place)
        # Nothing to look at here, such as NCCL on a machine without GPUs.
        if finding is None:
            continue
        # Only what this run needs makes the machine unfit; the rest is shown as optional.
        bad = finding.state in ("missing", "failed") and entry.needed(place)
        if bad:
            wanting.append(entry.name)
        if finding.state != "ok" or not short:
            print(line(entry, finding, bad), flush=True)
    # A cached property: only if a check has read them is there a grader to close.
    if "prompts" in vars(place):
        place.prompts.close()
    who = job.recipe.name if job else "what every run needs"
    verdict = f"NOT READY for {who}: {', '.join(wanting)}" if wanting else f"ready for {who}"
    print(f"{socket.gethostname()}: {verdict}", flush=True)
    return 1 if wanting else 0


def look(entry: Check, place: Place) -> Finding | None:
    """Return what the check finds; an error is a finding. Libraries' warnings of the same are hidden."""
    # Printed by a timer: a check that waits for a disk or for the network cannot print it itself.
    told = line(entry, Finding("slow", f"not done after {PATIENCE} s"), bad=False)
    patience = Timer(PATIENCE, print, [told], {"flush": True})
    patience.daemon = True
    patience.start()
    try:
        with warnings.catch_warnings(action="ignore"):
            return entry.look(place)
    except (OSError, ValueError, RuntimeError, SubprocessError) as error:
        return Finding("failed", f"{type(error).__name__}: {error}")
    finally:
        patience.cancel()


def line(entry: Check, finding: Finding, bad: bool) -> str:
    optional = "" if bad or finding.state in ("ok", "slow", "doubt") else " (not needed here)"
    todo = f" -> {finding.todo}" if finding.todo else ""
    return f"{finding.state:<7}  {entry.name:<18}  {finding.text}{optional}{todo}"
