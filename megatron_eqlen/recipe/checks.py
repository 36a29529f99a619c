"""Checks between the keys of a recipe; types are checked by the schema, objectives in
``objectives/checks.py``."""

from __future__ import annotations

import re

from pydantic import HttpUrl, ValidationError

from megatron_eqlen.recipe import OptimizerRecipe, Recipe, RolloutRecipe, layout
from megatron_eqlen.recipe.budget import COSTS
from megatron_eqlen.recipe.plugins import is_import_path, load_object
from megatron_eqlen.tokens import MOST_PER_TOKEN, SAMPLED


def check(recipe: Recipe) -> None:
    """Raise ValueError, with the arithmetic, for keys that contradict each other."""
    _check_name(recipe.name)
    _check_place(recipe)
    _check_data(recipe)
    _check_end(recipe)
    _check_lora(recipe)
    _check_learning_rate(recipe.optimizer)
    _check_row_budget(recipe)
    _check_sampling(recipe)
    _check_engine(recipe.rollout)
    _check_sampling_mask(recipe.rollout)
    _check_columns(recipe.rollout)
    _check_batch_invariant(recipe)
    _check_quantization(recipe)
    _check_carry_over(recipe.rollout)
    _check_keep_streams(recipe)
    _check_memory(recipe)
    layout.check(recipe)
    _check_plugins(recipe)


def _check_data(recipe: Recipe) -> None:
    """Raise ValueError for keys of a data source or benchmark that its reader has no use for."""
    sources = {f"data.sources.{number}": source for number, source in enumerate(recipe.data.sources)}
    benchmarks = {
        f"evaluation.benchmarks.{n}": benchmark for n, benchmark in enumerate(recipe.evaluation.benchmarks)
    }
    for key, section in (sources | benchmarks).items():
        if section.columns and section.reader != "jsonl":
            raise ValueError(f"{key}.columns: expected with reader: jsonl, found reader: {section.reader}")
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
    """Raise ValueError for a folder, or for options of SLURM, that no batch script can hold."""
    cluster = recipe.cluster
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED", cluster.time):
        raise ValueError(
            f"cluster.time: expected SLURM's MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS or UNLIMITED, found "
            f"{cluster.time!r}"
        )
    for key, name in (("partition", cluster.partition), ("account", cluster.account)):
        if name is not None and not re.fullmatch(r"[\w.,:@+-]+", name):
            raise ValueError(f"cluster.{key}: expected a name that SLURM knows, found {name!r}")
    if not (recipe.run_dir or "").isprintable():
        raise ValueError(f"run_dir: expected a path in one line, found {recipe.run_dir!r}")


def _check_end(recipe: Recipe) -> None:
    if not [*recipe.budget.limits()]:
        raise ValueError(f"steps: expected this, or one of {', '.join(COSTS)}, to end a run, found none")
    if recipe.steps is None and recipe.optimizer.lr_schedule != "constant":
        raise ValueError(
            f"optimizer.lr_schedule: {recipe.optimizer.lr_schedule} decays over a run's steps: set steps"
        )


def _check_lora(recipe: Recipe) -> None:
    lora, optimizer = recipe.lora, recipe.optimizer
    if not lora.rank:
        if lora != type(lora)():
            raise ValueError("lora: alpha and targets are of adapters, which lora.rank 0 switches off")
        return
    if len(set(lora.targets or ())) < len(lora.targets or ()):
        raise ValueError(f"lora.targets: expected each target once, found {', '.join(lora.targets or ())}")
    if optimizer.offload:
        raise ValueError(
            "optimizer.offload: true makes room for the optimizer state of all weights; with lora.rank "
            f"{lora.rank} only the adapters have one: leave one out"
        )


def _check_learning_rate(optimizer: OptimizerRecipe) -> None:
    if optimizer.min_lr > optimizer.lr:
        raise ValueError(
            f"optimizer.min_lr: {optimizer.min_lr:g} is the final learning rate: expected at most "
            f"optimizer.lr {optimizer.lr:g}"
        )


def _check_row_budget(recipe: Recipe) -> None:
    prompt, response = recipe.data.max_prompt_length, recipe.rollout.max_response_length
    if recipe.packing.max_tokens_per_row < prompt + response:
        raise ValueError(
            f"packing.max_tokens_per_row: {recipe.packing.max_tokens_per_row} is less than the longest path, "
            f"data.max_prompt_length {prompt} + rollout.max_response_length {response} = {prompt + response}"
        )


def _check_sampling(recipe: Recipe) -> None:
    if recipe.sampling == "equal_length" and recipe.group_size % 2:
        raise ValueError(
            f"group_size: {recipe.group_size} is odd; equal_length sampling splits it into pairs of tracks"
        )
    if recipe.equal_length.prefix_in_gradient and recipe.packing.layout != "expanded":
        raise ValueError(
            "equal_length.prefix_in_gradient: true needs packing.layout: expanded "
            "(each side trains its own copy of the prefix)"
        )


