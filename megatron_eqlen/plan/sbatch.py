"""SLURM options of a recipe's job, used by ``plan`` and ``submit``."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_eqlen.plan.host import PROCESS, export_bytes, host_parts
from megatron_eqlen.plan.model import model_config
from megatron_eqlen.plan.trainer import trainer
from megatron_eqlen.plan.workload import workload
from megatron_eqlen.recipe import Recipe


def train_options(recipe: Recipe, job_name: str) -> list[str]:
    """Return sbatch's options for the trainer's job, one task per node. Call ``layout.check`` first."""
    cluster = recipe.cluster
    return [
        f"--job-name={job_name}",
        f"--nodes={cluster.nodes}",
        *_of_gpus(recipe, f"--gpus-per-node={cluster.processes_per_node}", trainer_bytes),
        f"--cpus-per-task={cluster.processes_per_node * cluster.cpus_per_process}",
        *_placement_options(recipe),
    ]


def train_environment(recipe: Recipe) -> dict[str, str]:
    """Return the environment variables that ``slurm/train.sbatch`` needs for a job without GPUs."""
    cluster = recipe.cluster
    return {"PROCESSES_PER_NODE": str(cluster.processes_per_node)} if cluster.device == "cpu" else {}


def server_options(recipe: Recipe, job_name: str, nodes: int) -> list[str]:
    """Return sbatch's options for ``nodes`` nodes like the trainer's, filled with vLLM servers, one task per
    server."""
    gpus = recipe.rollout.tensor_parallel
    return [
        f"--job-name={job_name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={replicas_on_node(recipe)}",
        *_of_gpus(recipe, f"--gpus-per-task={gpus}", _servers_bytes),
        f"--cpus-per-task={gpus * recipe.cluster.cpus_per_process}",
        *_placement_options(recipe),
    ]


def replicas_on_node(recipe: Recipe) -> int:
    """Return how many vLLM servers, each on ``rollout.tensor_parallel`` GPUs, a node holds. Raises ValueError
    if none fits."""
    here, each = recipe.cluster.processes_per_node, recipe.rollout.tensor_parallel
    if each > here:
        raise ValueError(
            f"rollout.tensor_parallel: {each} is more than cluster.processes_per_node {here}, "
            f"which is what a node has for servers"
        )
    return here // each


def _of_gpus(recipe: Recipe, gpus: str, host_bytes: Callable[[Recipe], float]) -> list[str]:
    """Return the options for GPUs and for host memory as planned; none on CPUs, where models and caches share
    the host memory and the partition's default applies."""
    if recipe.cluster.device == "cpu":
        return []
    return [gpus, f"--mem={math.ceil(host_bytes(recipe) / 2**30)}G"]


def trainer_bytes(recipe: Recipe) -> float:
    """Return the bytes of host memory that the plan counts for a node."""
    model = model_config(recipe)
    return sum(host_parts(recipe, model, trainer(recipe, model), workload(recipe)).values())


def _servers_bytes(recipe: Recipe) -> float:
    return recipe.cluster.processes_per_node * PROCESS + export_bytes(recipe, model_config(recipe))


def _placement_options(recipe: Recipe) -> list[str]:
    cluster = recipe.cluster
    asked = {"time": cluster.time, "partition": cluster.partition, "account": cluster.account}
    return [f"--{name}={value}" for name, value in asked.items() if value]
