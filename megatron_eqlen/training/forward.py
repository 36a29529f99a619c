"""Run rows through Megatron's own pipeline schedules: a row is a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_eqlen.models import groups
from megatron_eqlen.models.context import BLOCK, Share
from megatron_eqlen.models.tree_params import TreeParams
from megatron_eqlen.processes.distributed import device
from megatron_eqlen.processes.watchdog import beat
from megatron_eqlen.training.head import Head
from megatron_eqlen.types import Row

RowResult = Callable[[torch.Tensor, torch.Tensor, Row, np.ndarray], Any]
"""Function (logprobs [n], entropy [n], row, the n supervised positions) -> result of a pass for a row."""


def row_multiple(config: TransformerConfig) -> int:
    """Return the number of which a row's length must be a multiple: context parallelism gives each rank two
    slices, sequence parallelism splits these over ranks, and attention on GPUs computes them in blocks."""
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    slices = 2 * config.context_parallel_size if config.context_parallel_size > 1 else 1
    return slices * (math.lcm(ranks, BLOCK) if torch.cuda.is_available() else ranks)


def supervised_positions(row: Row) -> np.ndarray:
    """Return [n] int64: the positions of the loss; the LM head is computed only there."""
    return np.flatnonzero(row.weights > 0)


def run_rows(
    chunks: list,
    rows: Sequence[Row],
    temperature: float,
    result: RowResult,
    *,
    train: bool,
    logits_chunk: int | None = None,
) -> list[Any]:
    """Run this data-parallel rank's rows once through every pipeline stage.

    With ``train``, ``result`` returns (loss, log) and gradients accumulate, undivided: the weights of a row
    hold every factor. Returns the results of ``result`` per row (with ``train`` the logs) on the last
    pipeline stage and an empty list elsewhere. Every rank of a pipeline passes the same rows, and so do
    context-parallel ranks, on which ``result`` gets and returns the same values.

    ``logits_chunk``: supervised tokens whose logits exist at once; None: all of a row.
    """
    step = _forward_step(temperature, result, train, logits_chunk)
    iterators = [iter(rows) for _ in chunks]
    single = len(chunks) == 1
    with torch.set_grad_enabled(train):
        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators[0] if single else iterators,
            model=chunks,
            num_microbatches=len(rows),
            seq_length=len(rows[0].input_ids),
            micro_batch_size=1,
            forward_only=not train,
            collect_non_loss_data=not train,
        )
    return list(results)


def _forward_step(temperature: float, result: RowResult, train: bool, logits_chunk: int | None) -> Callable:
    group, context = groups.own().tp, groups.own().cp

    def step(data: Iterator[Row], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        beat()
        row = next(data)
        at = supervised_positions(row)
        # this rank's positions, and its supervised positions
        share, mine, own = None, slice(None), at
        if context.size() > 1:
            share = Share.of(row, context.rank(), context.size(), device())
            mine = share.positions
            own = mine[row.weights[mine] > 0]
        output = model(
            torch.from_numpy(row.input_ids[mine])[None].to(device()),
            torch.from_numpy(row.position_ids[mine])[None].to(device()),
            None,
            packed_seq_params=TreeParams.from_row(row, share=share),
            supervised=torch.from_numpy(np.flatnonzero(row.weights[mine] > 0)).to(device()),
            head=Head.of(row, own, temperature, group, logits_chunk or max(1, len(own)), device()),
        )

        def reduce(output: torch.Tensor, non_loss_data: bool = False) -> Any:
            if share is not None:
                columns = torch.from_numpy(np.searchsorted(at, own)).to(device())
                output = _OfAllRanks.apply(output, columns, len(at), context)
            logprobs, entropy = output
            got = result(logprobs, entropy.detach(), row, at)
            if not train:
                return got
            loss, log = got
            return loss, torch.ones((), dtype=torch.int, device=device()), log

        return output, reduce

    return step


class _OfAllRanks(torch.autograd.Function):
    """[2, n of this rank] -> [2, n of the row], the same on every context-parallel rank. All ranks compute
    the same values from the result, so a rank's gradient is that of its own columns, without a sum."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, columns: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(columns)
        values = output.new_zeros(2, count).index_copy_(1, columns, output)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (columns,) = ctx.saved_tensors
        return grad.index_select(1, columns), None, None, None
