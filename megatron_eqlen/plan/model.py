"""Model configuration of a recipe, from its folder or from the shipped configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import megatron_eqlen.hf
from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.inputs import hub_repo, where_from

KNOWN_MODELS = Path(megatron_eqlen.hf.__file__).parent / "configs"
"""config.json files of public models, so that a plan needs no download."""
PUBLISHERS = ("Qwen/", "deepseek-ai/", "meta-llama/", "HuggingFaceTB/")
"""Starts of these models' names on the hub."""


def model_config(recipe: Recipe, key: Literal["model", "teacher"] = "model") -> ModelConfig:
    """Return the configuration of model or teacher, from its folder, the shipped file of the same name, or
    the hub, of which only this file is downloaded. Raises ValueError if there is none."""
    section = getattr(recipe, key)
    folder, repo = Path(section.path), hub_repo(section)
    if (folder / "config.json").is_file():
        return read_config(folder)
    shipped = KNOWN_MODELS / f"{folder.name.lower()}.json"
    published = repo is None or (repo.revision is None and repo.name.startswith(PUBLISHERS))
    if shipped.is_file() and published:
        return read_config(shipped)
    if repo is not None:
        return read_config(repo.file("config.json"))
    known = ", ".join(sorted(path.stem for path in KNOWN_MODELS.glob("*.json")))
    raise ValueError(
        f"{key}.path: no config.json in {folder}, and {folder.name!r} is not one of {known}"
        f"{where_from(recipe)}"
    )
