"""What SLURM must know of a recipe's job: ``plan`` prints it, ``submit`` and ``sweep --slurm`` use it."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_eqlen.plan.host import PROCESS, export_bytes, host_parts
from megatron_eqlen.plan.model import model_config
from megatron_eqlen.plan.trainer import trainer
from megatron_eqlen.plan.workload import workload
from megatron_eqlen.recipe import Recipe


def train_options(recipe: Recipe, job_name: str) -> list[str]:
    """Of the trainer's job, one task a node. Call ``layout.check`` first."""
    cluster = recipe.cluster
    return [
        f"--job-name={job_name}",
        f"--nodes={cluster.nodes}",
        *_of_gpus(recipe, f"--gpus-per-node={cluster.processes_per_node}", trainer_bytes),
        f"--cpus-per-task={cluster.processes_per_node * cluster.cpus_per_process}",
        *_where(recipe),
    ]


def train_environment(recipe: Recipe) -> dict[str, str]:
    """What ``slurm/train.sbatch`` must be told of a job without GPUs."""
    cluster = recipe.cluster
    return {"PROCESSES_PER_NODE": str(cluster.processes_per_node)} if cluster.device == "cpu" else {}


def server_options(recipe: Recipe, job_name: str, nodes: int) -> list[str]:
    """Of ``nodes`` nodes like the trainer's that are full of vLLM servers, one task each."""
    each = recipe.rollout.tensor_parallel
    return [
        f"--job-name={job_name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={replicas_on_node(recipe)}",
        *_of_gpus(recipe, f"--gpus-per-task={each}", _servers_bytes),
        f"--cpus-per-task={each * recipe.cluster.cpus_per_process}",
        *_where(recipe),
    ]


def replicas_on_node(recipe: Recipe) -> int:
    """vLLM servers that a node holds, each on ``rollout.tensor_parallel`` GPUs. Raises ValueError if none."""
    here, each = recipe.cluster.processes_per_node, recipe.rollout.tensor_parallel
    if each > here:
        raise ValueError(
            f"rollout.tensor_parallel: {each} is more than cluster.processes_per_node {here}, "
            f"which is what a node has for servers"
        )
    return here // each


def _of_gpus(recipe: Recipe, gpus: str, host_bytes: Callable[[Recipe], float]) -> list[str]:
    """GPUs, and the host memory that the plan counts beside them; on CPUs models and caches lie there, too,
    and it is left to the partition."""
    if recipe.cluster.device == "cpu":
        return []
    return [gpus, f"--mem={math.ceil(host_bytes(recipe) / 2**30)}G"]


def trainer_bytes(recipe: Recipe) -> float:
    """Of host memory that the plan counts for a node."""
    model = model_config(recipe)
    return sum(host_parts(recipe, model, trainer(recipe, model), workload(recipe)).values())


def _servers_bytes(recipe: Recipe) -> float:
    return recipe.cluster.processes_per_node * PROCESS + export_bytes(recipe, model_config(recipe))


def _where(recipe: Recipe) -> list[str]:
    cluster = recipe.cluster
    asked = {"time": cluster.time, "partition": cluster.partition, "account": cluster.account}
    return [f"--{name}={value}" for name, value in asked.items() if value]
