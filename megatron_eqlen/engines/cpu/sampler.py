"""Our sampler, for CPUs: what vLLM's V2 model runner does on GPUs, in plain torch (vLLM 0.32). vLLM's V1
model runner, the only one for CPUs, draws from generators that start over when a request is submitted again,
and returns no sampling masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput, SamplingMaskLists
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from megatron_eqlen.engines.protocol import SEED

BLOCK = 1 << 19
"""Most logits drawn at once, to stay in a core's cache. A row's results do not depend on its block."""
NEVER = -9999.0
"""Log-prob of tokens that sampling did not keep, as vLLM's servers write it."""
# splitmix64; uint64 wraps around in arrays, and constants of NumPy need no conversion in each step
ONE, HALF, GOLDEN = np.uint64(1), np.uint64(32), np.uint64(0x9E3779B97F4A7C15)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass
class Rows:
    """Rows of a batch whose requests have our seed."""

    places: np.ndarray
    """[rows] int64, their places in the batch"""
    seeds: np.ndarray
    """[rows] uint64"""
    temperature: Tensor
    """[rows, 1] float32"""
    top_k: Tensor | None
    """[rows] int64, the vocabulary's size: off; None: off for all. The other limits are [rows, 1] float32."""
    top_p: Tensor | None
    min_p: Tensor | None
    limited: Tensor | None
    """[rows, 1] bool, True for rows with a limit; None: no row has one."""

    @classmethod
    def of(cls, params: list[Any], places: np.ndarray, vocabulary: int) -> Rows:
        """Return the rows of requests with these ``SamplingParams``."""
        temperature, top_p, min_p = (
            torch.tensor([[getattr(p, name)] for p in params], dtype=torch.float32)
            for name in ("temperature", "top_p", "min_p")
        )
        top_k = torch.tensor([p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params])
        limited = torch.tensor([[p.top_k > 0 or p.top_p < 1 or p.min_p > 0] for p in params])
        return cls(
            places,
            np.array([p.extra_args[SEED] for p in params], np.uint64),
            temperature,
            top_k if (top_k < vocabulary).any() else None,
            top_p if (top_p < 1).any() else None,
            min_p if (min_p > 0).any() else None,
            limited if limited.any() else None,
        )


