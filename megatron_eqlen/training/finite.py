"""Check before an optimizer step that each row's loss and the gradient's norm are finite, on every rank.

Nothing has to be undone then. From finite weights, moments and clipped gradients Adam makes finite ones, so
weights are checked once, after they are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_eqlen.packing.pack import Packing, RankRows
from megatron_eqlen.processes.distributed import device, gather
from megatron_eqlen.training.forward import supervised_positions
from megatron_eqlen.training.policy_loss import RowLoss
from megatron_eqlen.types import Row


class NonFiniteError(ValueError):
    """Training cannot continue because numbers are not finite. The newest checkpoint precedes them."""


class NumericalProblem(NamedTuple):
    """Reason to skip an update; the lowest ``order`` is nearest to the cause."""

    order: int
    text: str

    def __str__(self) -> str:
        return f"not finite: {self.text}"


def first_problem(mine: NumericalProblem | None) -> NumericalProblem | None:
    """Return the problem of all ranks that is nearest to the cause, on every rank. Collective."""
    # the usual answer, none, costs one number; texts are gathered only after a problem
    count = torch.tensor(float(mine is not None), device=device())
    dist.all_reduce(count)
    if not count:
        return None
    return min(problem for problem in gather([mine]) if problem is not None)


def row_problem(rows: RankRows, losses: Sequence[RowLoss]) -> NumericalProblem | None:
    """Return a problem for this rank's first row whose loss is not finite; ``losses``: of the last stage."""
    for number, loss in enumerate(losses):
        if not torch.isfinite(loss.metrics["loss/policy"] + loss.metrics["loss/kl_penalty"]):
            rank, where = parallel_state.get_data_parallel_rank(), _locate(rows.packing, rows[number], loss)
            return NumericalProblem(0, f"row {number} of data-parallel rank {rank}, {where}")
    return None


def weight_problem(chunks: list) -> NumericalProblem | None:
    """Return a problem for the first weight of this rank that is not finite."""
    name = _first_name(named for chunk in chunks for named in chunk.named_parameters())
    return None if name is None else NumericalProblem(0, f"the weight {name} on rank {dist.get_rank()}")


def gradient_problem(chunks: list, grad_norm: float) -> NumericalProblem | None:
    """Return a problem if the norm is not finite, with a gradient of this rank that made it so."""
    if math.isfinite(grad_norm):
        return None
    named = (each for chunk in chunks for each in chunk.named_parameters() if each[1].requires_grad)
    name = _first_name((name, parameter.main_grad) for name, parameter in named)
    if name is None:
        return NumericalProblem(2, f"the gradient's norm, {grad_norm}; its parts are finite")
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return NumericalProblem(
        1, f"the gradient of {name} on rank {dist.get_rank()} (pipeline stage {stage}); every loss is finite"
    )


def _locate(packing: Packing, row: Row, loss: RowLoss) -> str:
    """Return tree, node and token of a row's first number that is not finite."""
    at = supervised_positions(row)
    bad = torch.nonzero(~torch.isfinite(loss.tokens))
    if not len(bad):
        return f"the sum of its tokens' losses, {float(loss.tokens.sum())}"
    segments = row.segment_ids[at]
    segment = segments[int(bad[0])]
    node, own = int(np.flatnonzero(packing.forest.segment == segment)[0]), segments == segment
    return f"{packing.forest.where(node)}: {_faulty_quantity(row, at[own], loss.tokens.cpu().numpy()[own])}"


def _faulty_quantity(row: Row, at: np.ndarray, losses: np.ndarray) -> str:
    """Name the quantity that is not finite in the node at positions ``at``: an input or a loss."""
    inputs = {"rollout_logprobs": row.column("logprobs")[at]}
    inputs |= {f"{policy}_logprobs": known[at] for policy, known in row.others.items()}
    inputs["advantages"] = row.advantages[at]
    for name, values in (inputs | {"the loss": losses}).items():
        if not np.isfinite(values).all():
            token = int(np.argmin(np.isfinite(values)))
            return f"{name} of token {token} is {values[token]}"
    raise AssertionError("one of the node's losses is not finite")


def _first_name(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    return next((name for name, tensor in tensors if not torch.isfinite(tensor).all()), None)
