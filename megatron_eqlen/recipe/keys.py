"""All keys of a recipe, and the nearest key to a misspelt one."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_eqlen.recipe import Recipe, Section

SAME_SECTION = 0.1
"""Factor by which a key of the same section is preferred to an equally similar one elsewhere."""
LEAST_SIMILAR = 0.4
"""Lowest similarity, from 0 to 1, at which a key is suggested."""
ABBREVIATION = 0.9
"""Similarity of a key to its first letters, three or more: ``temp`` means ``temperature``, not ``steps``."""
OF_OTHERS = {
    "optimizer.lr": ("learning_rate",),
    "optimizer.clip_grad": ("max_grad_norm",),
    "optimizer.warmup_steps": ("warmup_ratio", "lr_warmup_steps"),
    "loss.kl_coef": ("beta", "kl_loss_coef", "init_kl_coef"),
    "loss.clip_ratio_low": ("epsilon", "eps_clip"),
    "loss.clip_ratio_high": ("epsilon_high", "eps_clip_high"),
    "loss.loss_agg_mode": ("loss_type",),
    "loss.advantage": ("adv_estimator", "advantage_estimator"),
    "loss.minibatches": ("ppo_mini_batch_size",),
    "loss.epochs": ("ppo_epochs", "num_iterations"),
    "group_size": ("num_generations", "n_samples_per_prompt", "rollout_n"),
    "data.prompts_per_step": ("train_batch_size", "rollout_batch_size"),
    "packing.max_tokens_per_row": ("per_device_train_batch_size", "micro_batch_size"),
    "rollout.max_response_length": ("max_completion_length", "max_new_tokens"),
    "steps": ("max_steps", "total_training_steps", "num_rollout", "total_epochs", "num_train_epochs"),
    "checkpoint.every": ("save_steps", "save_freq"),
    "evaluation.every": ("eval_steps", "test_freq"),
    "cluster.processes_per_node": ("n_gpus_per_node",),
    "cluster": ("trainer",),
    "rollout": ("actor_rollout_ref",),
    "loss": ("algorithm", "actor", "ppo", "critic"),
    "data.sources.0.path": ("train_files",),
    "evaluation.benchmarks.0.path": ("val_files",),
    "data.sources.0.grader": ("reward_funcs", "custom_reward_function"),
    "model.path": ("model_name_or_path",),
    "report.wandb_project": ("project_name",),
}
"""Names that verl, TRL, slime and OpenRLHF give our keys, where their spelling does not lead to ours."""


def nearest(unknown: Sequence[str | int], schema: type[Section] = Recipe) -> str | None:
    """Return the dotted key of ``schema`` whose name is most similar to the last part of ``unknown``.

    ``("lr",)`` -> ``optimizer.lr``; ``("data", "sources", 3, "wieght")`` -> ``data.sources.3.weight``.
    """
    section, name = _without_numbers(unknown[:-1]), str(unknown[-1])
    if schema is Recipe and (known := [key for key, names in OF_OTHERS.items() if name.lower() in names]):
        return known[0]

    def likeness(key: tuple[str, ...]) -> float:
        return _alike(name.lower(), key[-1]) + SAME_SECTION * (_without_numbers(key[:-1]) == section)

    best = max(all_keys(schema), key=lambda key: (likeness(key), -len(key)))
    if likeness(best) < LEAST_SIMILAR:
        return None
    if _without_numbers(best[:-1]) == section:
        best = (*map(str, unknown[:-1]), best[-1])
    return ".".join(best)


def _alike(name: str, key: str) -> float:
    """Return the similarity of two names, from 0 to 1 (equal)."""
    ratio = difflib.SequenceMatcher(None, name, key).ratio()
    return max(ratio, ABBREVIATION) if len(name) >= 3 and key.startswith(name) and name != key else ratio


def all_keys(section: type[Section] = Recipe, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of the schema and of its sections; list items have the number 0."""
    for name, field in section.model_fields.items():
        yield (*at, name)
        below, is_list = section_in(field.annotation)
        if below is not None:
            yield from all_keys(below, (*at, name, *(["0"] if is_list else [])))


def section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the section in a key of this type, and True if the key holds a list of sections."""
    origin = typing.get_origin(annotation)
    if origin in (list, types.UnionType, typing.Union):
        sections = [section_in(argument)[0] for argument in typing.get_args(annotation)]
        return next((section for section in sections if section is not None), None), origin is list
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return (annotation if is_section else None), False


def _without_numbers(parts: Sequence[str | int]) -> tuple[str, ...]:
    return tuple(str(part) for part in parts if not str(part).isdigit())
