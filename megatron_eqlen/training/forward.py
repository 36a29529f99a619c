"""Run rows through Megatron's own pipeline schedules: a row is a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from megatron_eqlen.models import groups
from megatron_eqlen.models.tree_attention import BLOCK
from megatron_eqlen.models.tree_params import TreeParams
from megatron_eqlen.processes.distributed import device
from megatron_eqlen.processes.watchdog import beat
from megatron_eqlen.training.head import Head
from megatron_eqlen.types import Row

RowResult = Callable[[torch.Tensor, torch.Tensor, Row, np.ndarray], Any]
"""Function (logprobs [n], entropy [n], row, the n supervised positions) -> result of a pass for a row."""


def row_multiple(config: TransformerConfig) -> int:
    """Return the number of which a row's length must be a multiple: sequence parallelism splits it over
    ranks, and attention on GPUs computes it in blocks."""
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return math.lcm(ranks, BLOCK) if torch.cuda.is_available() else ranks


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
    pipeline stage and an empty list elsewhere. Every rank of a pipeline passes the same rows.

    ``logits_chunk``: supervised tokens whose logits exist at once; None: all of a row.
    """
    group = groups.own().tp

    def step(data: Iterator[Row], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        beat()
        row = next(data)
        at = supervised_positions(row)
        # [1, S] ids and positions; the mask is None, since attention reads the trees
        output = model(
            torch.from_numpy(row.input_ids)[None].to(device()),
            torch.from_numpy(row.position_ids)[None].to(device()),
            None,
            packed_seq_params=TreeParams.from_row(row),
            supervised=torch.from_numpy(at).to(device()),
            head=Head.of(row, at, temperature, group, logits_chunk or max(1, len(at))),
        )

        def reduce(output: torch.Tensor, non_loss_data: bool = False) -> Any:
            logprobs, entropy = output
            got = result(logprobs, entropy.detach(), row, at)
            if not train:
                return got
            # Megatron expects the number of tokens that losses are divided by: `_sum_model_grads` drops it
            loss, log = got
            return loss, torch.ones((), dtype=torch.int, device=device()), log

        return output, reduce

    iterators = [iter(rows) for _ in chunks]
    with torch.set_grad_enabled(train):
        results = get_forward_backward_func()(
            forward_step_func=step,
            # each virtual stage reads all rows
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks,
            num_microbatches=len(rows),
            # with several stages lengths are sent along (`variable_seq_lengths`)
            seq_length=len(rows[0].input_ids),
            micro_batch_size=1,
            forward_only=not train,
            # `reduce` returns any value then, in place of a loss
            collect_non_loss_data=not train,
        )
    return list(results)
