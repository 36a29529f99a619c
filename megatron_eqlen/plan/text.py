"""Output of ``eqlen plan`` and ``--dry-run``. GB are decimal."""

from __future__ import annotations

import json

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.objectives.parts import PARTS, described
from megatron_eqlen.objectives.registry import resolve, with_defaults
from megatron_eqlen.packing.simulated import MEDIAN, repeated_share
from megatron_eqlen.plan.activations import BYTES
from megatron_eqlen.plan.exchange import key_bytes, key_share, leaving_share
from megatron_eqlen.plan.flops import active_parameters
from megatron_eqlen.plan.host import checkpoint_bytes, export_bytes, host_parts, recorded_bytes
from megatron_eqlen.plan.memory import Memory, memory
from megatron_eqlen.plan.model import model_config
from megatron_eqlen.plan.parameters import total, trained
from megatron_eqlen.plan.sbatch import short_limit, train_environment, train_options
from megatron_eqlen.plan.speed import ASSUMPTIONS, Speed, interval, speeds
from megatron_eqlen.plan.workload import Workload, workload
from megatron_eqlen.processes.cores import cores_per_rank
from megatron_eqlen.recipe import Recipe, layout

WORTH_A_LARGER_BUDGET = 0.05
"""Share of repeated positions from which a larger row budget is recommended."""


def describe(recipe: Recipe) -> str:
    """Return the plan as text. Raises LayoutError for a layout that cannot start."""
    model = model_config(recipe)
    layout.check(recipe, model)
    need, work = memory(recipe, model), workload(recipe)
    parts = [
        _layout(recipe), _model(recipe, model), _memory(need), _context(recipe, model),
        _host(recipe, model, need, work),
        _work(recipe), _speed(recipe, model, work), _packing(recipe), _sbatch(recipe),
    ]  # fmt: skip
    return "\n".join(filter(None, parts))


def _layout(recipe: Recipe) -> str:
    parallel, cluster = recipe.parallel, recipe.cluster
    data = recipe.world_size // (parallel.tensor * parallel.context * parallel.pipeline)
    context = f"CP {parallel.context} x " if parallel.context > 1 else ""
    engine, servers = recipe.rollout.tensor_parallel, recipe.rollout.servers
    engines = (
        f"{len(servers)} servers"
        if recipe.rollout.engine == "server"
        else f"{recipe.world_size // engine} engines"
    )
    return (
        f"layout      {cluster.nodes} nodes x {cluster.processes_per_node} = {recipe.world_size} processes = "
        f"TP {parallel.tensor} x {context}PP {parallel.pipeline} x DP {data}; EP {parallel.expert}; "
        f"{engines} of TP {engine}"
    )


def _model(recipe: Recipe, model: ModelConfig) -> str:
    split = [len(layers) for layers in layout.stages(recipe.parallel, model)]
    uneven = f" ({' + '.join(map(str, split))})" if len(set(split)) > 1 else ""
    return (
        f"model       {model.model_type}, {total(model) / 1e9:.3f}B parameters, "
        f"{active_parameters(model) / 1e9:.3f}B active for a token, {model.num_hidden_layers} layers{uneven}"
        + (f"; {trained(model, recipe.lora) / 1e6:.1f}M in adapters" if recipe.lora.rank else "")
    )


def _memory(need: Memory) -> str:
    """Return the verdict, one line per part with the phases that hold it, and the activations."""
    if need.recipe.cluster.device == "cpu":
        return "memory      no GPU is used (cluster.device: cpu)"
    phases = [*need.table]
    rows = [["GB of a GPU", *phases]]
    for part, size in need.parts.items():
        cells = [f"{size / 1e9:.2f}" if part in need.table[phase] else "" for phase in phases]
        if any(cells):
            rows.append([part.replace("_", " "), *cells])
    rows.append(["all", *(f"{need.phases[phase] / 1e9:.2f}" for phase in phases)])
    problems = need.problems()
    verdict = "fits" if not problems else "DOES NOT FIT: " + "; ".join(problems)
    head = f"memory      {need.peak / 1e9:.1f} of {need.total / 1e9:.1f} GB a GPU, {verdict}"
    return "\n".join([head, *_aligned(rows), _activations(need)])


def _activations(need: Memory) -> str:
    at = need.activations
    parts = {
        "layers' inputs and outputs": at.kept, "one layer": at.layer, "passing": at.passing,
        "head": at.head, "loss": at.loss,
    }  # fmt: skip
    return "activations " + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items()) + " GB"


