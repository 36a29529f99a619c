"""Why a run hangs, from what each of its ranks has written down (``watchdog``): who waits for whom.

A rank's facts (rank-N.json) hold ``host``, ``pid``, ``stages``, ``at`` (where its main thread is),
``silent_seconds``, and ``collectives``: one entry for each process group that it has used,

    {"group": "8", "called": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0, 1], "entered": 17,
     "waits_in": {"number": 17, "operation": "gloo:all_reduce", "sizes": [[3]], "at": "file.py:12 in name"}}

where ``entered`` is the number of the newest collective of the group that the rank has come to (None: not
known) and ``waits_in``, which may be None, the oldest one that has not ended.
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
"""In a run's folder: it has a folder for each try."""
INDEX = "index.txt"
"""In the folder of a hang: what it was, in words."""
OURS = "megatron_eqlen"
WAITING = re.compile(r"torch/distributed/|p2p_communication\.py|\.wait\(\)$")
"""Where a rank waits for others: a file, or a line of code. gloo's messages are in no flight recorder."""


@dataclass(frozen=True)
class Gap:
    """Collective ``number`` of a group: ``waiting`` ranks are in it, ``absent`` ones have not come to it."""

    group: Facts
    operation: str
    number: int
    waiting: tuple[int, ...]
    absent: tuple[int, ...]

    def __str__(self) -> str:
        members = ", ".join(map(str, self.group["ranks"]))
        return f"{self.operation} number {self.number} of group {self.group['called']} (ranks {members})"


def read(folder: Path) -> dict[int, Facts]:
    """The facts of the ranks that wrote some."""
    facts = [read_json(file) for file in folder.glob("rank-*.json")]
    return {one["rank"]: one for one in sorted(facts, key=lambda one: one["rank"])}


def explain(facts: Mapping[int, Facts], world: int) -> str:
    """The first cause, in one line, then a line for each of ``world`` ranks."""
    lines = [f"no progress on any rank for {min(one['silent_seconds'] for one in facts.values()):.0f} s: "]
    lines[0] += first_cause(facts, world)
    lines += ["", *(_line(rank, facts.get(rank)) for rank in range(world)), ""]
    lines.append(
        "rank-N.txt: the stacks of rank N's threads; rank-N.json: its collectives and newest stages."
    )
    return "\n".join(lines) + "\n"


def first_cause(facts: Mapping[int, Facts], world: int) -> str:
    """Which rank keeps the others waiting, in one sentence."""
    if silent := [rank for rank in range(world) if rank not in facts]:
        return (
            f"{_ranks(silent)} wrote no facts: the process or its node is stopped or gone, or no thread "
            f"of it can run Python (rank-{silent[0]}.txt then has its stacks)"
        )
    gaps = list(find_gaps(facts))
    for gap in gaps:
        if busy := [rank for rank in gap.absent if not waits(facts[rank])]:
            missed = f"{_ranks(busy)} did not come to {gap}, in which {_ranks(gap.waiting)} waited"
            return f"{missed}: {_where(facts, busy)}"
    if different := next(find_differences(facts), None):
        return different
    if gaps:
        return "ranks wait for each other: " + "; ".join(
            f"{_ranks(gap.waiting)} in {gap}, to which {_ranks(gap.absent)} did not come" for gap in gaps
        )
    busy = [rank for rank in facts if not waits(facts[rank])]
    return _where(facts, busy or list(facts))


def waits(facts: Facts) -> bool:
    """Whether the rank waits for others."""
    return any(one["waits_in"] for one in facts["collectives"]) or bool(WAITING.search(facts["at"]["in"]))


def find_gaps(facts: Mapping[int, Facts]) -> Iterator[Gap]:
    for group, (number, operation), waiting in _waited_for(facts):
        entered = {rank: _entered(facts[rank], group) for rank in group["ranks"] if rank in facts}
        absent = tuple(rank for rank, newest in entered.items() if newest is not None and newest < number)
        if absent:
            yield Gap(group, operation, number, waiting, absent)


def find_differences(facts: Mapping[int, Facts]) -> Iterator[str]:
    """Where ranks of a group wait in different collectives under the same number."""
    found: dict[tuple[str, int], dict[str, tuple[int, ...]]] = {}
    for group, (number, operation), waiting in _waited_for(facts):
        found.setdefault((group["called"], number), {})[operation] = waiting
    for (called, number), operations in found.items():
        if len(operations) > 1:
            sides = "; ".join(f"{name} on {_ranks(ranks)}" for name, ranks in operations.items())
            yield f"ranks do different things as number {number} of group {called}: {sides}"


def _waited_for(facts: Mapping[int, Facts]) -> Iterator[tuple[Facts, tuple[int, str], tuple[int, ...]]]:
    """Each collective that ranks wait in: its group, number and operation, and those ranks."""
    ranks: dict[tuple[str, int, str], list[int]] = {}
    groups: dict[str, Facts] = {}
    for rank, one in facts.items():
        for group in one["collectives"]:
            if waited := group["waits_in"]:
                groups[group["group"]] = group
                ranks.setdefault((group["group"], waited["number"], waited["operation"]), []).append(rank)
    for (group, number, operation), waiting in ranks.items():
        yield groups[group], (number, operation), tuple(waiting)


def _entered(facts: Facts, group: Facts) -> int | None:
    same = [one["entered"] for one in facts["collectives"] if one["group"] == group["group"]]
    return same[0] if same else 0


def place(stack: traceback.StackSummary) -> dict[str, str]:
    """Where a thread is: its newest call within this package (``at``), and the newest of all (``in``)."""
    ours = [frame for frame in stack if f"/{OURS}/" in frame.filename]
    return {"at": _frame(ours[-1] if ours else stack[-1]), "in": _frame(stack[-1])}


def _frame(frame: traceback.FrameSummary) -> str:
    """Without the folders that libraries lie in."""
    name = re.sub(rf".*/(site-packages/|lib/python[^/]*/|(?={OURS}/))", "", frame.filename)
    return f"{name}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")


def _line(rank: int, facts: Facts | None) -> str:
    if facts is None:
        return f"rank {rank}: no facts"
    where = f"rank {rank} on {facts['host']}, process {facts['pid']}, {_place(facts)}"
    waited = [(one, one["waits_in"]) for one in facts["collectives"] if one["waits_in"]]
    for group, collective in waited:
        where += f"; waits in {collective['operation']} number {collective['number']} of {group['called']}"
    return where


def _where(facts: Mapping[int, Facts], ranks: Sequence[int]) -> str:
    """Where these ranks are, of many the first."""
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