class PathSampler(Sampler):
    """Draws token t of a path from its seed and t: one uniform number, a hash of both, picks the token by the
    inverse of the cumulative distribution. Log-probs are those of the distribution drawn from. The rank of a
    token is 0, which vLLM gives to none. vLLM draws requests without our seed."""

    def __init__(self, runner: Any, keep_masks: bool) -> None:
        super().__init__()
        self.runner = runner
        self.keep_masks = keep_masks
        self.masks: SamplingMaskLists | None = None
        """Sampling masks of the last batch; empty for rows without our seed."""
        self.metadata: SamplingMetadata | None = None
        self.blocks: list[Rows] = []
        """The batch's rows with our seed; they stay the same as long as ``metadata`` does."""

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """Sample a token for each row. ``logits``: [rows, vocabulary], any float dtype."""
        if self.metadata is not sampling_metadata:
            self.metadata, self.blocks = sampling_metadata, self._blocks(*logits.shape)
        lengths = self.runner.input_batch.num_tokens_no_spec
        kept_ids, counts = [], np.zeros(len(logits), np.int64)
        parts: list[tuple[Tensor, Tensor]] = []
        for rows in self.blocks:
            drawn = draw(logits, rows, uniform(rows.seeds, lengths[rows.places].astype(np.uint64)))
            parts.append(drawn.with_likeliest(sampling_metadata.max_num_logprobs or 0))
            if self.keep_masks:
                of_row, ids = drawn.kept.nonzero()
                kept_ids.append(ids.astype(np.int32))
                counts[rows.places] = np.bincount(of_row, minlength=len(rows.places))
        if self.keep_masks:
            flat = np.concatenate([np.empty(0, np.int32), *kept_ids])
            self.masks = SamplingMaskLists(flat, np.append(0, counts.cumsum()))
        ours = sum(len(rows.places) for rows in self.blocks)
        if ours == len(logits):
            ids, values = map(torch.cat, zip(*parts, strict=True))
            ranks = torch.zeros(ours, dtype=torch.int64)
            return SamplerOutput(ids[:, :1], LogprobsTensors(ids, values, ranks))
        output = super().forward(logits, sampling_metadata, *args, **kwargs)  # may write to the logits
        for rows, (ids, values) in zip(self.blocks, parts, strict=True):
            assert output.logprobs_tensors is not None, "our requests ask for them"
            all_ids, all_values, ranks, *_ = output.logprobs_tensors
            output.sampled_token_ids[rows.places, 0] = ids[:, 0]
            all_ids[rows.places, : ids.shape[1]], all_values[rows.places, : ids.shape[1]] = ids, values
            ranks[rows.places] = 0
        return output

    def _blocks(self, count: int, vocabulary: int) -> list[Rows]:
        names = self.runner.input_batch.req_ids[:count]  # none in vLLM's dummy runs
        params = [self.runner.requests[name].sampling_params for name in names]
        places = np.flatnonzero([SEED in (p.extra_args or {}) for p in params])
        height = max(1, BLOCK // vocabulary)
        blocks = [places[start : start + height] for start in range(0, len(places), height)]
        return [Rows.of([params[place] for place in block], block, vocabulary) for block in blocks]


class Drawn(NamedTuple):
    tokens: Tensor
    """[rows, 1] int64"""
    kept: np.ndarray
    """[rows, vocabulary] bool: tokens that top-k, top-p and min-p kept."""
    logprobs: Tensor
    """[rows, vocabulary] float32, of the whole distribution."""
    removed: Tensor | float
    """[rows, 1] float32, to subtract for the log-probs that tokens were drawn from; 0 without limits."""

    def with_likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return ids (int32), log-probs (float32) of the drawn and likeliest other tokens, [rows, 1 +
        count]."""
        values = self.logprobs.gather(1, self.tokens) - self.removed
        if not count:
            return self.tokens.to(torch.int32), values
        of_kept = (self.logprobs - self.removed).masked_fill(torch.from_numpy(~self.kept), NEVER)
        others = of_kept.clamp(min=NEVER).scatter(1, self.tokens, -torch.inf)
        likeliest = others.topk(min(count, others.shape[1] - 1))
        ids = torch.cat([self.tokens, likeliest.indices], 1).to(torch.int32)
        return ids, torch.cat([values, likeliest.values], 1)


def draw(logits: Tensor, rows: Rows, draws: np.ndarray) -> Drawn:
    """Draw a token for each of ``rows`` of ``logits`` [batch, vocabulary]. ``draws``: [rows] float64 in [0,
    1)."""
    if len(rows.places) < len(logits):
        logits = logits.index_select(0, torch.from_numpy(rows.places))
    logits = logits.float() / rows.temperature
    logprobs = logits.log_softmax(-1)
    if rows.limited is None:
        tokens, _ = _picked(logprobs.exp(), draws)
        return Drawn(tokens, logits.numpy() > -np.inf, logprobs, 0.0)
    kept = keep(logits, rows)
    of_row, ids = kept.nonzero()
    counts = np.bincount(of_row, minlength=len(kept))
    place = np.arange(len(ids)) - np.repeat(counts.cumsum() - counts, counts)
    # [rows, most that a row keeps]: ids and probabilities of kept tokens, then zeros
    among = torch.zeros(len(kept), int(counts.max()), dtype=torch.int64)
    among[of_row, place] = torch.from_numpy(ids)
    probabilities = torch.zeros(among.shape)
    probabilities[of_row, place] = logprobs[of_row, ids].exp()
    tokens, mass = _picked(probabilities, draws)
    removed = mass.log().float().masked_fill(~rows.limited, 0.0)
    return Drawn(among.gather(1, tokens), kept, logprobs, removed)


def _picked(probabilities: Tensor, draws: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return what ``draws`` pick by the inverse of the cumulative distribution, and each row's mass: [rows,
    1] int64, float64."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    mass = cumulative[:, -1:]
    return torch.searchsorted(cumulative, torch.from_numpy(draws).unsqueeze(1) * mass, right=True), mass


def keep(logits: Tensor, rows: Rows) -> np.ndarray:
    """Return the tokens that the limits of ``rows`` keep, [rows, vocabulary] bool, as ``apply_top_k_top_p``
    of vLLM does: with top-p the least go, up to a mass of 1 - p; of equal ones the first. vLLM sorts ids,
    too, which takes most of a step's time with a real vocabulary; NumPy sorts values alone."""
    if rows.min_p is not None:
        probabilities = logits.softmax(-1)
        least = rows.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    values, size = logits.numpy(), logits.shape[1]
    ordered = np.sort(values, axis=-1)
    least, equal = ordered[:, :1], np.zeros(len(values), int)  # the least that is kept; how many like it go
    if rows.top_k is not None:
        least = np.take_along_axis(ordered, size - rows.top_k.numpy()[:, None], axis=1)
        ordered[ordered < least] = -np.inf
    if rows.top_p is not None:
        ascending = torch.from_numpy(ordered)
        cumulative = ascending.softmax(-1).cumsum(-1)
        gone = torch.searchsorted(cumulative, 1 - rows.top_p, right=True).clamp(max=size - 1)
        lowest = ascending.gather(1, gone)
        least, equal = lowest.numpy(), (gone - torch.searchsorted(ascending, lowest)).squeeze(1).numpy()
    kept = (values >= least) & (values > -np.inf)
    for row in equal.nonzero()[0].tolist():
        kept[row, (values[row] == least[row]).nonzero()[0][: equal[row]]] = False
    return kept


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) made of ``seeds`` and ``positions`` (uint64, same shape): splitmix64's
    finalizer applied twice, upper 32 bits."""
    state = _mix(_mix(seeds) + (positions + ONE) * GOLDEN)
    return (state >> HALF).astype(np.float64) * 2.0**-32


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> SHIFTS[0])) * FACTORS[0]
    state = (state ^ (state >> SHIFTS[1])) * FACTORS[1]
    return state ^ (state >> SHIFTS[2])
