"""A run's evaluations on disk, by their steps."""

from __future__ import annotations

from pathlib import Path

from megatron_eqlen.evaluation.result import EvaluationResult, read_results


def evaluations(folder: Path, steps: int) -> list[tuple[str, int, list[EvaluationResult]]]:
    """(label, step, benchmarks' results) of a run that has taken ``steps`` steps, in order: ``before`` is
    step 0, ``after`` comes after all. Raises ValueError naming a file that holds something else."""
    order = {path: _step(path.stem, steps) for path in sorted(folder.glob("*.json"))}
    paths = sorted(order, key=lambda path: (order[path], path.stem == "after"))
    return [(path.stem, order[path], read_results(path)) for path in paths]


def _step(label: str, last: int) -> int:
    digits = label.removeprefix("step-")
    return 0 if label == "before" else int(digits) if digits.isdigit() else last
