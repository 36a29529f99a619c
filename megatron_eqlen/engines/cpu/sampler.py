"""Our sampler, for CPUs: what vLLM's V2 model runner does on GPUs, in plain torch (vLLM 0.32). Its V1 runner,
the only one for CPUs, has generators that start over with a request, and returns no sampling masks."""

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
    """[rows] uint64, the requests' seeds after ``mix``"""
    temperature: Tensor | None
    """[rows, 1] float32; None: 1 for all"""
    top_k: np.ndarray | None
    """[rows, 1] int64, place in ascending order of the least token that top-k keeps; None: off for all"""
    beyond: Tensor | None
    """[rows, 1] float32, the mass that top-p removes; None: off for all. ``min_p`` likewise."""
    min_p: Tensor | None
    unlimited: Tensor | None
    """[rows, 1] bool, True for rows without a limit; None: all are."""

    @classmethod
    def of(cls, params: list[Any], places: np.ndarray, vocabulary: int) -> Rows:
        """Return the rows of requests with these ``SamplingParams``."""
        # [rows, 4] as requested: a top-p that float32 rounds to 1 counts as a limit, and removes nothing
        exact = np.array([(p.temperature, p.top_p, p.min_p, p.top_k) for p in params], np.float64)
        temperature, top_p, min_p = exact.T[:3, :, None].astype(np.float32, order="C")
        top_k = exact[:, 3:]
        # vLLM's 0 and -1 switch top-k off, and so does one of the whole vocabulary
        some = (top_k > 0) & (top_k < vocabulary)
        unlimited = (top_k <= 0) & (exact[:, 1:2] >= 1) & (exact[:, 2:3] <= 0)
        return cls(
            places,
            mix(np.array([p.extra_args[SEED] for p in params], np.uint64)),
            torch.from_numpy(temperature) if (temperature != 1).any() else None,
            np.where(some, vocabulary - top_k, 0).astype(np.int64) if some.any() else None,
            torch.from_numpy(1 - top_p) if (top_p < 1).any() else None,
            torch.from_numpy(min_p) if (min_p > 0).any() else None,
            None if unlimited.all() else torch.from_numpy(unlimited),
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
        self.ranks: Tensor | None = None
        """[rows] int64, of the batch's tokens; None: the batch has rows without our seed."""

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """Sample a token for each row. ``logits``: [rows, vocabulary], any float dtype."""
        count, vocabulary = logits.shape
        # vLLM makes new metadata when requests come, end or change places, and keeps it otherwise
        if self.metadata is not sampling_metadata:
            self.metadata, self.blocks = sampling_metadata, self._blocks(count, vocabulary)
            ours = sum(len(rows.places) for rows in self.blocks)
            self.ranks = torch.zeros(count, dtype=torch.int64) if ours == count else None
        # tokens of each path so far: the place of the one that is drawn
        lengths, likeliest = self.runner.input_batch.num_tokens_no_spec, sampling_metadata.max_num_logprobs
        kept_ids, counts = [np.empty(0, np.int32)], np.zeros(count + 1, np.int64)
        parts: list[tuple[Tensor, Tensor]] = []
        for rows in self.blocks:
            drawn = draw(logits, rows, uniform(rows.seeds, lengths[rows.places].astype(np.uint64)))
            parts.append(drawn.with_likeliest(likeliest or 0))
            if self.keep_masks:
                of_row, ids = np.divmod(np.flatnonzero(drawn.kept), vocabulary)
                kept_ids.append(ids.astype(np.int32))
                counts[1 + rows.places] = np.bincount(of_row, minlength=len(rows.places))
        if self.keep_masks:
            self.masks = SamplingMaskLists(np.concatenate(kept_ids), counts.cumsum())
        if self.ranks is not None:
            ids, values = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
            return SamplerOutput(ids[:, :1] if likeliest else ids, LogprobsTensors(ids, values, self.ranks))
        # another client's rows are among ours: vLLM draws all, then our draws replace its own
        output = super().forward(logits, sampling_metadata, *args, **kwargs)  # may write to the logits
        for rows, (ids, values) in zip(self.blocks, parts, strict=True):
            output.sampled_token_ids[rows.places, 0] = ids[:, 0]
            if (columns := output.logprobs_tensors) is not None:  # a run asks for them, others may not
                all_ids, all_values, ranks, *_ = columns
                all_ids[rows.places, : ids.shape[1]], all_values[rows.places, : ids.shape[1]] = ids, values
                ranks[rows.places] = 0
        return output

    def _blocks(self, count: int, vocabulary: int) -> list[Rows]:
        names = self.runner.input_batch.req_ids[:count]  # none in vLLM's dummy runs
        params = [self.runner.requests[name].sampling_params for name in names]
        # other clients' requests have no seed of ours
        places = np.flatnonzero([SEED in (p.extra_args or {}) for p in params])
        height = max(1, BLOCK // vocabulary)
        blocks = [places[start : start + height] for start in range(0, len(places), height)]
        return [Rows.of([params[place] for place in block], block, vocabulary) for block in blocks]


class Drawn(NamedTuple):
    tokens: np.ndarray
    """[rows, 1] int64"""
    logits: Tensor
    logprobs: Tensor
    """[rows, vocabulary] float32, after temperature, of the whole distribution."""
    limited: np.ndarray | None = None
    """[rows, vocabulary] bool: tokens that top-k, top-p and min-p kept; None: no row has a limit."""
    removed: Tensor | float = 0.0
    """[rows, 1] float32, to subtract for the log-probs that tokens were drawn from."""

    @property
    def kept(self) -> np.ndarray:
        """[rows, vocabulary] bool: tokens that could be drawn. Made only where it is asked for."""
        return self.logits.numpy() > -np.inf if self.limited is None else self.limited

    def with_likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return ids (int32), log-probs (float32) of drawn and likeliest other tokens: [rows, 1 + count]."""
        ids = torch.from_numpy(self.tokens.astype(np.int32))
        values = torch.from_numpy(self.logprobs.numpy()[np.arange(len(ids))[:, None], self.tokens])
        if self.limited is not None:
            values -= self.removed
        if not count:
            return ids, values
        of_kept = (self.logprobs - self.removed).masked_fill(torch.from_numpy(~self.kept), NEVER)
        # without the drawn token, which has the first column
        others = of_kept.clamp(min=NEVER).scatter(1, torch.from_numpy(self.tokens), -torch.inf)
        likeliest = others.topk(min(count, others.shape[1] - 1))
        ids = torch.cat([ids, likeliest.indices.to(torch.int32)], 1)
        return ids, torch.cat([values, likeliest.values], 1)


def draw(logits: Tensor, rows: Rows, draws: np.ndarray) -> Drawn:
    """Draw a token for each of ``rows`` of ``logits`` [batch, vocabulary] by ``draws`` [rows], in [0, 1)."""
    if len(rows.places) < logits.shape[0]:
        logits = logits.index_select(0, torch.from_numpy(rows.places))
    logits = logits.float() if rows.temperature is None else logits.float() / rows.temperature
    logprobs = logits.log_softmax(-1)
    if rows.unlimited is None:
        return Drawn(_picked(logprobs.exp(), draws)[0], logits, logprobs)
    kept = keep(logits, rows)
    places, counts = np.flatnonzero(kept), np.count_nonzero(kept, axis=1)
    # [rows, most that a row keeps]: ids and probabilities of kept tokens, then zeros
    filled = np.arange(counts.max()) < counts[:, None]
    among, probabilities = np.zeros(filled.shape, np.int64), torch.zeros(filled.shape)
    among[filled] = places % logits.shape[1]
    probabilities.numpy()[filled] = torch.from_numpy(logprobs.numpy().ravel()[places]).exp().numpy()
    picked, mass = _picked(probabilities, draws)
    removed = torch.from_numpy(mass).log().float().masked_fill(rows.unlimited, 0.0)
    return Drawn(np.take_along_axis(among, picked, 1), logits, logprobs, kept, removed)


def _picked(probabilities: Tensor, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which places ``draws`` pick (int64), and each row's mass (float64): both [rows, 1]."""
    # in float64: a draw has 32 bits, of which float32 keeps 24
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    mass = cumulative.numpy()[:, -1:]
    thresholds = torch.from_numpy(draws[:, None] * mass)
    return torch.searchsorted(cumulative, thresholds, right=True).numpy(), mass


def keep(logits: Tensor, rows: Rows) -> np.ndarray:
    """Return the tokens that the limits of ``rows`` keep, [rows, vocabulary] bool, as ``apply_top_k_top_p``
    of vLLM does: with top-p the least go, up to a mass of 1 - p; of equal ones the first. vLLM sorts ids,
    too, which takes most of a step's time with a real vocabulary; NumPy sorts values alone."""
    # min-p first, as vLLM does it: top-k and top-p choose among what it leaves
    if rows.min_p is not None:
        probabilities = logits.softmax(-1)
        least = rows.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    values, size = logits.numpy(), logits.shape[1]
    # [rows, vocabulary], ascending
    ordered = np.sort(values, axis=-1)
    least, equal = ordered[:, :1], np.zeros(len(values), int)  # the least that is kept; how many like it go
    if rows.top_k is not None:
        least = np.take_along_axis(ordered, rows.top_k, axis=1)
        np.putmask(ordered, ordered < least, -np.inf)
    if rows.beyond is not None:
        ascending = torch.from_numpy(ordered)
        cumulative = ascending.softmax(-1).cumsum(-1)
        # [rows, 1] number of the least tokens whose mass stays within 1 - p
        gone = torch.searchsorted(cumulative, rows.beyond, right=True).clamp(max=size - 1)
        lowest = ascending.gather(1, gone)
        # of the tokens that equal the least kept one, as many go as lie before it in ascending order
        least, equal = lowest.numpy(), (gone - torch.searchsorted(ascending, lowest)).squeeze(1).numpy()
    kept = (values >= least) & (values > -np.inf)
    for row in equal.nonzero()[0].tolist():
        kept[row, (values[row] == least[row]).nonzero()[0][: equal[row]]] = False
    return kept


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) of seeds after ``mix`` and positions (uint64, same shape), of 32 bits each."""
    # the finalizer a second time; the upper half of its bits is the draw
    return (mix(seeds + (positions + ONE) * GOLDEN) >> HALF).astype(np.float64) * 2.0**-32


def mix(state: np.ndarray) -> np.ndarray:
    """Return what splitmix64's finalizer makes of [...] uint64."""
    state = (state ^ (state >> SHIFTS[0])) * FACTORS[0]
    state = (state ^ (state >> SHIFTS[1])) * FACTORS[1]
    return state ^ (state >> SHIFTS[2])
