"""An exported model's README for the Hugging Face hub, made from the run folder's files alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from megatron_eqlen.evaluation.result import EvaluationResult, compare
from megatron_eqlen.files import write_text
from megatron_eqlen.metrics import spent
from megatron_eqlen.recipe import ModelRecipe, Recipe, SourceRecipe
from megatron_eqlen.recipe.inputs import hub_repo
from megatron_eqlen.recipe.load import load_run
from megatron_eqlen.recipe.yaml_values import to_yaml
from megatron_eqlen.report.evaluations import evaluations
from megatron_eqlen.report.metrics import read_metrics
from megatron_eqlen.report.run_folder import versions

TASK = "text-generation"
OWN = ("cluster", "run_dir", "inputs_from", "report", "profile", "variant")
"""Sections of a recipe about the place where it ran: accounts, partitions, folders, the command line."""


def write_model_card(run_folder: Path) -> Path:
    """Write ``export/README.md`` of a run that has exported its model; return its path."""
    recipe = load_run(run_folder)
    records = read_metrics(run_folder)
    steps = int(records[-1]["step"] or 0) if records else 0
    results = evaluations(run_folder / "evaluation", steps)
    after = next((measured for label, _, measured in reversed(results) if label == "after"), [])
    before = next((measured for label, _, measured in results if label == "before"), [])
    outcome = recipe.budget.outcome(spent(steps, records[-1])) if records else "no step"
    text = "\n\n".join([
        f"---\n{_data(recipe, after).to_yaml()}\n---",
        f"# {_name(recipe)}",
        f"`{_place(recipe.model)}` trained with megatron_eqlen: {recipe.method}, seed {recipe.seed}; "
        f"{outcome}.",
        f"## Data\n\n{_sources(recipe)}",
        *(["## Evaluation\n\n" + _table(before, after)] if after else []),
        f"## Recipe\n\n```yaml\n{to_yaml(_published(recipe)).strip()}\n```",
        f"## Made with\n\n{_versions()}",
    ])  # fmt: skip
    card = run_folder / "export" / "README.md"
    write_text(card, text + "\n")
    return card


def _data(recipe: Recipe, after: list[EvaluationResult]) -> ModelCardData:
    """Return the metadata that the hub indexes."""
    named = [source.path for source in recipe.data.sources if hub_repo(source)]
    return ModelCardData(
        base_model=recipe.model.path if hub_repo(recipe.model) else None,
        datasets=named or None,
        library_name="transformers",
        pipeline_tag=TASK,
        tags=["reinforcement-learning", "megatron_eqlen", recipe.method],
        model_name=_name(recipe),
        eval_results=[
            EvalResult(
                task_type=TASK,
                dataset_type=result.benchmark,
                dataset_name=result.benchmark,
                metric_type="accuracy",
                metric_name=f"avg@{result.samples}",
                metric_value=round(result.accuracy.mean, 4),
            )
            for result in after
        ],
    )


def _name(recipe: Recipe) -> str:
    return f"{_base(recipe)}-{recipe.method}"


def _base(recipe: Recipe) -> str:
    return Path(recipe.model.path).resolve().name


def _sources(recipe: Recipe) -> str:
    sources = recipe.data.sources
    return "\n".join(f"- {source.name}: `{_place(source)}`, read as {source.reader}" for source in sources)


def _place(section: ModelRecipe | SourceRecipe) -> str:
    """Return a name on the hub with its commit, or the name of a local file or folder."""
    return str(hub_repo(section) or Path(section.path).resolve().name)


def _published(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe without what is about the place where it ran: addresses go, local paths become
    names."""
    keys = recipe.model_dump(mode="json", exclude={*OWN})
    keys["rollout"]["servers"] = []
    keys["reward"]["sandbox_url"] = None
    return _named(keys)


def _named(value: Any) -> Any:
    """Return plain data with the last part of each local path in place of the path."""
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_named(item) for item in value]
    is_local = isinstance(value, str) and "/" in value and (value[0] in "/~." or os.path.exists(value))
    return Path(value).name if is_local else value


def _table(before: list[EvaluationResult], after: list[EvaluationResult]) -> str:
    """Return a table of accuracies with 95% intervals, and the paired change on the same questions."""
    earlier = {result.benchmark: result for result in before}
    rows = ["| benchmark | problems | | accuracy | change |", "|---|---|---|---|---|"]
    for result in after:
        accuracy = f"avg@{result.samples} | {result.accuracy}"
        same = earlier.get(result.benchmark)
        change = compare(same, result).points if same else "not measured before"
        rows.append(f"| {result.benchmark} | {len(result.answers)} | {accuracy} | {change} |")
    return "\n".join([*rows, "", "95% intervals; the change is paired by problem."])


def _versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())
