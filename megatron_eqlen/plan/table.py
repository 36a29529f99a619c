"""One line per recipe for the README's table: machines needed, and an estimate of the time."""

from __future__ import annotations

from megatron_eqlen.plan.host import host_parts
from megatron_eqlen.plan.memory import memory
from megatron_eqlen.plan.model import model_config
from megatron_eqlen.plan.speed import speeds
from megatron_eqlen.plan.workload import workload
from megatron_eqlen.recipe import Recipe

HEAD = "| recipe | GPUs | GB a GPU | host GB a node | estimate: tokens/s, hours for 100 steps |"
STEPS = 100


def row(file: str, recipe: Recipe) -> str:
    """Return the table's line for the recipe in ``recipes/FILE``. ``GB a GPU``: the largest phase of the
    GPU's size."""
    model, cluster = model_config(recipe), recipe.cluster
    need, work = memory(recipe, model), workload(recipe)
    host = sum(host_parts(recipe, model, need.stages, work).values())
    estimates = "; ".join(
        f"{estimate.gpu.name} {estimate.tokens_per_second:,.0f}, {STEPS * estimate.seconds / 3600:.0f}"
        for estimate in speeds(recipe, model, work)
    )
    gpus = f"{cluster.nodes} x {cluster.processes_per_node}"
    used = f"{need.peak / 1e9:.0f} of {need.total / 1e9:.0f}"
    return f"| `{file}` | {gpus} | {used} | {host / 1e9:.0f} | {estimates} |"
