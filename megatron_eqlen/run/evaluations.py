"""Evaluations: benchmarks before, during and after training, and the table of ``eqlen evaluate``."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_eqlen.evaluation.result import (
    EvaluationResult,
    compare,
    read_results,
    responses_of,
    write_results,
)
from megatron_eqlen.files import step_name
from megatron_eqlen.processes import distributed
from megatron_eqlen.processes.distributed import agree
from megatron_eqlen.recipe.data_sets import BENCHMARKS, model_release
from megatron_eqlen.report.format import markdown_rows
from megatron_eqlen.run.rollouts import Rollouts
from megatron_eqlen.run.run_folder import RunFolder
from megatron_eqlen.run.session import Session
from megatron_eqlen.types import Metrics

Results = Sequence[EvaluationResult]


class Evaluations:
    """Results by label, in order; all are compared with those before the first step."""

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self._session, self._folder = session, folder
        self._results: dict[str, list[EvaluationResult]] = {}

    def evaluate(self, label: str, rollouts: Rollouts, steps: int) -> Metrics:
        """Evaluate all benchmarks with the engine's weights, those after ``steps`` steps. ``before`` and
        ``after`` keep what an earlier start measured, ``after`` also what the last step did."""
        path = self._folder.evaluation(label)
        known = {"before": [path], "after": [path, self._folder.evaluation(step_name(steps))]}
        # a step that is taken again, after a kill before its checkpoint, may have other weights
        if label not in known and distributed.is_rank0() and responses_of(path).exists():
            shutil.rmtree(responses_of(path))
        files = known.get(label, [])
        earlier = agree(lambda: next((read_results(file) for file in files if file.exists()), []))
        if label == "before" and steps:
            self._results[label] = earlier  # the weights before the first step are gone
            return {}
        before = self._results.get("before", [])
        self._results[label], metrics = evaluate_all(self._session, rollouts, path, label, before, earlier)
        return metrics

    def learned(self) -> str:
        """Return the accuracies before and now, ``arithmetic 43.9% -> 89.1%``."""
        before, *_, newest = self._results.values()
        earlier = {result.benchmark: result for result in before}
        return ", ".join(
            f"{new.benchmark} {100 * old.scores.mean():.1f}% -> {100 * new.scores.mean():.1f}%"
            for new in newest
            if (old := earlier.get(new.benchmark)) and old.manifest["rollout"] == new.manifest["rollout"]
        )


def evaluate_all(
    session: Session, rollouts: Rollouts, path: Path, label: str, before: Results = (), earlier: Results = ()
) -> tuple[list[EvaluationResult], Metrics]:
    """Evaluate all benchmarks into ``path``, one after the other, and record the responses beside it.
    ``before``: results to compare with. ``earlier``: results that are kept where the same weights gave them
    with the same settings."""
    if not rollouts.benchmarks:
        return [], {}
    known = {result.benchmark: result for result in earlier}
    rollouts.settle()
    with session.stage("evaluate", session.recipe.rollout.request_timeout) as metrics:
        for benchmark in rollouts.benchmarks:
            same = known.get(benchmark.name)
            known[benchmark.name] = rollouts.evaluate(benchmark, responses_of(path), same)
    if distributed.is_rank0():
        write_results(path, [*known.values()])
    results = [known[benchmark.name] for benchmark in rollouts.benchmarks]
    for result in results:
        metrics |= result.metrics()
        accuracy = f"{result.benchmark} avg@{result.samples} {result.accuracy}"
        verdicts = Counter(verdict for answers in result.answers for verdict in answers.verdicts)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        # when nothing is right, verdicts tell a hard benchmark from a wrong answer format
        why = "" if result.scores.any() else f" (of {verdicts.total()} responses {counts})"
        # the manifest holds the policy version: an equal one is the same evaluation, read again
        alike = [old for old in before if result.is_like(old) and old.manifest != result.manifest]
        change = f", {compare(alike[:1], [result]).points}" if alike else ""
        session.progress.say(f"{label}: {accuracy}{change}{why}")
    return results, metrics


def leaderboard(results: Sequence[EvaluationResult], rank_seconds: float) -> str:
    """Return a table as leaderboards show a model: a row for each benchmark and their mean, with a note about
    benchmarks older than the model. ``rank_seconds``: seconds times ranks, shared out by tokens."""
    model = results[0].manifest["model"]
    samples = {result.samples for result in results}
    # benchmarks with different numbers of samples share the columns avg@k and pass@k
    k = samples.pop() if len(samples) == 1 else "k"
    # one stage evaluates all benchmarks: each has the share of the seconds that its tokens have
    tokens = [sum(sum(a.lengths) for a in result.answers) for result in results]
    rows = [
        {
            "Benchmark": result.benchmark,
            "Problems": len(result.answers),
            f"avg@{k}": str(result.accuracy),
            f"pass@{k}": f"{100 * result.pass_at()[result.samples]:.1f}%",
            "Tokens an answer": f"{result.mean_tokens:,.0f}",
            "Truncated": f"{100 * result.verdict_fraction('truncated'):.1f}%",
            "Rank-seconds": f"{rank_seconds * count / max(1, sum(tokens)):,.0f}",
            "Public since": _public_since(result),
            "Sampling": result.sampling,
        }
        for result, count in zip(results, tokens, strict=True)
    ]
    if len(rows) > 1:
        mean = 100 * (sum(result.accuracy.mean for result in results) / len(results))
        rows.append({"Benchmark": "mean", f"avg@{k}": f"{mean:.1f}%", "Rank-seconds": f"{rank_seconds:,.0f}"})
    parts = [model, markdown_rows(rows), "Rank-seconds: a rank is a process, with at most one GPU."]
    released = model_release(model)
    # both are ISO dates, which compare as texts
    days = {result.benchmark: day for result in results if (day := _public_since(result))}
    if old := [name for name, day in days.items() if released and day < released]:
        parts.append(f"{', '.join(old)}: public before the model ({released}), which may have trained on it.")
    return "\n\n".join(parts)


def _public_since(result: EvaluationResult) -> str | None:
    return BENCHMARKS.get(result.manifest["benchmark"]["reader"], {}).get("released")
