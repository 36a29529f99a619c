"""Output of ``eqlen plan`` and ``--dry-run``. GB are decimal."""

from __future__ import annotations

from megatron_eqlen.job import Job
from megatron_eqlen.objectives.parts import described
from megatron_eqlen.objectives.registry import with_defaults
from megatron_eqlen.plan.flops import active_parameters
from megatron_eqlen.plan.host import checkpoint_bytes, export_bytes, host_parts, recorded_bytes
from megatron_eqlen.plan.memory import Memory, memory
from megatron_eqlen.plan.roofline import ASSUMPTIONS, Roofline, rooflines
from megatron_eqlen.plan.sbatch import train_environment, train_options
from megatron_eqlen.plan.trainer import total, trained
from megatron_eqlen.plan.workload import Workload, workload
from megatron_eqlen.processes.cores import cores_per_rank
from megatron_eqlen.recipe import Recipe, layout, shown
from megatron_eqlen.recipe.checks import SUPERVISED


def describe(job: Job, server_nodes: int = 0) -> str:
    """Return the plan as text. ``server_nodes``: what its servers get. LayoutError if it cannot start."""
    job.check_layout()
    recipe, need, work = job.recipe, memory(job), workload(job.recipe)
    parts = [_layout(recipe), _model(job), _memory(need), _host(need, work), _work(job, work)]
    # none without a GPU, or where no known GPU has the recipe's size
    if times := [f"roofline    {_roofline(time)}" for time in rooflines(job, work)]:
        parts += [*times, *(" " * 12 + line for line in ASSUMPTIONS)]
    parts.append(_sbatch(job, server_nodes))
    return "\n".join(filter(None, parts))


def _layout(recipe: Recipe) -> str:
    parallel, cluster = recipe.parallel, recipe.cluster
    data = recipe.world_size // (parallel.tensor * parallel.pipeline)
    engine, servers = recipe.rollout.tensor_parallel, recipe.rollout.servers
    engines = f"{recipe.world_size // engine} engines" if recipe.colocated else f"{len(servers)} servers"
    engines = f"{engines} of TP {engine}" if recipe.generates else "no engine"
    nodes = f"{cluster.nodes} nodes x {cluster.processes_per_node} = {recipe.world_size} processes"
    ranks = f"TP {parallel.tensor} x PP {parallel.pipeline} x DP {data}; EP {parallel.expert}; {engines}"
    return f"layout      {nodes} = {ranks}"


def _model(job: Job) -> str:
    recipe, model = job.recipe, job.model
    split = [len(layers) for layers in layout.stages(recipe.parallel, model)]
    uneven = f" ({' + '.join(map(str, split))})" if len(set(split)) > 1 else ""
    return (
        f"model       {model.model_type}, {total(model) / 1e9:.5g}B parameters, "
        f"{active_parameters(model) / 1e9:.5g}B active for a token, {model.num_hidden_layers} layers{uneven}"
        + (f"; {trained(model, recipe.lora) / 1e6:.1f}M in adapters" if recipe.lora.rank else "")
    )


