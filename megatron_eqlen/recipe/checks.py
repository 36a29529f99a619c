"""Checks between the keys of a recipe; types are checked by the schema, objectives in
``objectives/checks.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import HttpUrl, ValidationError

from megatron_eqlen.recipe import (
    ANY_COLUMNS,
    LoraRecipe,
    OptimizerRecipe,
    Recipe,
    RolloutRecipe,
    Section,
    When,
    layout,
    shown,
)
from megatron_eqlen.recipe.budget import COSTS
from megatron_eqlen.recipe.engine_options import check_options
from megatron_eqlen.recipe.plugins import is_import_path, load_object
from megatron_eqlen.tokens import MOST_PER_TOKEN


def check(recipe: Recipe) -> None:
    """Raise ValueError, with the arithmetic, for keys that contradict each other."""
    _check_name(recipe.name)
    _check_place(recipe)
    _check_data(recipe)
    _check_end(recipe)
    _check_lora(recipe.lora)
    _check_learning_rate(recipe.optimizer)
    _check_row_budget(recipe)
    _check_sampling(recipe)
    _check_engine(recipe.rollout)
    _check_sampling_mask(recipe.rollout)
    _check_teacher(recipe)
    _check_gpus(recipe)
    _check_keep_streams(recipe)
    layout.check(recipe)
    _check_plugins(recipe)
    if recipe.supervised:
        _check_supervised(recipe)
    check_options("model.megatron", recipe.model.megatron)
    check_options("rollout.vllm", recipe.rollout.vllm)


def check_effects(recipe: Recipe, resolved: Recipe) -> None:
    """Raise ValueError for a key that is set and cannot act under the other keys (``When``).

    ``resolved``: the recipe with its objective's defaults.
    """
    for key, value, default, conditions in _set_keys(recipe):
        for condition in conditions:
            found = value_of(resolved, condition.key)
            if not condition.is_met(found):
                remedy = "leave it out" if value == default else f"leave it at {shown(default)}"
                raise ValueError(
                    f"{key}: {shown(value)} acts only with {condition}, found {shown(found)}: {remedy}"
                )


def _set_keys(
    section: Section, prefix: str = "", inherited: tuple[When, ...] = ()
) -> Iterator[tuple[str, Any, Any, tuple[When, ...]]]:
    """Yield the keys that differ from their default, or are switched on as by default: name, value, default,
    conditions. A section that gives all its keys is a resolved recipe's, where none is switched on."""
    fields, given = type(section).model_fields, section.model_fields_set
    for name, field in fields.items():
        key, value, default = prefix + name, getattr(section, name), field.get_default()
        own = (condition.within(prefix) for condition in field.metadata if isinstance(condition, When))
        conditions = (*inherited, *own)
        below = {key: value} if isinstance(value, Section) else {}
        if isinstance(value, list):
            below = {f"{key}.{n}": item for n, item in enumerate(value) if isinstance(item, Section)}
        for at, item in below.items():
            yield from _set_keys(item, f"{at}.", conditions)
        switched_on = value is True and name in given and len(given) < len(fields)
        if not isinstance(value, Section) and (value != default or switched_on):
            yield key, value, default, conditions


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key."""
    at: Any = recipe
    for part in key.split("."):
        at = at[int(part)] if part.isdecimal() else getattr(at, part)
    return at


def _check_data(recipe: Recipe) -> None:
    for number, section in enumerate(recipe.data.sources):
        key = f"data.sources.{number}"
        if section.reader == "opencodereasoning" and section.split not in (None, "split_0", "split_1"):
            raise ValueError(f"{key}.split: expected split_0 or split_1, found {section.split!r}")


def _check_name(name: str) -> None:
    """Raise ValueError unless the name can name a folder under ``runs/``."""
    if name in (".", "..") or not re.fullmatch(r"[\w.,=+@ -]{1,100}", name):
        raise ValueError(
            f"name: expected 1 to 100 letters, digits or any of ' _-.,=+@' (it names a folder under runs/), "
            f"found {name!r}"
        )


def _check_place(recipe: Recipe) -> None:
    """Raise ValueError for a folder, or for a time limit, that no batch script can hold."""
    cluster = recipe.cluster
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED", cluster.time):
        raise ValueError(
            f"cluster.time: expected SLURM's MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS or UNLIMITED, found "
            f"{cluster.time!r}"
        )
    if not (recipe.run_dir or "").isprintable():
        raise ValueError(f"run_dir: expected a path in one line, found {recipe.run_dir!r}")


def _check_end(recipe: Recipe) -> None:
    if not [*recipe.budget.limits()]:
        raise ValueError(f"steps: expected this, or one of {', '.join(COSTS)}, to end a run, found none")


def _check_lora(lora: LoraRecipe) -> None:
    if len(set(lora.targets or ())) < len(lora.targets or ()):
        raise ValueError(f"lora.targets: expected each target once, found {', '.join(lora.targets or ())}")


def _check_learning_rate(optimizer: OptimizerRecipe) -> None:
    if optimizer.min_lr > optimizer.lr:
        raise ValueError(
            f"optimizer.min_lr: {optimizer.min_lr:g} is the final learning rate: expected at most "
            f"optimizer.lr {optimizer.lr:g}"
        )


def _check_row_budget(recipe: Recipe) -> None:
    if recipe.packing.max_tokens_per_row < recipe.longest_path:
        raise ValueError(
            f"packing.max_tokens_per_row: {recipe.packing.max_tokens_per_row} is less than the longest path, "
            f"{recipe.longest_path_text}"
        )


def _check_sampling(recipe: Recipe) -> None:
    if recipe.sampling == "equal_length" and recipe.group_size % 2:
        raise ValueError(
            f"group_size: {recipe.group_size} is odd; equal_length sampling splits it into pairs of tracks"
        )


def _check_engine(rollout: RolloutRecipe) -> None:
    if rollout.engine == "server" and not rollout.servers:
        raise ValueError("rollout.servers: expected at least one URL with rollout.engine: server, found none")
    _check_servers(rollout.servers)


def _check_servers(urls: list[str]) -> None:
    addresses: list[str] = []
    for number, text in enumerate(urls):
        try:
            url = HttpUrl(text)
        except ValidationError:
            url = None
        if url is None or url.port == 0 or url.username or url.password or url.query or url.fragment:
            raise ValueError(f"rollout.servers.{number}: expected http://HOST:PORT, found {text!r}")
        if str(url).rstrip("/") in addresses:
            raise ValueError(f"rollout.servers.{number}: expected each server once, found {text!r} again")
        addresses.append(str(url).rstrip("/"))


def _check_gpus(recipe: Recipe) -> None:
    """Refuse what vLLM lacks on GPUs, and kernels that token trees have not."""
    rollout, device = recipe.rollout, recipe.cluster.device
    backend = recipe.model.megatron.get("attention_backend")
    if backend and (backend, device) != ("flash", "gpu"):
        raise ValueError(
            f"model.megatron.attention_backend: expected flash, with cluster.device: gpu, found {backend} "
            f"with {device}: token trees have no other kernels"
        )
    routed = device == "gpu" and rollout.keep_routes and rollout.engine == "colocated"
    if routed and rollout.tensor_parallel > 1:
        raise ValueError(
            "rollout.keep_routes: true needs rollout.engine: server or rollout.tensor_parallel: 1, found "
            f"a colocated engine of {rollout.tensor_parallel} GPUs, of which vLLM gives one the routes"
        )
    if rollout.speculation and rollout.min_p > 0:
        raise ValueError(
            f"rollout.speculation needs rollout.min_p: 0, found {rollout.min_p:g}: vLLM has no min-p then"
        )


def _check_sampling_mask(rollout: RolloutRecipe) -> None:
    if rollout.keep_sampling_mask and not 1 <= rollout.top_k <= MOST_PER_TOKEN:
        raise ValueError(
            f"rollout.keep_sampling_mask: true needs rollout.top_k from 1 to {MOST_PER_TOKEN} (it bounds "
            f"what is recorded of each token), found {rollout.top_k}"
        )


def _check_teacher(recipe: Recipe) -> None:
    """Refuse two teachers, and a server whose log-probs the trainer's cannot be compared with."""
    if recipe.loss.teacher_coef != 1 and not recipe.teacher:
        raise ValueError(
            f"loss.teacher_coef: {recipe.loss.teacher_coef:g}: expected teacher.path or teacher.url"
        )
    if recipe.teacher.url and recipe.teacher.path:
        raise ValueError(f"teacher.url: {recipe.teacher.url} with teacher.path: set one of them")
    if recipe.teacher.url and (recipe.rollout.temperature != 1 or recipe.rollout.keep_sampling_mask):
        raise ValueError(
            "teacher.url: a server gives log-probs at temperature 1 over the whole vocabulary: expected "
            f"rollout.temperature: 1 and keep_sampling_mask: false, found {recipe.rollout.temperature:g} and "
            f"{shown(recipe.rollout.keep_sampling_mask)}; with teacher.path the trainer computes them"
        )


