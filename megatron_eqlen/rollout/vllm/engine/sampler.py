"""Our sampler in vLLM's V1 model runner: written for vLLM 0.32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from megatron_eqlen.rollout.engine import SEED, TICKET, EngineError
from megatron_eqlen.rollout.vllm.engine.draws import TIES, Limits, PathDraws, uniform


@dataclass
class _Rows:
    """Values that stay the same as long as the batch's requests do."""

    metadata: SamplingMetadata
    seeds: np.ndarray
    """[rows] uint64"""
    limits: Limits


class PathSampler(PathDraws, Sampler):
    """``PathDraws`` in the V1 model runner.

    vLLM's own per-request generators are drawn from one request at a time, consume the training process's
    generator as well, and start over when a request is submitted again; and it has no log-prob mode for the
    temperature alone.

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
        Sampler.__init__(self)
        self.start(runner.device, processed, mask_width, numbers)
        self.runner = runner
        self.follow = follow
        self.followed: dict[str, str] = {}
        """Tickets of requests, by vLLM's ids."""
        self.rows: _Rows | None = None

    @property
    def settings(self) -> tuple[bool, int, bool, tuple[str, ...]]:
        return self.processed, self.mask_width, self.follow, self.numbers

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """Sample a token for each row. ``logits``: [rows, vocabulary], any float dtype."""
        count = len(logits)
        if self.rows is None or self.rows.metadata is not sampling_metadata:
            self.rows = self._rows(sampling_metadata, count)
        if self.rows is None:  # vLLM's own dummy run, or another client's request to a server
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        lengths = self.runner.input_batch.num_tokens_no_spec[:count]
        draws = uniform(self.rows.seeds, lengths.astype(np.uint64))
        counted = ~self.runner.discard_request_mask.np[:count]
        tokens, recorded = self.draw(logits, self.rows.limits, draws, counted)
        return SamplerOutput(tokens.to(torch.int32).unsqueeze(1), recorded)

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

    def _rows(self, metadata: SamplingMetadata, rows: int) -> _Rows | None:
        """Return the values of a batch; None if a row has no seed."""
        names = self.runner.input_batch.req_ids
        params = [self.runner.requests[name].sampling_params for name in names]
        extras = [param.extra_args or {} for param in params]
        seeds = [extra.get(SEED) for extra in extras]
        if len(seeds) != rows or None in seeds:
            return None
        if self.follow:
            self.followed |= {name: extra[TICKET] for name, extra in zip(names, extras, strict=True)}

        def min_p(logits: Tensor) -> Tensor:
            for processor in metadata.logitsprocs.argmax_invariant:
                logits = processor.apply(logits)
            return logits

        assert metadata.temperature is not None
        top_k = [param.top_k for param in params]
        most_kept = None if min(top_k) < 1 else max(top_k) + TIES
        limits = Limits(metadata.temperature, metadata.top_k, metadata.top_p, min_p, most_kept)
        return _Rows(metadata, np.array(seeds, dtype=np.uint64), limits)


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
