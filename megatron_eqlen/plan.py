"""What a recipe needs, worked out without a GPU: layout, memory by part, tokens, the sbatch command.

Sizes are decimal GB. Activations are an estimate (full recompute keeps one input per layer); everything
else is counted from the model's shapes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megatron_eqlen import layout
from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.hf.cost import active_parameters
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.hf.weight_map import Weight
from megatron_eqlen.objectives.registry import resolve, with_defaults
from megatron_eqlen.packing.simulated import MEDIAN, repeated_share
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe_checks import where_from

KNOWN_MODELS = Path(__file__).parent / "hf" / "configs"
BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12
"""float32 main weight and Adam's two moments."""

WORTH_A_LARGER_BUDGET = 0.05
"""Share of positions that repeat what another row holds too."""


@dataclass(frozen=True)
class Memory:
    """GB of one GPU while training, on the pipeline stage that needs most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def describe(recipe: Recipe) -> str:
    """The plan as text. Raises LayoutError for a layout that cannot start."""
    model = model_config(recipe)
    layout.check(recipe, model)
    parts = [_layout(recipe), _model(model), _memory(recipe, model), _work(recipe), _packing(recipe)]
    return "\n".join([*filter(None, parts), _sbatch(recipe)])


def model_config(recipe: Recipe) -> ModelConfig:
    """The model's configuration, from the recipe's model folder or the shipped one of the same name."""
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


def memory(recipe: Recipe, model: ModelConfig) -> Memory:
    """Memory of one GPU, on the pipeline stage with the most parameters. Call ``layout.check`` first."""
    parallel, world = recipe.parallel, recipe.world_size
    dense, expert = max(_stage_parameters(recipe, model), key=sum)
    width = BYTES[recipe.model.dtype]
    dense_ranks = world // (parallel.tensor * parallel.pipeline)
    expert_ranks = world // (parallel.expert_tensor * parallel.expert * parallel.pipeline)
    split = 1 if parallel.sequence is False else parallel.tensor  # on GPUs sequence parallel is the default
    tokens = recipe.packing.max_tokens_per_row
    chunk = min(tokens, recipe.packing.logits_chunk)
    layers = model.num_hidden_layers // parallel.pipeline
    kept = 1 if parallel.recompute == "full" else 17
    return Memory(
        weights=(dense + expert) * width / 1e9,
        gradients=(dense + expert) * GRADIENT_BYTES / 1e9,
        optimizer=OPTIMIZER_BYTES * (dense / dense_ranks + expert / expert_ranks) / 1e9,
        activations=tokens
        * model.hidden_size
        * width
        * (kept * layers * parallel.pipeline + 34)
        / split
        / 1e9,
        logits=2 * chunk * model.vocab_size * width / parallel.tensor / 1e9,
    )


def _stage_parameters(recipe: Recipe, model: ModelConfig) -> list[tuple[float, float]]:
    """(dense, expert) parameters of one GPU, for each pipeline stage."""
    parallel = recipe.parallel
    stages = [[0.0, 0.0] for _ in range(parallel.pipeline)]
    chunk = model.num_hidden_layers // (parallel.pipeline * (parallel.virtual_pipeline or 1))
    for weight in weight_map(model):
        size = sum(prod(shape) for shape in weight.shapes)
        if weight.expert is not None:
            size /= parallel.expert * parallel.expert_tensor
        elif weight.dim is not None:
            size /= parallel.tensor
        stages[_stage(weight, chunk, parallel.pipeline)][weight.expert is not None] += size
    return [(dense, expert) for dense, expert in stages]


def _stage(weight: Weight, chunk: int, stages: int) -> int:
    """The stage of a layer: virtual pipelining gives chunks of ``chunk`` layers to the stages in turn."""
    if layer := re.search(r"layers\.(\d+)\.", weight.megatron):
        return int(layer[1]) // chunk % stages
    return 0 if weight.megatron.startswith("embedding") else stages - 1


def _layout(recipe: Recipe) -> str:
    parallel, cluster = recipe.parallel, recipe.cluster
    data = recipe.world_size // (parallel.tensor * parallel.pipeline)
    engine, servers = recipe.rollout.tensor_parallel, recipe.rollout.servers
    engines = (
        f"{len(servers)} servers"
        if recipe.rollout.engine == "server"
        else f"{recipe.world_size // engine} engines"
    )
    return (
        f"layout      {cluster.nodes} nodes x {cluster.processes_per_node} = {recipe.world_size} processes = "
        f"TP {parallel.tensor} x PP {parallel.pipeline} x DP {data}; EP {parallel.expert}; "
        f"{engines} of TP {engine}"
    )


def _model(model: ModelConfig) -> str:
    total = sum(prod(shape) for weight in weight_map(model) for shape in weight.shapes)
    return (
        f"model       {model.model_type}, {total / 1e9:.3f}B parameters, "
        f"{active_parameters(model) / 1e9:.3f}B active for a token, {model.num_hidden_layers} layers"
    )


def _memory(recipe: Recipe, model: ModelConfig) -> str:
    need, have = memory(recipe, model), recipe.cluster.gpu_memory_gib * 1.073741824
    parts = ", ".join(f"{name} {getattr(need, name):.3g}" for name in Memory.__dataclass_fields__)
    verdict = "fits" if need.total < 0.92 * have else "DOES NOT FIT: more GPUs, TP, PP or recompute: full"
    return f"memory      {need.total:.3g} of {have:.3g} GB a GPU, {verdict} ({parts})"


def _work(recipe: Recipe) -> str:
    tracks = recipe.data.prompts_per_step * recipe.group_size
    longest = tracks * recipe.rollout.max_response_length
    return (
        f"step        {recipe.data.prompts_per_step} prompts x {recipe.group_size} tracks, "
        f"at most {longest:,} tokens decoded at once; rows of {recipe.packing.max_tokens_per_row:,}\n"
        f"objective   {_objective(recipe)}\n"
        f"end         {recipe.budget.describe()}\n"
        f"run folder  {recipe.run_folder}"
    )


def _packing(recipe: Recipe) -> str:
    """What cut trunks cost, where it is worth a larger row budget; empty elsewhere."""
    if recipe.sampling != "equal_length" or recipe.packing.layout != "tree":
        return ""
    budget = recipe.packing.max_tokens_per_row
    share, with_twice = (_repeated(recipe, rows) for rows in (budget, 2 * budget))
    if share < WORTH_A_LARGER_BUDGET:
        return ""
    median = round(MEDIAN * recipe.rollout.max_response_length)
    return (
        f"packing     WARNING: about {share:.0%} of the positions repeat trunks that rows of {budget:,} cut; "
        f"{with_twice:.0%} with\n{' ' * 12}packing.max_tokens_per_row={2 * budget} (the packer on simulated "
        f"streams, median response {median:,} tokens)"
    )


def _repeated(recipe: Recipe, max_tokens_per_row: int) -> float:
    limit, prompt = recipe.rollout.max_response_length, recipe.data.max_prompt_length
    return repeated_share(max_tokens_per_row, limit, prompt)


def _objective(recipe: Recipe) -> str:
    """The method's parts, and every key of ``loss`` that means something for it, defaults included."""
    objective = resolve(recipe)
    parts = [f"advantage {objective.advantage_name}", f"ratio {objective.ratio}"]
    if objective.ratio == "vespo":
        parts.append(f"(k, lambda) {objective.vespo_positive} above, {objective.vespo_negative} below")
    keys = with_defaults(recipe).loss.model_dump(mode="json")
    parts += [f"{key} {_text(value)}" for key, value in keys.items() if value is not None]
    return f"{recipe.method}: " + ", ".join(parts)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _sbatch(recipe: Recipe) -> str:
    cluster = recipe.cluster
    options = [
        f"--job-name={recipe.name}",
        f"--nodes={cluster.nodes}",
        f"--gpus-per-node={cluster.processes_per_node}",
        f"--time={cluster.time}",
        *([f"--partition={cluster.partition}"] if cluster.partition else []),
        *([f"--account={cluster.account}"] if cluster.account else []),
    ]
    return f"submit      sbatch {' '.join(options)} slurm/train.sbatch RECIPE [KEY=VALUE ...]"