def _check_keep_streams(recipe: Recipe) -> None:
    if recipe.report.keep_streams == "evaluations" and not recipe.evaluation.every:
        raise ValueError("report.keep_streams: evaluations needs evaluation.every >= 1, found 0")


SUPERVISED = ("kl_coef", "kl_estimator", "minibatches", "epochs", "loss_agg_mode")
"""Keys of ``loss`` that act with ``objective: sft``."""
OF_SAMPLES = (
    "group_size", "generated_tokens", "teacher", "environment", "reward.weights", "reward.rubric",
    *(f"rollout.{key}" for key in ("tokens_per_step", "staleness", "keep_sampling_mask", "keep_routes")),
    "rollout.mismatch",
)  # fmt: skip
"""Keys and sections without effect where no response is sampled for training."""
OF_ENGINE = ("rollout", "reward", "data.max_prompt_length")
"""Those without effect where nothing is evaluated, either."""


def _check_supervised(recipe: Recipe) -> None:
    """Refuse what has no effect with ``objective: sft``."""
    if recipe.sampling != "independent":
        raise ValueError(f"sampling: {recipe.sampling} has no effect with objective: sft: leave it out")
    useless = OF_SAMPLES + (() if recipe.generates else OF_ENGINE)
    for key, value, _, _ in _set_keys(recipe):
        section, _, name = key.partition(".")
        unused = any(key == each or key.startswith(f"{each}.") for each in useless)
        if (unused and key != "rollout.park_trainer") or (section == "loss" and name not in SUPERVISED):
            raise ValueError(f"{key}: {shown(value)} has no effect with objective: sft: leave it out")
    for number, source in enumerate(recipe.data.sources):
        if source.grader is not None:
            raise ValueError(
                f"data.sources.{number}.grader: {source.grader} has no effect with objective: sft: leave it "
                "out"
            )
        if source.reader not in ANY_COLUMNS and not is_import_path(source.reader):
            raise ValueError(
                f"data.sources.{number}.reader: objective: sft trains responses: expected one of "
                f"{', '.join(ANY_COLUMNS)} or package.module:name, found {source.reader}"
            )


def _check_plugins(recipe: Recipe) -> None:
    """Raise ValueError unless every object that the recipe names by import path can be imported."""
    sections = {"data.sources": recipe.data.sources, "evaluation.benchmarks": recipe.evaluation.benchmarks}
    for section, items in sections.items():
        for number, item in enumerate(items):
            for key, path in (("reader", item.reader), ("grader", item.grader or "")):
                if is_import_path(path):
                    load_object(path, f"{section}.{number}.{key}")
    own = recipe.reward.rubric or recipe.environment.name
    for number, source in enumerate(recipe.data.sources):
        if recipe.reward.weights and not own and not is_import_path(source.grader or ""):
            raise ValueError(
                f"reward.weights: {shown(recipe.reward.weights)} weighs named rewards: expected a grader of "
                f"your own at data.sources.{number}.grader, found {source.grader or 'none'}"
            )
    if is_import_path(recipe.environment.name or ""):
        load_object(recipe.environment.name or "", "environment.name")
