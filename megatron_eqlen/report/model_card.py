"""An exported model's README for the Hugging Face hub, made from the run folder's files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from megatron_eqlen.files import write_text
from megatron_eqlen.metrics import spent
from megatron_eqlen.processes import hold
from megatron_eqlen.recipe import ModelRecipe, Recipe, SourceRecipe
from megatron_eqlen.recipe.inputs import hub_repo
from megatron_eqlen.recipe.load import load_run
from megatron_eqlen.recipe.yaml_values import to_yaml
from megatron_eqlen.report.evaluations import Evaluation, evaluation_files, histories, read_evaluations
from megatron_eqlen.report.metrics import read_newest

TASK = "text-generation"
PUBLISHED: Any = {
    **dict.fromkeys(("objective", "sampling", "group_size", "equal_length", "tree_sampling", "loss"), True),
    **dict.fromkeys(("optimizer", "lora", "parallel", "packing"), True),
    "model": {"dtype", "megatron"},
    "data": {"prompts_per_step", "max_prompt_length", "instruction", "instruction_role"},
    "rollout": {"temperature", "top_p", "top_k", "min_p", "max_response_length"},
}
"""Keys of a recipe that hold no account, address or path of the place where it ran."""


def write_model_card(run_folder: Path) -> Path:
    """Write ``export/README.md`` of a run that has exported its model; return its path."""
    recipe = load_run(run_folder)
    newest = read_newest(run_folder, 1)
    steps = newest[-1]["step"] if newest else 0
    files = [
        (step, path)
        for step, path in evaluation_files(run_folder / "evaluation", steps)
        if path.stem in ("before", "after")
    ]
    results = histories(read_evaluations(files)).values()
    after = [rows[-1] for rows in results if rows[-1].label == "after"]
    outcome = recipe.budget.outcome(spent(steps, newest[-1])) if newest else "no step"
    sources = "\n".join(
        f"- {source.name}: `{_place(source)}`, read as {source.reader}" for source in recipe.data.sources
    )
    made_with = hold.read_holder(run_folder / hold.FILE).get("versions", {})
    text = "\n\n".join([
        f"---\n{_data(recipe, after).to_yaml()}\n---",
        f"# {_name(recipe)}",
        f"`{_place(recipe.model)}` trained with megatron_eqlen: {recipe.method}, seed {recipe.seed}; "
        f"{outcome}.",
        f"## Data\n\n{sources}",
        *(["## Evaluation\n\n" + _table(after)] if after else []),
        f"## Recipe\n\n```yaml\n{to_yaml(recipe.model_dump(mode="json", include=PUBLISHED)).strip()}\n```",
        "## Made with\n\n" + ", ".join(f"{name} {version}" for name, version in made_with.items()),
    ])  # fmt: skip
    card = run_folder / "export" / "README.md"
    write_text(card, text + "\n")
    return card


def _data(recipe: Recipe, after: list[Evaluation]) -> ModelCardData:
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
                dataset_type=row.result.benchmark,
                dataset_name=row.result.benchmark,
                metric_type="accuracy",
                metric_name=f"avg@{row.result.samples}",
                metric_value=round(row.result.accuracy.mean, 4),
            )
            for row in after
        ],
    )


def _name(recipe: Recipe) -> str:
    return f"{Path(recipe.model.path).resolve().name}-{recipe.method}"


def _place(section: ModelRecipe | SourceRecipe) -> str:
    """Return a name on the hub with its commit, or the name of a local file or folder."""
    return str(hub_repo(section) or Path(section.path).resolve().name)


def _table(after: list[Evaluation]) -> str:
    """Return a table of accuracies with 95% intervals, and the paired change on the same questions."""
    rows = ["| benchmark | problems | | accuracy | change |", "|---|---|---|---|---|"]
    for row in after:
        result, change = row.result, row.gain.points if row.gain else "not measured before"
        accuracy = f"avg@{result.samples} | {row.result.accuracy}"
        rows.append(f"| {result.benchmark} | {len(result.answers)} | {accuracy} | {change} |")
    return "\n".join([*rows, "", "95% intervals; the change is paired by problem."])
