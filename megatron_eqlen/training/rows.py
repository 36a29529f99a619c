"""Rows that this rank trains, each filled when it is read, so that few are in memory at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_eqlen.packing.pack import Packing
from megatron_eqlen.types import Metrics, Row


class RankRows(Sequence[Row]):
    """Rows of a data-parallel rank, with other policies' log-probs once they are known.

    Raises TreeError if an array of a node cannot be trained on.
    """

    def __init__(self, planned: Packing, rank: int, for_loss: bool) -> None:
        planned.check_arrays(rank, for_loss)
        self.planned, self._plans, self._for_loss = planned, planned.ranks[rank], for_loss
        self.agreement: Metrics | None = None
        """Agreement of the engine's experts with those of the first pass over these rows; None before that
        pass."""
        self.others: dict[str, list[np.ndarray]] = {}
        """``Row.others``: for each row [n] float64, at its supervised positions; empty lists except on the
        last pipeline stage."""

    def __len__(self) -> int:
        return len(self._plans)

    def __getitem__(self, at: int) -> Row:  # pyright: ignore[reportIncompatibleMethodOverride] (no slices)
        row = self.planned.fill(self._plans[at], self._for_loss)
        # [S] float64 from values at the supervised positions
        row.others = {policy: np.zeros(len(row.labels)) for policy, known in self.others.items() if known}
        for policy, column in row.others.items():
            column[row.weights > 0] = self.others[policy][at]
        return row
