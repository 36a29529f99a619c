"""Mismatch of trainer and engine, held against ``rollout.mismatch.tolerance``.

The mismatch is the mean |log-prob difference| over those tokens of an update that were sampled by the weights
which the update trains; it is undefined if older weights sampled all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_eqlen.metrics import COMPARED, MISMATCH, MISMATCH_OF_COMPARED
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.training.forward import supervised_positions
from megatron_eqlen.training.policy_loss import RowLoss
from megatron_eqlen.training.rows import RankRows
from megatron_eqlen.types import Metrics


class MismatchError(ValueError):
    """Trainer and engine disagree by more than ``rollout.mismatch`` allows. The run can be resumed."""


def mismatch_of(measured: Metrics) -> float | None:
    """Return the mismatch of an update, from its metrics."""
    if COMPARED not in measured:
        return measured[MISMATCH]
    return measured[MISMATCH_OF_COMPARED] if measured[COMPARED] else None


def disagreement(mismatch: float | None, rollout: RolloutRecipe) -> str | None:
    """Return a message if a step's mismatch is above the tolerance; NaN is."""
    tolerance = rollout.tolerance
    if not rollout.comparable or mismatch is None or mismatch <= tolerance:
        return None
    return (
        f"log-probs of trainer and engine differ by {mismatch:.2g} on average of the step, "
        f"rollout.mismatch.tolerance is {tolerance:g}"
    )


def worst_token(rows: RankRows, losses: Sequence[RowLoss]) -> tuple[float, str]:
    """Return the largest |log-prob difference| over the comparable tokens of this rank's rows, and the
    token's place; (-1, "") if no token can be compared."""
    differences = [torch.where(loss.compared, loss.log_ratio.abs(), -1.0) for loss in losses]
    peaks = [float(values.max()) if len(values) else -1.0 for values in differences]
    number = int(np.argmax(peaks))
    if not peaks[number] >= 0:
        return -1.0, ""
    row, at = rows[number], supervised_positions(rows[number])[int(differences[number].argmax())]
    segment = int(row.segment_ids[at])
    tree, node = rows.planned.forest.of_segment(segment)
    return peaks[number], f"token {(row.segment_ids[:at] == segment).sum()} of node {node} of tree {tree!r}"
