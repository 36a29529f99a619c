"""An exported model's README for the Hugging Face hub, made from the run folder's files alone."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from megatron_eqlen.evaluation.result import EvaluationResult, compare
from megatron_eqlen.files import write_text
from megatron_eqlen.hf.hub import upload
from megatron_eqlen.metrics import spent
from megatron_eqlen.recipe import ModelRecipe, Recipe, SourceRecipe
from megatron_eqlen.recipe.inputs import hub_repo
from megatron_eqlen.recipe.load import dump, load_run
from megatron_eqlen.report.evaluations import evaluations
from megatron_eqlen.report.metrics import read_metrics
from megatron_eqlen.report.run_folder import versions

TASK = "text-generation"


def write_model_card(run_folder: Path) -> Path:
    """Write ``export/README.md`` of a run that has exported its model; return its path."""
    recipe = load_run(run_folder)
    records = read_metrics(run_folder)
    steps = int(records[-1]["step"] or 0) if records else 0
    results = evaluations(run_folder / "evaluation", steps)
    after = next((found for label, _, found in reversed(results) if label == "after"), [])
    before = next((found for label, _, found in results if label == "before"), [])
    outcome = recipe.budget.outcome(spent(steps, records[-1])) if records else "no step"
    text = "\n\n".join([
        f"---\n{_data(recipe, after).to_yaml()}\n---",
        f"# {_name(recipe)}",
        f"`{_place(recipe.model)}` trained with megatron_eqlen: {recipe.method}, seed {recipe.seed}; "
        f"{outcome}.",
        f"## Data\n\n{_sources(recipe)}",
        *(["## Evaluation\n\n" + _table(before, after)] if after else []),
        f"## Recipe\n\n```yaml\n{dump(recipe).strip()}\n```",
        f"## Made with\n\n{_versions()}",
    ])  # fmt: skip
    card = run_folder / "export" / "README.md"
    write_text(card, text + "\n")
    return card


def push(run_folder: Path, to: str | None = None, public: bool = False) -> str:
    """Upload a run's exported model with its card; return the commit's address. ``to``: ``ORG/NAME``, default
    the card's title, among the user's own models. Raises ValueError if the run has exported no model."""
    export = run_folder / "export"
    if not export.is_dir():
        raise ValueError(f"{run_folder}: expected the folder of an ended run, with export/, found none")
    write_model_card(run_folder)
    recipe = load_run(run_folder)
    return upload(export, to or _name(recipe), not public, f"{recipe.method}, seed {recipe.seed}")


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