def _check_engine(rollout: RolloutRecipe) -> None:
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise ValueError(
            f"rollout.max_num_batched_tokens: {rollout.max_num_batched_tokens} is less than "
            f"rollout.max_num_seqs {rollout.max_num_seqs}: each decoding request takes a token a step"
        )
    if rollout.engine == "server" and not rollout.servers:
        raise ValueError("rollout.servers: expected at least one URL with rollout.engine: server, found none")
    _check_servers(rollout.servers)
    if rollout.staleness and rollout.engine != "server":
        raise ValueError(
            f"rollout.staleness: {rollout.staleness} needs rollout.engine: server, found {rollout.engine}: a "
            f"colocated engine sleeps while the trainer works"
        )


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


def _check_columns(rollout: RolloutRecipe) -> None:
    unknown = [name for name in rollout.keep_columns if name not in SAMPLED]
    if unknown or len(set(rollout.keep_columns)) < len(rollout.keep_columns):
        raise ValueError(
            f"rollout.keep_columns: expected different names among {', '.join(SAMPLED)}, "
            f"found {', '.join(rollout.keep_columns)}"
        )


def _check_batch_invariant(recipe: Recipe) -> None:
    if recipe.rollout.batch_invariant and recipe.cluster.device == "cpu":
        raise ValueError(
            "rollout.batch_invariant: true needs cluster.device: gpu, found cpu: vLLM has no batch-invariant "
            "kernels for CPUs"
        )


def _check_quantization(recipe: Recipe) -> None:
    quantization = recipe.rollout.quantization
    if quantization and recipe.model.dtype != "bfloat16":
        raise ValueError(
            f"rollout.quantization: {quantization} needs model.dtype: bfloat16, found {recipe.model.dtype}"
        )


def _check_sampling_mask(rollout: RolloutRecipe) -> None:
    if not rollout.keep_sampling_mask:
        return
    if not 1 <= rollout.top_k <= MOST_PER_TOKEN:
        raise ValueError(
            f"rollout.keep_sampling_mask: true needs rollout.top_k from 1 to {MOST_PER_TOKEN} (it bounds "
            f"what is recorded of each token), found {rollout.top_k}"
        )
    if rollout.logprobs_mode != "processed":
        raise ValueError(
            "rollout.keep_sampling_mask: true needs rollout.logprobs_mode: processed (both are of the kept "
            f"tokens alone), found {rollout.logprobs_mode}"
        )


def _check_carry_over(rollout: RolloutRecipe) -> None:
    if rollout.carry_over and rollout.tokens_per_step is None:
        raise ValueError(
            "rollout.carry_over: true needs rollout.tokens_per_step, which ends a step's harvest before all "
            "is finished; found none"
        )


def _check_keep_streams(recipe: Recipe) -> None:
    if recipe.report.keep_streams == "evaluations" and not recipe.evaluation.every:
        raise ValueError("report.keep_streams: evaluations needs evaluation.every >= 1, found 0")


def _check_memory(recipe: Recipe) -> None:
    optimizer, park = recipe.optimizer, recipe.rollout.park_trainer
    if recipe.rollout.engine == "server" and park not in (None, "none"):
        raise ValueError(
            f"rollout.park_trainer: {park} makes room for a colocated engine, found rollout.engine: server"
        )
    saving = {"offload": True, "precision": "bfloat16", "grad_dtype": "bfloat16"}
    asked = [f"{key}: {value}" for key, value in saving.items() if getattr(optimizer, key) == value]
    if asked and recipe.model.dtype != "bfloat16":
        raise ValueError(
            f"optimizer.{asked[0].lower()} needs model.dtype: bfloat16, found {recipe.model.dtype}"
        )
    if optimizer.offload and optimizer.precision != "float32":
        raise ValueError(
            "optimizer.precision: bfloat16 is for a state that stays on the GPU; optimizer.offload: true "
            "keeps it in host memory, in float32: leave one out"
        )
    if recipe.checkpoint.resharding == "any" and optimizer.precision != "float32":
        raise ValueError(
            "checkpoint.resharding: any needs optimizer.precision: float32, found bfloat16 (Megatron-Core "
            "gathers main weights in float32 only)"
        )


def _check_plugins(recipe: Recipe) -> None:
    """Raise ValueError unless every object that the recipe names by import path can be imported."""
    sections = {"data.sources": recipe.data.sources, "evaluation.benchmarks": recipe.evaluation.benchmarks}
    for section, items in sections.items():
        for number, item in enumerate(items):
            for key, path in (("reader", item.reader), ("grader", item.grader or "")):
                if is_import_path(path):
                    load_object(path, f"{section}.{number}.{key}")
