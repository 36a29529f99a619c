"""A run's evaluations, from the files in its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_eqlen.evaluation.result import EvaluationResult, compare, read_results
from megatron_eqlen.evaluation.statistics import Interval


@dataclass(frozen=True)
class Evaluation:
    """One row of the table of evaluations."""

    label: str
    step: int
    result: EvaluationResult
    accuracy: Interval
    gain: Interval | None
    """Change since the run's first evaluation of the benchmark, paired by problem; None without one."""

    @property
    def when(self) -> str:
        """``before``, ``step 20`` or ``after``."""
        return self.label if self.label in ("before", "after") else f"step {self.step}"


def evaluations(folder: Path, steps: int) -> list[tuple[str, int, list[EvaluationResult]]]:
    """Return (label, step, benchmarks' results) of a run that has taken ``steps`` steps, in order: ``before``
    is step 0, ``after`` comes after all. Raises ValueError naming a file with other content."""
    order = {path: _step(path.stem, steps) for path in sorted(folder.glob("*.json"))}
    paths = sorted(order, key=lambda path: (order[path], path.stem == "after"))
    return [(path.stem, order[path], read_results(path)) for path in paths]


def _step(label: str, last: int) -> int:
    digits = label.removeprefix("step-")
    return 0 if label == "before" else int(digits) if digits.isdecimal() else last


def read_evaluations(folder: Path, steps: int) -> list[Evaluation]:
    """Return all evaluations of a run that has taken ``steps`` steps, by their steps."""
    first: dict[str, EvaluationResult] = {}
    rows = []
    for label, step, results in evaluations(folder, steps):
        for result in results:
            gain = _gain(first.setdefault(result.benchmark, result), result)
            rows.append(Evaluation(label, step, result, result.accuracy, gain))
    return rows


def _gain(first: EvaluationResult, result: EvaluationResult) -> Interval | None:
    same_questions = first.manifest["question_ids"] == result.manifest["question_ids"]
    return compare(first, result) if first is not result and same_questions else None


def outcomes(evaluations: list[Evaluation]) -> list[list[Evaluation]]:
    """Return the first and the last evaluation of each benchmark, or the only one."""
    by_benchmark: dict[str, list[Evaluation]] = {}
    for row in evaluations:
        by_benchmark.setdefault(row.result.benchmark, []).append(row)
    return [[*rows[:1], *rows[1:][-1:]] for rows in by_benchmark.values()]
