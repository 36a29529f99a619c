"""Our sampler, for CPUs: what vLLM's V2 model runner does on GPUs, in plain torch (vLLM 0.32).

vLLM's V1 model runner, the only one for CPUs, draws from generators that start over when a request is
submitted again, and returns no sampling masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput, SamplingMaskLists
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from megatron_eqlen.engines.protocol import SEED


@dataclass
class Rows:
    """The rows of a batch whose requests have our seed; they stay the same as long as ``metadata`` does."""

    metadata: SamplingMetadata
    places: np.ndarray
    """[rows] int64, their places in the batch"""
    seeds: np.ndarray
    """[rows] uint64"""
    temperature: Tensor
    top_k: Tensor
    """[rows] int64; 0: off. The other limits are [rows] float32."""
    top_p: Tensor
    min_p: Tensor


NEVER = -9999.0
"""Log-prob of tokens that sampling did not keep, as vLLM's servers write it."""


class PathSampler(Sampler):
    """Draws token t of a path as its seed and t say: one uniform number, a hash of both, picks the token by
    the inverse of the cumulative distribution.

    Log-probs are those of the distribution that tokens are drawn from. The rank of a token is 0, which vLLM
    gives to none. Requests without our seed are drawn by vLLM.
    """

    def __init__(self, runner: Any, keep_masks: bool) -> None:
        super().__init__()
        self.runner = runner
        self.keep_masks = keep_masks
        self.masks: SamplingMaskLists | None = None
        """Sampling masks of the last batch, of rows without our seed empty."""
        self.rows: Rows | None = None

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """Sample a token for each row. ``logits``: [rows, vocabulary], any float dtype."""
        if self.rows is None or self.rows.metadata is not sampling_metadata:
            self.rows = self._rows(sampling_metadata, len(logits))
        rows, places = self.rows, torch.from_numpy(self.rows.places)
        lengths = self.runner.input_batch.num_tokens_no_spec[self.rows.places].astype(np.uint64)
        drawn = draw(logits[places], rows, uniform(rows.seeds, lengths))
        if self.keep_masks:
            self.masks = _masks(drawn.kept, rows.places, len(logits))
        ids, values = drawn.with_likeliest(sampling_metadata.max_num_logprobs or 0)
        if len(places) == len(logits):
            ranks = torch.zeros(len(logits), dtype=torch.int64)
            return SamplerOutput(ids[:, :1], LogprobsTensors(ids, values, ranks))
        output = super().forward(logits, sampling_metadata, *args, **kwargs)  # may write to the logits
        if len(places):
            assert output.logprobs_tensors is not None, "our requests ask for them"
            all_ids, all_values, ranks, *_ = output.logprobs_tensors
            output.sampled_token_ids[places, 0] = ids[:, 0]
            all_ids[places, : ids.shape[1]], all_values[places, : ids.shape[1]] = ids, values
            ranks[places] = 0
        return output

    def _rows(self, metadata: SamplingMetadata, count: int) -> Rows:
        names = self.runner.input_batch.req_ids[:count]  # none in vLLM's dummy runs
        params = [self.runner.requests[name].sampling_params for name in names]
        ours = [(place, p) for place, p in enumerate(params) if SEED in (p.extra_args or {})]
        return Rows(
            metadata,
            np.array([place for place, _ in ours], np.int64),
            np.array([p.extra_args[SEED] for _, p in ours], np.uint64),
            torch.tensor([p.temperature for _, p in ours]),
            torch.tensor([max(p.top_k, 0) for _, p in ours]),
            torch.tensor([p.top_p for _, p in ours]),
            torch.tensor([p.min_p for _, p in ours]),
        )


class Drawn(NamedTuple):
    """Tokens that were drawn, one for each row."""

    tokens: Tensor
    """[rows, 1] int32"""
    kept: Tensor
    """[rows, vocabulary] bool: tokens that top-k, top-p and min-p kept."""
    logprobs: Tensor
    """[rows, vocabulary] float32, of the whole distribution."""
    removed: Tensor
    """[rows, 1] float32, to be taken from these for the distribution that tokens were drawn from."""

    def with_likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return ids and log-probs of the drawn tokens, each with those of the ``count`` likeliest others:
        two [rows, 1 + count]."""
        tokens = self.tokens.long()
        values = self.logprobs.gather(1, tokens) - self.removed
        if not count:
            return self.tokens, values
        of_kept = (self.logprobs - self.removed).masked_fill(~self.kept, NEVER)
        others = of_kept.clamp(min=NEVER).scatter(1, tokens, -torch.inf)
        likeliest = others.topk(min(count, others.shape[1] - 1))
        ids = torch.cat([self.tokens, likeliest.indices.to(torch.int32)], 1)
        return ids, torch.cat([values, likeliest.values], 1)


def draw(logits: Tensor, rows: Rows, draws: np.ndarray) -> Drawn:
    """Draw a token for each row.

    ``logits``: [rows, vocabulary], any float dtype. ``draws``: [rows] float64 in [0, 1).
    """
    logits = logits.float() / rows.temperature.unsqueeze(1)
    logprobs = logits.log_softmax(-1)
    if rows.min_p.any():
        probabilities = logits.softmax(-1)
        least = rows.min_p.unsqueeze(1) * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    size = logits.shape[1]
    top_k = torch.where(rows.top_k > 0, rows.top_k, size).clamp(max=size) if rows.top_k.any() else None
    logits = apply_top_k_top_p(logits, top_k, rows.top_p if (rows.top_p < 1).any() else None)
    kept = logits > -torch.inf
    cumulative = torch.where(kept, logprobs.exp(), 0.0).cumsum(-1, dtype=torch.float64)
    mass = cumulative[:, -1:]
    targets = torch.from_numpy(draws).unsqueeze(1) * mass
    tokens = torch.searchsorted(cumulative, targets, right=True)
    limited = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    removed = torch.where(limited.unsqueeze(1), mass.log().float(), 0.0)
    return Drawn(tokens.to(torch.int32), kept, logprobs, removed)


def _masks(kept: Tensor, places: np.ndarray, count: int) -> SamplingMaskLists:
    """Return the kept ids of ``count`` rows in vLLM's form, for those at ``places``; empty for others."""
    counts = np.zeros(count, np.int64)
    counts[places] = kept.sum(1).numpy()
    return SamplingMaskLists(kept.nonzero()[:, 1].to(torch.int32).numpy(), np.append(0, counts.cumsum()))


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) that only ``seeds`` and ``positions`` (both uint64, same shape) determine:
    splitmix64's finalizer applied twice, upper 32 bits."""
    with np.errstate(over="ignore"):
        state = _mix(_mix(seeds) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
