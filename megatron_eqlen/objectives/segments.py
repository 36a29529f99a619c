"""Statistics of each segment's tokens, repeated for every token of the segment. Imports torch."""

from __future__ import annotations

from typing import cast

import torch


class Segments:
    """Sequences that tokens belong to: sides of pairs, completions, or steps of sampled trees."""

    def __init__(self, segment_ids: torch.Tensor) -> None:
        """segment_ids: [n] int64, the same for tokens of the same segment."""
        unique = torch.unique(segment_ids, return_inverse=True, return_counts=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        _, self.number, counts = cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], unique)
        self.count = len(counts)
        self.length = counts[self.number]
        """[n] int64"""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.count).index_add(0, self.number, values)[self.number]

    def cumsum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values of each token and those before it in its segment."""
        order = self.number.argsort(stable=True)  # segments one by one
        sums, starts = values[order].cumsum(0), torch.searchsorted(self.number[order], self.number[order])
        # [n] the running sum before each token's segment began
        before = (sums - values[order])[starts]
        return torch.empty_like(sums).index_copy(0, order, sums - before)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return self.sum(values) / self.length

    def max(self, values: torch.Tensor) -> torch.Tensor:
        lowest = values.new_full((self.count,), -torch.inf)
        return lowest.scatter_reduce(0, self.number, values, "amax")[self.number]
