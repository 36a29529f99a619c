"""Statistics of the pairs of methods, at the start and at the end of their runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_eqlen.metrics import (
    HARVEST_PAIRS_PER_STREAM,
    HARVEST_TRUNCATED_FRACTION,
    OBJECTIVE_REWARD_GAP,
    OBJECTIVE_SKIP_RATE,
)
from megatron_eqlen.paper.tables import METHOD
from megatron_eqlen.report.metrics import Records, mean_of_known, read_metrics
from megatron_eqlen.report.run_groups import BASE, Group
from megatron_eqlen.report.tables import Column

SHOWN = {
    "pairs a stream": (HARVEST_PAIRS_PER_STREAM, 1),
    "streams that reach the limit, %": (HARVEST_TRUNCATED_FRACTION, 100),
    "pairs with equal rewards, %": (OBJECTIVE_SKIP_RATE, 100),
    "reward of B: max less mean": (OBJECTIVE_REWARD_GAP, 1),
}
"""Title -> (metric, factor from the metric's unit to the title's)."""


def pairs(groups: Sequence[Group]) -> list[dict[Column, Any]]:
    """Return two rows for each method that has pairs: means over its seeds of their first and their last
    third of steps."""
    rows = []
    for group in groups:
        if group.method == BASE or group.runs[0].recipe.sampling != "equal_length":
            continue
        runs = [read_metrics(run.folder) for run in group.runs]
        for part, steps in (("first third", _first_third), ("last third", _last_third)):
            row: dict[Column, Any] = {METHOD: group.method, "of each run": part}
            for title, (metric, scale) in SHOWN.items():
                mean = mean_of_known(
                    mean_of_known(record.get(metric) for record in steps(records)) for records in runs
                )
                row[title] = None if mean is None else scale * mean
            rows.append(row)
    return rows


def _first_third(records: Records) -> Records:
    return records[: max(1, len(records) // 3)]


def _last_third(records: Records) -> Records:
    return records[-max(1, len(records) // 3) :]
