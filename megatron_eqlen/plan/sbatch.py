"""SLURM options of a recipe's job, used by ``plan`` and ``submit``."""

from __future__ import annotations

import math

from megatron_eqlen.job import Job
from megatron_eqlen.plan.host import PROCESS, export_bytes, host_parts
from megatron_eqlen.plan.trainer import trainer
from megatron_eqlen.plan.workload import workload
from megatron_eqlen.recipe import ClusterRecipe, Recipe


def train_options(job: Job, job_name: str) -> list[str]:
    """Return sbatch's options for the trainer's job, one task per node. Call ``check_layout`` first."""
    cluster = job.recipe.cluster
    return [
        f"--job-name={job_name}",
        f"--nodes={cluster.nodes}",
        *_of_gpus(job, f"--gpus-per-node={cluster.processes_per_node}", trainer_bytes(job)),
        f"--cpus-per-task={cluster.processes_per_node * cluster.cpus_per_process}",
        f"--time={cluster.time}",
    ]


def train_environment(cluster: ClusterRecipe) -> dict[str, str]:
    """Return the environment variables that ``slurm/train.sbatch`` needs for a job without GPUs."""
    return {"PROCESSES_PER_NODE": str(cluster.processes_per_node)} if cluster.device == "cpu" else {}


def server_options(job: Job, job_name: str, nodes: int) -> list[str]:
    """Return sbatch's options for nodes like the trainer's full of vLLM servers, one task a server."""
    gpus, cluster = job.recipe.rollout.tensor_parallel, job.recipe.cluster
    return [
        f"--job-name={job_name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={replicas_on_node(job.recipe)}",
        *_of_gpus(job, f"--gpus-per-task={gpus}", cluster.processes_per_node * PROCESS + export_bytes(job)),
        f"--cpus-per-task={gpus * cluster.cpus_per_process}",
        f"--time={cluster.time}",
    ]


def replicas_on_node(recipe: Recipe) -> int:
    """Return how many servers of ``rollout.tensor_parallel`` GPUs a node holds. Raises ValueError if none."""
    here, each = recipe.cluster.processes_per_node, recipe.rollout.tensor_parallel
    if each > here:
        most = f"cluster.processes_per_node {here}, which is what a node has for servers"
        raise ValueError(f"rollout.tensor_parallel: {each} is more than {most}")
    return here // each


def _of_gpus(job: Job, gpus: str, host_bytes: float) -> list[str]:
    """Return the options for GPUs and planned host memory; none on CPUs: the partition's default applies."""
    if job.recipe.cluster.device == "cpu":
        return []
    return [gpus, f"--mem={math.ceil(host_bytes / 2**30)}G"]


def trainer_bytes(job: Job) -> float:
    """Return the bytes of host memory that the plan counts for a node."""
    return sum(host_parts(job, trainer(job), workload(job.recipe)).values())
