"""Sampling in vLLM's model runner: log-probs at the recipe's temperature, draws fixed by seed and position.

Written for the V1 model runner of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from megatron_eqlen.rollout.engine import SEED, TICKET, EngineError

NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "entropy": lambda probabilities, logs: -(probabilities * logs).sum(-1)
}
"""Number of each sampled token, by the column's name: (probabilities, log-probs) of the distribution that it
was drawn from, both [rows, candidates] float64, log-probs of removed tokens 0 -> [rows]."""

TIES = 64
"""Most ties at its limit that top-k keeps; further tied tokens are dropped."""


@dataclass
class _Rows:
    """Values that stay the same as long as the batch's requests do."""

    metadata: SamplingMetadata
    seeds: np.ndarray | None
    """[rows] uint64; None where a row has no seed."""
    most_kept: int | None
    """Most tokens that top-k keeps of a row, ties included; None where it is off for some row."""


class PathSampler(Sampler):
    """Samples a batch so that token t of a path depends on the logits, its seed and t alone.

    vLLM's own per-request generators are drawn from one request at a time, consume the training process's
    generator as well, and start over when a request is submitted again; and it has no log-prob mode for the
    temperature alone. Here one uniform number per row, a hash of (seed, t), picks the token by the inverse of
    the cumulative distribution.

    Log-probs are ``log_softmax(logits / temperature)`` at the token; ``processed`` ones are normalized over
    the kept set instead: greater by minus the log of the kept mass.

    If top-k is on, the work after the log-softmax covers its tokens alone instead of the vocabulary; in
    float64 the sums are the same.

    With ``mask_width`` the kept set is returned in the field that vLLM has for the ids of the most likely
    tokens: the drawn token, then ``mask_width`` kept ones; if fewer were kept, the drawn token fills the
    rest.

    ``numbers`` names columns of ``NUMBERS``: their values follow in the same field as log-probs of the ids
    -1, -2, ...

    With ``follow`` the sampler remembers which requests it has drawn for (``sampled_tokens``).
    """

    def __init__(
        self,
        runner: Any,
        processed: bool,
        mask_width: int = 0,
        follow: bool = False,
        numbers: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.runner = runner
        self.processed = processed
        self.mask_width = mask_width
        self.follow = follow
        self.numbers = tuple(numbers)
        self.followed: dict[str, str] = {}
        """Tickets of requests, by vLLM's ids."""
        self.rows: _Rows | None = None
        self.removed = torch.zeros((), dtype=torch.float64, device=runner.device)
        self.sampled = 0

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """Sample a token for each row. ``logits``: [rows, vocabulary], any float dtype."""
        draw = self._uniform(sampling_metadata, len(logits))
        if draw is None:  # vLLM's own dummy run, or another client's request to a server
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        assert sampling_metadata.temperature is not None
        logits = logits.float() / sampling_metadata.temperature.unsqueeze(1)
        logprobs = logits.log_softmax(-1)
        ids = self._candidates(logits)
        if ids is not None:
            logits, logprobs = logits.gather(1, ids), logprobs.gather(1, ids)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:  # min-p
            logits = processor.apply(logits)
        logits = apply_top_k_top_p(logits, sampling_metadata.top_k, sampling_metadata.top_p)
        kept = torch.where(logits > -torch.inf, logprobs, -torch.inf).exp()
        if self.mask_width:  # of ties at top-k's limit those with the lowest ids
            masses, likely = kept.sort(descending=True, stable=True)
            masses, likely = masses[:, : self.mask_width], likely[:, : self.mask_width]
            kept = torch.zeros_like(kept).scatter(1, likely, masses)
        cumulative = kept.cumsum(-1, dtype=torch.float64)
        mass = cumulative[:, -1:]
        draws = torch.from_numpy(draw).to(logits.device, non_blocking=True)
        drawn = torch.searchsorted(cumulative, draws.unsqueeze(1) * mass, right=True)
        numbers = self._numbers(kept, logprobs, mass)
        tokens, logprobs = _at(ids, drawn), logprobs.gather(1, drawn)
        if self.processed:
            logprobs = logprobs - mass.log().float()
        self._count_removed(mass.squeeze(1))
        columns = tokens
        if self.mask_width:
            columns = torch.cat((tokens, torch.where(masses.gt(0), _at(ids, likely), tokens)), 1)
            logprobs = logprobs.expand(-1, columns.shape[1])  # the drawn token's; others are not read
        if self.numbers:
            names = torch.arange(-1, -1 - len(self.numbers), -1, device=columns.device)
            columns = torch.cat((columns, names.expand(len(columns), -1)), 1)
            logprobs = torch.cat((logprobs, numbers), 1)
        tokens, columns = tokens.to(torch.int32), columns.to(torch.int32)
        ranks = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)  # not read
        return SamplerOutput(tokens, LogprobsTensors(columns, logprobs.contiguous(), ranks))

    @property
    def settings(self) -> tuple[bool, int, bool, tuple[str, ...]]:
        return self.processed, self.mask_width, self.follow, self.numbers

    def take_removed_mass(self) -> tuple[float, int]:
        total = float(self.removed), self.sampled
        self.removed.zero_()
        self.sampled = 0
        return total

    def sampled_tokens(self) -> dict[str, int | None]:
        """Return the number of tokens of each request, by ticket; None: the request has ended. To be called
        between two steps; a request that has ended is named once."""
        states = {name: self.runner.requests.get(name) for name in self.followed}
        counts = {
            self.followed[name]: None if state is None else len(state.output_token_ids)
            for name, state in states.items()
        }
        self.followed = {name: ticket for name, ticket in self.followed.items() if states[name] is not None}
        return counts

    def _numbers(self, kept: Tensor, logprobs: Tensor, mass: Tensor) -> Tensor:
        """Return [rows, numbers] float32, the values of ``numbers``."""
        if not self.numbers:
            return kept[:, :0]
        probabilities = kept.double() / mass
        logs = torch.where(kept > 0, logprobs.double() - mass.log(), 0.0)
        return torch.stack([NUMBERS[name](probabilities, logs) for name in self.numbers], 1).float()

    def _candidates(self, logits: Tensor) -> Tensor | None:
        """Return [rows, c] int64: the tokens that top-k may keep, by ascending id; None: the whole
        vocabulary."""
        assert self.rows is not None
        most = self.rows.most_kept
        if most is None or most >= logits.shape[1]:
            return None
        return logits.topk(most, sorted=False).indices.sort().values

    def _uniform(self, metadata: SamplingMetadata, rows: int) -> np.ndarray | None:
        """Return [rows] float64 in [0, 1): a hash of each row's seed and path length; None if a row has no
        seed."""
        if self.rows is None or self.rows.metadata is not metadata:
            self.rows = self._rows(metadata, rows)
        if self.rows.seeds is None:
            return None
        lengths = self.runner.input_batch.num_tokens_no_spec[:rows]
        return uniform(self.rows.seeds, lengths.astype(np.uint64))

    def _rows(self, metadata: SamplingMetadata, rows: int) -> _Rows:
        names = self.runner.input_batch.req_ids
        params = [self.runner.requests[name].sampling_params for name in names]
        extras = [param.extra_args or {} for param in params]
        seeds = [extra.get(SEED) for extra in extras]
        if len(seeds) != rows or None in seeds:
            return _Rows(metadata, None, None)
        if self.follow:
            self.followed |= {name: extra[TICKET] for name, extra in zip(names, extras, strict=True)}
        limits = [param.top_k for param in params]
        most_kept = None if min(limits) < 1 else max(limits) + TIES
        return _Rows(metadata, np.array(seeds, dtype=np.uint64), most_kept)

    def _count_removed(self, mass: Tensor) -> None:
        """Count the removed probability, ``mass`` [rows] float64. Rows that are still in their prefill are
        left out: vLLM discards their samples. Nothing here waits for the GPU."""
        counted = ~self.runner.discard_request_mask.np[: len(mass)]
        removed = (1 - mass).clamp(min=0)
        if not counted.all():  # an index of booleans would wait for their number
            rows = torch.from_numpy(counted).to(mass.device, non_blocking=True)
            removed = torch.where(rows, removed, 0.0)
        self.removed += removed.sum()
        self.sampled += int(counted.sum())


def install(
    runner: Any, processed: bool, mask_width: int = 0, follow: bool = False, numbers: Sequence[str] = ()
) -> None:
    """Make ``runner`` sample with a ``PathSampler`` of these settings.

    Raises EngineError unless it is a V1 model runner with vLLM's plain sampler: vLLM would otherwise generate
    with a sampler of its own, whose log-probs and draws are others.
    """
    if not isinstance(runner, GPUModelRunner):
        raise EngineError(
            f"expected vLLM's V1 model runner (VLLM_USE_V2_MODEL_RUNNER=0), found {_name(runner)}"
        )
    if type(runner.sampler) not in (Sampler, PathSampler):
        raise EngineError(f"expected vLLM's {_name(Sampler)}, to replace it, found {_name(runner.sampler)}")
    settings = processed, mask_width, follow, tuple(numbers)
    if type(runner.sampler) is Sampler or runner.sampler.settings != settings:
        runner.sampler = PathSampler(runner, *settings)


def _name(thing: Any) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _at(ids: Tensor | None, columns: Tensor) -> Tensor:
    """Return the token ids of ``columns``, which are columns of ``ids`` or else of the vocabulary."""
    return columns if ids is None else ids.gather(1, columns)


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
