"""The table that ``eqlen evaluate`` prints: a model on several benchmarks, as leaderboards show it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.evaluation.result import EvaluationResult
from megatron_eqlen.recipe.data_sets import BENCHMARKS, model_release
from megatron_eqlen.report.format import markdown_rows


def leaderboard(results: Sequence[EvaluationResult], rank_seconds: float) -> str:
    """Return a row for each benchmark, and the mean of several. ``rank_seconds``: duration of the evaluation
    times its ranks, shared among the benchmarks by their tokens.

    A note names the benchmarks that were public before the model, where both dates are known.
    """
    model = results[0].manifest["model"]
    k, tokens = results[0].samples, [sum(sum(a.lengths) for a in result.answers) for result in results]
    rows = [
        {
            "Benchmark": result.benchmark,
            "Problems": len(result.answers),
            f"avg@{k}": str(result.accuracy),
            f"pass@{k}": f"{100 * result.pass_at()[k]:.1f}%",
            "Tokens an answer": f"{result.mean_tokens:,.0f}",
            "Truncated": f"{100 * result.verdict_fraction('truncated'):.1f}%",
            "Rank-seconds": f"{rank_seconds * count / max(1, sum(tokens)):,.0f}",
            "Public since": _public_since(result),
        }
        for result, count in zip(results, tokens, strict=True)
    ]
    if len(rows) > 1:
        mean = sum(result.accuracy.mean for result in results) / len(results)
        rows.append(
            {"Benchmark": "mean", f"avg@{k}": f"{100 * mean:.1f}%", "Rank-seconds": f"{rank_seconds:,.0f}"}
        )
    parts = [model, markdown_rows(rows), "Rank-seconds: a rank has one GPU."]
    released = model_release(model)
    days = {result.benchmark: day for result in results if (day := _public_since(result))}
    if old := [name for name, day in days.items() if released and day < released]:
        parts.append(
            f"{', '.join(old)}: public before the model ({released}), which may have been trained on it."
        )
    return "\n\n".join(parts)


def _public_since(result: EvaluationResult) -> str | None:
    reader = result.manifest["benchmark"]["reader"]
    return BENCHMARKS[reader].released if reader in BENCHMARKS else None
