"""Megatron's process groups of this rank; ``parallel_state`` gives them without types."""

from __future__ import annotations

from typing import cast

from megatron.core import parallel_state
from torch.distributed import ProcessGroup


def tensor_parallel() -> ProcessGroup:
    return cast(ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def pipeline_parallel() -> ProcessGroup:
    return cast(ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def data_parallel() -> ProcessGroup:
    """Ranks with other rows; those that share rows with them (context parallel) are not in it."""
    return cast(ProcessGroup, parallel_state.get_data_parallel_group())


def context_parallel() -> ProcessGroup:
    return cast(ProcessGroup, parallel_state.get_context_parallel_group())


def expert_parallel() -> ProcessGroup:
    return cast(ProcessGroup, parallel_state.get_expert_model_parallel_group())


def expert_tensor_parallel() -> ProcessGroup:
    return cast(ProcessGroup, parallel_state.get_expert_tensor_parallel_group())
