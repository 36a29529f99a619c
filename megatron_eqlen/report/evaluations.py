"""A run's evaluations, from the files in its folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_eqlen.evaluation.result import EvaluationResult, compare, read_results
from megatron_eqlen.evaluation.statistics import Interval


@dataclass(frozen=True)
class Evaluation:
    """One benchmark of one evaluation."""

    label: str
    step: int
    result: EvaluationResult
    first: EvaluationResult
    """The run's first result on this benchmark."""

    @property
    def when(self) -> str:
        """``before``, ``step 20`` or ``after``."""
        return self.label if self.label in ("before", "after") else f"step {self.step}"

    @cached_property
    def gain(self) -> Interval | None:
        """Change since the run's first evaluation of the benchmark, paired by problem; None without one."""
        same_questions = self.first.manifest["question_ids"] == self.result.manifest["question_ids"]
        return (
            compare([self.first], [self.result]) if self.first is not self.result and same_questions else None
        )


def evaluation_files(folder: Path, steps: int) -> list[tuple[int, Path]]:
    """Return (step, file) of the evaluations of a run that has taken ``steps`` steps, in order: ``before`` is
    step 0, ``after`` comes after all."""
    files = [(_step(path.stem, steps), path) for path in folder.glob("*.json")]
    return sorted(files, key=lambda file: (file[0], file[1].stem == "after", file[1].name))


def _step(label: str, last: int) -> int:
    digits = label.removeprefix("step-")
    return 0 if label == "before" else int(digits) if digits.isdecimal() else last


def read_evaluations(files: Iterable[tuple[int, Path]]) -> list[Evaluation]:
    """Return the evaluations in ``evaluation_files``. Raises ValueError naming a file with other content."""
    first: dict[str, EvaluationResult] = {}
    return [
        Evaluation(path.stem, step, result, first.setdefault(result.benchmark, result))
        for step, path in files
        for result in read_results(path)
    ]


def histories(evaluations: Iterable[Evaluation]) -> dict[str, list[Evaluation]]:
    """Return the evaluations of each benchmark, in order."""
    groups: dict[str, list[Evaluation]] = {}
    for row in evaluations:
        groups.setdefault(row.result.benchmark, []).append(row)
    return groups
