"""A recipe that is about to run: loaded with every check, and resolved: what it names, found once."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import megatron_eqlen.hf
from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.objectives.checks import check_combination, problems
from megatron_eqlen.objectives.objective import Objective
from megatron_eqlen.objectives.registry import resolve
from megatron_eqlen.recipe import BenchmarkRecipe, LoraRecipe, Recipe, layout
from megatron_eqlen.recipe import load as recipe_load
from megatron_eqlen.recipe.engine_options import MegatronOptions, split_megatron
from megatron_eqlen.recipe.inputs import fetch, hub_repo, local_path, where_from

if TYPE_CHECKING:
    from megatron_eqlen.hf.tokenizer import Tokenizer

KNOWN_MODELS = Path(megatron_eqlen.hf.__file__).parent / "configs"
"""config.json files of public models, so that a plan needs no download."""
PUBLISHERS = ("Qwen/", "deepseek-ai/", "meta-llama/", "HuggingFaceTB/")
"""Starts of these models' names on the hub."""


@dataclass(frozen=True)
class Job:
    """The recipe of a command, with its objective, its model, and that model's folder. A teacher is a job
    beside it, with a layout of its own in the same parallel groups."""

    recipe: Recipe
    section: Literal["model", "teacher"] = "model"
    """Section of the recipe that names the model."""

    @cached_property
    def objective(self) -> Objective:
        return resolve(self.recipe)

    @cached_property
    def megatron(self) -> MegatronOptions:
        return split_megatron(self.recipe.model.megatron)

    @cached_property
    def folder(self) -> Path:
        """Folder of weights and tokenizer. Raises HubError for a name that the hub's cache lacks."""
        return local_path(getattr(self.recipe, self.section))

    @cached_property
    def model(self) -> ModelConfig:
        """Configuration of the model, from its folder, the shipped file of the same name, or the hub, of
        which only this file is downloaded. Raises ValueError if there is none."""
        section = getattr(self.recipe, self.section)
        folder, repo = Path(section.path), hub_repo(section)
        shipped = KNOWN_MODELS / f"{folder.name.lower()}.json"
        # another publisher's repository, or a pinned revision, may differ from the shipped file of that name
        published = repo is None or (repo.revision is None and repo.name.startswith(PUBLISHERS))
        if folder.exists():
            source = folder
        elif shipped.is_file() and published:
            source = shipped
        elif repo is not None:
            source = repo.file("config.json")
        else:
            known = ", ".join(sorted(path.stem for path in KNOWN_MODELS.glob("*.json")))
            found = f"no config.json in {folder}, and {folder.name!r} is not one of {known}"
            raise ValueError(f"{self.section}.path: {found}{where_from(self.recipe)}")
        return read_config(source)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError for tokens without an embedding: tensor parallelism would read zeros."""
        from megatron_eqlen.hf.tokenizer import load_tokenizer

        tokenizer, size = load_tokenizer(self.folder), self.model.vocab_size
        if tokenizer.vocab_size > size:
            found = f"{tokenizer.vocab_size} (resize_token_embeddings of Transformers makes room)"
            raise ValueError(f"{self.folder}: expected at most vocab_size {size} tokens, found {found}")
        return tokenizer

    @cached_property
    def teacher(self) -> Job | None:
        """The job of the model at ``teacher.path``: its layers evenly over the stages, without adapters."""
        if not self.recipe.teacher.path:
            return None
        model = Job(self.recipe, "teacher").model
        changes = {"parallel": layout.of_teacher(self.recipe.parallel, model), "lora": LoraRecipe()}
        return Job(self.recipe.model_copy(update=changes), "teacher")

    def fetch(self) -> None:
        """Check local inputs, and download others that the cache lacks. Raises RecipeError or ValueError."""
        fetch(self.recipe)
        if self.teacher is None:
            return
        from megatron_eqlen.hf.tokenizer import require_same

        folder, model = self.teacher.folder, self.teacher.model
        problems = [*layout.weights(self.teacher.recipe.parallel, model), *layout.paths(self.recipe, model)]
        layout.require(f"teacher.path: {folder}: {problem}" for problem in problems)
        require_same(self.tokenizer, self.teacher.tokenizer)

    def check_layout(self) -> None:
        """Raise LayoutError for a layout that cannot start with this model."""
        layout.check(self.recipe, self.model)


def load(path: str | Path, overrides: Sequence[str] = (), run: Path | None = None) -> Recipe:
    """Load the recipe in ``path`` with ``key.sub=value`` overrides applied. ``run``: its folder, by
    default the recipe's own; what its run began with is not refused. Raises RecipeError."""

    def check(recipe: Recipe) -> None:
        known: set[str] = set()
        with suppress(ValueError, OSError):  # it has not begun, or its recipe can be read no more
            known.update(problems(Job(recipe_load.load((run or recipe.run_folder) / recipe_load.RECIPE))))
        check_combination(Job(recipe), known)

    return recipe_load.load(path, overrides, [check])


def parse(raw: dict[str, Any], where: str, known: Container[str] = ()) -> Recipe:
    """Make a recipe from plain data; ``where`` names it in errors. Raises RecipeError, not for ``known``."""
    return recipe_load.parse(raw, where, [lambda recipe: check_combination(Job(recipe), known)])


OF_STEPS = (
    "tokens_per_step", "carry_over", "max_staleness", "staleness", "on_sync", "keep_routes", "record_routes",
    "center_scores",
)  # fmt: skip


def answering(recipe: Recipe, name: str) -> tuple[Recipe, BenchmarkRecipe]:
    """Return the recipe that samples as the evaluation of ``name``, and the benchmark. Raises ValueError."""
    benchmarks = {benchmark.name: benchmark for benchmark in recipe.evaluation.benchmarks}
    if name not in benchmarks:
        raise ValueError(f"--benchmark: expected one of {', '.join(benchmarks) or 'none'}, found {name!r}")
    asked = recipe.of_benchmark(benchmarks[name])
    if asked.group_size < 2 or not asked.rollout.temperature:
        expected = "evaluation.samples above 1 and a temperature above 0"
        raise ValueError(f"--benchmark {name}: expected {expected}, found one response to a problem")
    unread = "objective", "teacher", "equal_length", "tree_sampling"
    raw = {section: keys for section, keys in untrained(asked).items() if section not in unread}
    # rounded weights are refused where no loss corrects for them; nothing is trained that could warm up
    loss = {"rollout_is": "token"} if asked.rollout.quantization else {}
    raw |= {"loss": loss, "optimizer": {"warmup_steps": 0}}
    return parse(raw, f"--benchmark {name}"), benchmarks[name]


def untrained(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's plain data, without the keys of ``rollout`` that only a step or its loss reads."""
    raw = recipe.model_dump(mode="json", exclude_unset=True)
    return raw | {"rollout": {key: v for key, v in raw.get("rollout", {}).items() if key not in OF_STEPS}}
