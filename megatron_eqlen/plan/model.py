"""Model configuration of a recipe, from its folder or from the shipped configurations."""

from __future__ import annotations

from pathlib import Path

import megatron_eqlen.hf
from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.checks import where_from

KNOWN_MODELS = Path(megatron_eqlen.hf.__file__).parent / "configs"
"""config.json files of public models, so that a plan needs no download."""


def model_config(recipe: Recipe) -> ModelConfig:
    """Return the model's configuration, from the recipe's model folder or the shipped file of the same name.
    Raises ValueError if neither exists."""
    folder = Path(recipe.model.path)
    if (folder / "config.json").is_file():
        return read_config(folder)
    shipped = KNOWN_MODELS / f"{folder.name.lower()}.json"
    if shipped.is_file():
        return read_config(shipped)
    known = ", ".join(sorted(path.stem for path in KNOWN_MODELS.glob("*.json")))
    raise ValueError(
        f"model.path: no config.json in {folder}, and {folder.name!r} is not one of {known}"
        f"{where_from(recipe)}"
    )
