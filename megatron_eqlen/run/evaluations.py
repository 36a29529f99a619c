"""Evaluations of a run: benchmarks before, during and after training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_eqlen.evaluation.result import EvaluationResult, compare, read_results, write_results
from megatron_eqlen.processes import distributed
from megatron_eqlen.processes.distributed import agree
from megatron_eqlen.run.generation import Rollouts
from megatron_eqlen.run.run_folder import RunFolder
from megatron_eqlen.run.session import Session
from megatron_eqlen.types import Metrics


class Evaluations:
    """Results of the evaluation before the first step, with which later ones are compared, and of the
    newest."""

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self._session, self._folder = session, folder
        self._before: list[EvaluationResult] = []
        self._newest: list[EvaluationResult] = []

    def evaluate(self, label: str, rollouts: Rollouts) -> Metrics:
        """Evaluate all benchmarks with the engine's weights; a result file that exists is not made again."""
        path = self._folder.evaluation(label)
        self._newest, metrics = evaluate(self._session, rollouts, path, label, self._before)
        if label == "before":
            self._before = self._newest
        return metrics

    def learned(self) -> str:
        """Return the accuracies before and now, ``arithmetic 43.9% -> 89.1%``."""
        earlier = {result.benchmark: result.scores.mean() for result in self._before}
        return ", ".join(
            f"{result.benchmark} {100 * earlier[result.benchmark]:.1f}% -> {100 * result.scores.mean():.1f}%"
            for result in self._newest
            if result.benchmark in earlier
        )


def evaluate(
    session: Session, rollouts: Rollouts, path: Path, label: str, before: Sequence[EvaluationResult] = ()
) -> tuple[list[EvaluationResult], Metrics]:
    """Evaluate all benchmarks and write the results to ``path``; if ``path`` exists, read it instead.

    ``before``: results of an earlier evaluation to compare with, if any.
    """
    results: list[EvaluationResult] = []
    metrics: Metrics = {}
    if rollouts.benchmarks and agree(path.exists):
        results = read_results(path)
    elif rollouts.benchmarks:
        with session.stage("evaluate", session.recipe.rollout.request_timeout) as metrics:
            results = [rollouts.evaluate(benchmark) for benchmark in rollouts.benchmarks]
        if distributed.is_rank0():
            write_results(path, results)
    for result in results:
        metrics |= result.metrics()
        accuracy = f"{result.benchmark} avg@{result.samples} {result.accuracy}"
        verdicts = Counter(verdict for answers in result.answers for verdict in answers.verdicts)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        why = "" if result.scores.any() else f" (of {verdicts.total()} responses {counts})"
        session.progress.say(f"{label}: {accuracy}{_change(result, before)}{why}")
    return results, metrics


def _change(result: EvaluationResult, before: Sequence[EvaluationResult]) -> str:
    """Return the paired change since an earlier result on the same questions, as text; empty if there is
    none."""
    questions = result.manifest["question_ids"]
    for earlier in before:
        if earlier.manifest["question_ids"] == questions and earlier.manifest != result.manifest:
            return f", {compare([earlier], [result]).points}"
    return ""
