"""Find the cause of a hang from the facts that each rank has written (``watchdog``): which rank waits for
which.

A rank's facts (rank-N.json) hold ``host``, ``pid``, ``stages``, ``at`` (where its main thread is),
``silent_seconds``, and ``collectives``: one entry for each process group that the rank has used,

    {"group": "8", "called": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0, 1], "entered": 17,
     "waits_in": {"number": 17, "operation": "gloo:all_reduce", "sizes": [[3]], "at": "file.py:12 in name"}}

where ``entered`` is the number of the newest collective that the rank has entered (None: not known) and
``waits_in`` the oldest collective that has not ended, or None.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_eqlen.files import read_json

Facts = Mapping[str, Any]
HANGS = "hang"
"""Folder in a run's folder, with a subfolder for each start of the run."""
INDEX = "index.txt"
"""File in the folder of a hang: its description."""
OURS = "megatron_eqlen"
WAITING = re.compile(r"torch/distributed/|p2p_communication\.py|\.wait\(\)$")
"""Code in which a rank waits for other ranks. The flight recorder has no gloo point-to-point messages."""


@dataclass(frozen=True)
class Gap:
    """Collective ``number`` of a group: the ``waiting`` ranks are in it, the ``absent`` ranks have not
    entered it."""

    group: Facts
    operation: str
    number: int
    waiting: tuple[int, ...]
    absent: tuple[int, ...]

    def __str__(self) -> str:
        members = ", ".join(map(str, self.group["ranks"]))
        return f"{self.operation} number {self.number} of group {self.group['called']} (ranks {members})"


def read(folder: Path) -> dict[int, Facts]:
    """Return the facts of the ranks that have written them."""
    facts = [read_json(file) for file in folder.glob("rank-*.json")]
    return {
        rank_facts["rank"]: rank_facts
        for rank_facts in sorted(facts, key=lambda rank_facts: rank_facts["rank"])
    }


def explain(facts: Mapping[int, Facts], world: int) -> str:
    """Return the first cause in one line, then a line for each of ``world`` ranks."""
    silence = min(rank_facts["silent_seconds"] for rank_facts in facts.values())
    lines = [f"no progress on any rank for {silence:.0f} s: "]
    lines[0] += first_cause(facts, world)
    lines += ["", *(_line(rank, facts.get(rank)) for rank in range(world)), ""]
    lines.append(
        "rank-N.txt: the stacks of rank N's threads; rank-N.json: its collectives and newest stages."
    )
    return "\n".join(lines) + "\n"


def first_cause(facts: Mapping[int, Facts], world: int) -> str:
    """Return a sentence that names the rank that keeps the others waiting."""
    if silent := [rank for rank in range(world) if rank not in facts]:
        return (
            f"{_ranks(silent)} wrote no facts: the process or its node is stopped or gone, or no thread "
            f"of it can run Python (rank-{silent[0]}.txt then has its stacks)"
        )
    gaps = list(find_gaps(facts))
    for gap in gaps:
        if busy := [rank for rank in gap.absent if not waits(facts[rank])]:
            missed = f"{_ranks(busy)} did not come to {gap}, in which {_ranks(gap.waiting)} waited"
            return f"{missed}: {_describe_places(facts, busy)}"
    if different := next(find_differences(facts), None):
        return different
    if gaps:
        return "ranks wait for each other: " + "; ".join(
            f"{_ranks(gap.waiting)} in {gap}, to which {_ranks(gap.absent)} did not come" for gap in gaps
        )
    busy = [rank for rank in facts if not waits(facts[rank])]
    return _describe_places(facts, busy or list(facts))


def waits(facts: Facts) -> bool:
    """Return True if the rank waits for other ranks."""
    return any(group["waits_in"] for group in facts["collectives"]) or bool(WAITING.search(facts["at"]["in"]))


def find_gaps(facts: Mapping[int, Facts]) -> Iterator[Gap]:
    for group, (number, operation), waiting in _waited_for(facts):
        entered = {rank: _entered(facts[rank], group) for rank in group["ranks"] if rank in facts}
        absent = tuple(rank for rank, newest in entered.items() if newest is not None and newest < number)
        if absent:
            yield Gap(group, operation, number, waiting, absent)


def find_differences(facts: Mapping[int, Facts]) -> Iterator[str]:
    """Yield a description wherever ranks of a group wait in different collectives under the same number."""
    found: dict[tuple[str, int], dict[str, tuple[int, ...]]] = {}
    for group, (number, operation), waiting in _waited_for(facts):
        found.setdefault((group["called"], number), {})[operation] = waiting
    for (called, number), operations in found.items():
        if len(operations) > 1:
            sides = "; ".join(f"{name} on {_ranks(ranks)}" for name, ranks in operations.items())
            yield f"ranks do different things as number {number} of group {called}: {sides}"


def _waited_for(facts: Mapping[int, Facts]) -> Iterator[tuple[Facts, tuple[int, str], tuple[int, ...]]]:
    """Yield each collective in which ranks wait: its group, number and operation, and those ranks."""
    ranks: dict[tuple[str, int, str], list[int]] = {}
    groups: dict[str, Facts] = {}
    for rank, rank_facts in facts.items():
        for group in rank_facts["collectives"]:
            if waited := group["waits_in"]:
                groups[group["group"]] = group
                ranks.setdefault((group["group"], waited["number"], waited["operation"]), []).append(rank)
    for (group, number, operation), waiting in ranks.items():
        yield groups[group], (number, operation), tuple(waiting)


def _entered(facts: Facts, group: Facts) -> int | None:
    same = [other["entered"] for other in facts["collectives"] if other["group"] == group["group"]]
    return same[0] if same else 0


def place(stack: traceback.StackSummary) -> dict[str, str]:
    """Return where a thread is: its newest call within this package (``at``) and its newest call (``in``)."""
    ours = [frame for frame in stack if f"/{OURS}/" in frame.filename]
    return {"at": _frame(ours[-1] if ours else stack[-1]), "in": _frame(stack[-1])}


def _frame(frame: traceback.FrameSummary) -> str:
    """Return the frame's place, without the folders of installed libraries."""
    name = re.sub(rf".*/(site-packages/|lib/python[^/]*/|(?={OURS}/))", "", frame.filename)
    return f"{name}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")


def _line(rank: int, facts: Facts | None) -> str:
    if facts is None:
        return f"rank {rank}: no facts"
    where = f"rank {rank} on {facts['host']}, process {facts['pid']}, {_place(facts)}"
    waited = [(group, group["waits_in"]) for group in facts["collectives"] if group["waits_in"]]
    for group, collective in waited:
        where += f"; waits in {collective['operation']} number {collective['number']} of {group['called']}"
    return where


def _describe_places(facts: Mapping[int, Facts], ranks: Sequence[int]) -> str:
    """Return where the ranks are; for several ranks only the place of the first."""
    more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{more} is {_place(facts[ranks[0]])}"


def _place(facts: Facts) -> str:
    stage = f"in stage {facts['stages'][-1]}" if facts["stages"] else "between stages"
    at = facts["at"]
    inside = "" if at["in"] == at["at"] else f", there in {at['in']}"
    return f"{stage} for {facts['silent_seconds']:.0f} s at {at['at']}{inside}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