def _memory(need: Memory) -> str:
    """Return the verdict, one line per part with the phases that hold it, and the activations."""
    if need.job.recipe.cluster.device == "cpu":
        return "memory      no GPU is used (cluster.device: cpu)"
    phases = [*need.table]
    # A column for each phase, a row for each part that is in any of them.
    rows = [["GB of a GPU", *phases]]
    for part, size in need.parts.items():
        cells = [f"{size / 1e9:.2f}" if part in need.table[phase] else "" for phase in phases]
        if any(cells):
            rows.append([part.replace("_", " "), *cells])
    rows.append(["all", *(f"{need.phases[phase] / 1e9:.2f}" for phase in phases)])
    problems = need.problems()
    verdict = "fits" if not problems else "DOES NOT FIT: " + "; ".join(problems)
    lines = [f"memory      {need.peak / 1e9:.1f} of {need.total / 1e9:.1f} GB a GPU, {verdict}"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *sizes in rows:
        cells = [name.ljust(widths[0]), *map(str.rjust, sizes, widths[1:])]
        lines.append(" " * 12 + "  ".join(cells).rstrip())
    at = need.activations
    parts = {
        "layers' inputs and outputs": at.kept, "one layer": at.layer, "passing": at.passing,
        "head": at.head, "loss": at.loss,
    }  # fmt: skip
    activations = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    return "\n".join([*lines, f"activations {activations} GB"])


def _host(need: Memory, work: Workload) -> str:
    job = need.job
    parts = host_parts(job, need.stages, work)
    named = ", ".join(f"{name} {size / 1e9:.0f}" for name, size in parts.items() if size)
    recorded, checkpoint = recorded_bytes(job, work), checkpoint_bytes(job)
    disk = (
        f"disk        {checkpoint / 1e9:.{0 if checkpoint >= 1e10 else 1}f} GB a checkpoint, at most "
        f"{job.recipe.checkpoint.keep + 1} at a time; at most {recorded / 1e9:.2f} GB of rollouts a "
        f"step; export {export_bytes(job) / 1e9:.0f} GB"
    )
    return f"host        {sum(parts.values()) / 1e9:.0f} GB a node ({named})\n{disk}"


def _roofline(time: Roofline) -> str:
    generation = (
        f"{' ' * 12}generation {time.generation / 3600:.2g}: {time.decode_steps:,.0f} decode steps of "
        f"{time.batch:,.1f} sequences an engine"
        f"{'' if time.balanced is None else f'; as long as training with {time.balanced} servers'}\n"
    )
    rows = f"{time.rows:,.1f} rows a replica and update, idle {time.idle:.0%}"
    training = f"training {time.training / 3600:.2g}: {rows}; gradients {time.gradients / 3600:.2g}"
    step = f"{time.gpu.name}: {time.seconds / 3600:.2g} hours a step\n{generation * (time.batch > 0)}"
    return f"{step}{' ' * 12}{training}"


def _work(job: Job, work: Workload) -> str:
    recipe = job.recipe
    prompts = recipe.data.prompts_per_step
    # All tracks at their limit at the same time.
    longest = work.tracks * recipe.rollout.max_response_length
    tracks = f"{prompts} prompts x {work.tracks // prompts} tracks"
    decoded = f"{tracks}, at most {longest:,} tokens decoded at once"
    section = recipe.environment
    tokens = f"{section.max_given_tokens:,} given tokens a response"
    given = f"environment {section.name}: {tokens} are assumed (environment.max_given_tokens)\n"
    workers = recipe.reward.workers or cores_per_rank(recipe.graders_on_node)
    graders = f"graders     {workers} processes a rank (reward.workers, or its cores on this node)\n"
    return (
        f"step        {f'{prompts} demonstrations' if recipe.supervised else decoded}; rows of "
        f"{recipe.packing.max_tokens_per_row:,}\n"
        f"{given * (section.name is not None)}"
        f"objective   {_objective(job)}\n"
        f"{graders * recipe.generates}"
        f"end         {recipe.budget.describe()}\n"
        f"run folder  {recipe.run_folder}"
    )


def _objective(job: Job) -> str:
    """Return the method's parts and every key of ``loss`` that applies to it, defaults included."""
    recipe, named = job.recipe, ("advantage", "surrogate")
    parts = [f"{part} {described(getattr(job.objective, part))}" for part in named]
    keys = with_defaults(job).loss.model_dump(mode="json")
    parts += [
        f"{key} {shown(value)}"
        for key, value in keys.items()
        if value is not None and key not in named and (key in SUPERVISED or not recipe.supervised)
    ]
    return f"{recipe.method}: " + ", ".join(parts)


def _sbatch(job: Job, server_nodes: int) -> str:
    recipe = job.recipe
    if server_nodes:  # a job of two components
        return f"submit      eqlen submit RECIPE [KEY=VALUE ...] --servers {server_nodes}"
    environment = "".join(f"{name}={value} " for name, value in train_environment(recipe.cluster).items())
    options = " ".join(train_options(job, recipe.name))
    by_hand = f"as {environment}sbatch {options} slurm/train.sbatch RECIPE [KEY=VALUE ...]"
    return f"submit      eqlen submit RECIPE [KEY=VALUE ...]\n{' ' * 12}{by_hand}"
