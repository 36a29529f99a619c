"""Start, stop and look up Megatron's process groups."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core import tensor_parallel as megatron_tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from megatron_eqlen.hf.weight_map import Weight
from megatron_eqlen.processes import distributed
from megatron_eqlen.recipe import ParallelRecipe, layout


def start(parallel: ParallelRecipe, seed: int, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the world, split it by ``parallel`` and seed the generators (tensor-parallel ranks differ where
    their parameters do). ``timeout``: of collectives. Raises LayoutError if ``parallel`` does not fit."""
    distributed.join(timeout)
    layout.require(layout.groups(parallel, dist.get_world_size()))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
    )
    megatron_tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop() -> None:
    """Destroy the groups that ``start`` made, and leave the world."""
    parallel_state.destroy_model_parallel()
    distributed.leave()


def own() -> ProcessGroupCollection:
    """Return this rank's groups. ``dp``: ranks with other rows."""
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "dp", "pp", "ep", "expt_tp"])


def tensor_group(weight: Weight) -> ProcessGroup:
    """Return the group that divides ``weight``."""
    return own().tp if weight.expert is None else own().expt_tp