def _context(recipe: Recipe, model: ModelConfig) -> str:
    """Return the lines on context parallelism; empty without it."""
    if recipe.parallel.context == 1:
        return ""
    ranks, row = recipe.parallel.context, recipe.packing.max_tokens_per_row
    row_bytes = row * key_bytes(model, recipe.parallel, BYTES[recipe.model.dtype]) / 1e6
    about, most = row_bytes * key_share(recipe), row_bytes * (ranks - 1) / ranks
    far = leaving_share(recipe)
    sources = f"{far:.0%} of it from other nodes" if far else "all from its node"
    return (
        f"context     about {about:.0f} MB of keys and values (at most {most:.0f}) to a rank in a layer's "
        f"forward pass\n{' ' * 12}of a full row, {sources}"
    )


def _host(recipe: Recipe, model: ModelConfig, need: Memory, work: Workload) -> str:
    parts = host_parts(recipe, model, need.stages, work)
    named = ", ".join(f"{name} {size / 1e9:.0f}" for name, size in parts.items() if size)
    recorded = recorded_bytes(recipe, model, work)
    disk = (
        f"disk        {_rounded(checkpoint_bytes(recipe, model))} GB a checkpoint, at most "
        f"{recipe.checkpoint.keep + 1} at a time; {recorded / 1e9:.2f} GB of rollouts a "
        f"step; export {export_bytes(recipe, model) / 1e9:.0f} GB"
    )
    return f"host        {sum(parts.values()) / 1e9:.0f} GB a node ({named})\n{disk}"


def _rounded(size: float) -> str:
    return f"{size / 1e9:.0f}" if size >= 1e10 else f"{size / 1e9:.1f}"


def _speed(recipe: Recipe, model: ModelConfig, work: Workload) -> str:
    """Return the estimates; empty if no GPU is used or no known GPU has the recipe's size."""
    lines = [_estimate(estimate) for estimate in speeds(recipe, model, work)]
    assumed = [" " * 12 + line for line in ASSUMPTIONS]
    return "\n".join([*lines, *assumed]) if lines else ""


def _estimate(estimate: Speed) -> str:
    rate, hours = estimate.tokens_per_second, estimate.seconds / 3600
    (slow, fast), (least, most) = interval(rate), interval(hours)
    parts = [f"{kind} {seconds / estimate.training:.0%}" for kind, seconds in estimate.exchange.items()]
    exchange = f"; of it exchange: {', '.join(parts)}" if parts else ""
    return (
        f"estimate    {estimate.gpu.name}: {rate:,.0f} tokens/s [{slow:,.0f} to {fast:,.0f}], "
        f"{hours:.2f} hours a step [{least:.2f} to {most:.2f}]\n"
        f"{' ' * 12}(generation {estimate.generation / 3600:.2f}, training {estimate.training / 3600:.2f}"
        f"{exchange})"
    )


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " " * 12 + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def _work(recipe: Recipe) -> str:
    tracks = recipe.data.prompts_per_step * recipe.group_size
    longest = tracks * recipe.rollout.max_response_length
    return (
        f"step        {recipe.data.prompts_per_step} prompts x {recipe.group_size} tracks, "
        f"at most {longest:,} tokens decoded at once; rows of {recipe.packing.max_tokens_per_row:,}\n"
        f"objective   {_objective(recipe)}\n"
        f"graders     {_graders(recipe)}\n"
        f"end         {recipe.budget.describe()}\n"
        f"run folder  {recipe.run_folder}"
    )


def _graders(recipe: Recipe) -> str:
    if recipe.reward.workers is not None:
        return f"{recipe.reward.workers} processes a rank (reward.workers)"
    here = cores_per_rank(recipe.graders_on_node)
    return f"as many processes a rank as it has cores: {here} on a node like this one (reward.workers)"


def _packing(recipe: Recipe) -> str:
    """Return a warning about repeated trunks if a larger row budget is worthwhile; empty otherwise."""
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
    """Return the method's parts and every key of ``loss`` that applies to it, defaults included."""
    objective = resolve(recipe)
    parts = [f"{part} {described(getattr(objective, part))}" for part in ("advantage", "surrogate")]
    keys = with_defaults(recipe).loss.model_dump(mode="json")
    parts += [
        f"{key} {_text(value)}" for key, value in keys.items() if value is not None and key not in PARTS
    ]
    return f"{recipe.method}: " + ", ".join(parts)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _sbatch(recipe: Recipe) -> str:
    environment = "".join(f"{name}={value} " for name, value in train_environment(recipe).items())
    options = " ".join(train_options(recipe, recipe.name))
    short = short_limit(recipe)
    return (
        f"submit      eqlen submit RECIPE [KEY=VALUE ...]\n"
        f"{' ' * 12}as {environment}sbatch {options} slurm/train.sbatch RECIPE [KEY=VALUE ...]"
    ) + (f"\n{' ' * 12}WARNING: {short}" if short else "")
