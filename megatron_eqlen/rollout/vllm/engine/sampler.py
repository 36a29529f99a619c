"""Our sampler in vLLM's model runners, V1 and V2: written for vLLM 0.32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2ModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput as V2SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler as V2Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from megatron_eqlen.rollout.engine import SEED, EngineError
from megatron_eqlen.rollout.vllm.engine.draws import TIES, DrawSettings, Limits, PathDraws, uniform


@dataclass
class Rows:
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
    """

    def __init__(self, runner: Any, settings: DrawSettings) -> None:
        Sampler.__init__(self)
        self.start(runner.device, settings)
        self.runner = runner
        self.rows: Rows | None = None

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """Sample a token for each row. ``logits``: [rows, vocabulary], any float dtype."""
        count = len(logits)
        if (rows := self.rows_of(sampling_metadata, count)) is None:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        lengths = self.runner.input_batch.num_tokens_no_spec[:count]
        tokens, recorded, mass = self.draw(
            logits, rows.limits, uniform(rows.seeds, lengths.astype(np.uint64))
        )
        counted = ~self.runner.discard_request_mask.np[:count]  # the others are still in their prefill
        self.count_removed(mass, counted)
        return SamplerOutput(tokens.to(torch.int32).unsqueeze(1), recorded)

    def rows_of(self, metadata: SamplingMetadata, count: int) -> Rows | None:
        """Return the values of a batch of ``count`` requests; None if one has no seed: in vLLM's own dummy
        run, or in another client's request to a server."""
        if self.rows is None or self.rows.metadata is not metadata:
            self.rows = self._rows(metadata, count)
        return self.rows

    def _rows(self, metadata: SamplingMetadata, rows: int) -> Rows | None:
        names = self.runner.input_batch.req_ids
        params = [self.runner.requests[name].sampling_params for name in names]
        seeds = [(param.extra_args or {}).get(SEED) for param in params]
        if len(seeds) != rows or None in seeds:
            return None

        def min_p(logits: Tensor) -> Tensor:
            for processor in metadata.logitsprocs.argmax_invariant:
                logits = processor.apply(logits)
            return logits

        assert metadata.temperature is not None
        top_k = [param.top_k for param in params]
        most_kept = None if min(top_k) < 1 else max(top_k) + TIES
        limits = Limits(metadata.temperature, metadata.top_k, metadata.top_p, min_p, most_kept)
        return Rows(metadata, np.array(seeds, dtype=np.uint64), limits)


class V2PathSampler(PathDraws, V2Sampler):
    """``PathDraws`` in the V2 model runner, in place of ``sampler``, whose state it shares.

    The runner tells a sampler each request once, when it is first scheduled; so seeds are kept by the
    request's index in the runner.
    """

    def __init__(self, sampler: V2Sampler, settings: DrawSettings) -> None:
        vars(self).update(vars(sampler))
        self.start(sampler.req_states.device, settings)
        if not isinstance(sampler, V2PathSampler):
            self.seeds = np.zeros(sampler.req_states.max_num_reqs, np.uint64)
            self.seeded = np.zeros(sampler.req_states.max_num_reqs, bool)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        super().add_request(req_idx, sampling_params)
        seed = (sampling_params.extra_args or {}).get(SEED)
        self.seeded[req_idx] = seed is not None
        self.seeds[req_idx] = seed or 0

    def __call__(self, logits: Tensor, input_batch: InputBatch) -> V2SamplerOutput:
        """Sample a token for each row. ``logits``: [rows, vocabulary], any float dtype."""
        rows, places = input_batch.num_reqs, input_batch.idx_mapping_np
        if not self.seeded[places].all():  # vLLM's own dummy run, or another client's request to a server
            return super().__call__(logits, input_batch)
        # an upper bound only where drafts may be rejected
        lengths = input_batch.seq_lens_cpu_upper_bound.numpy()[:rows]
        draws = uniform(self.seeds[places], lengths.astype(np.uint64))
        tokens, recorded, mass = self.draw(logits, self._limits(input_batch), draws)
        counted = lengths >= input_batch.prefill_len_np
        self.count_removed(mass, counted)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(rows),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return V2SamplerOutput(tokens.unsqueeze(1), recorded, None, num_sampled, num_rejected)

    def _limits(self, batch: InputBatch) -> Limits:
        states, places = self.sampling_states, batch.idx_mapping_np

        def min_p(logits: Tensor) -> Tensor:
            states.apply_min_p(logits, batch.idx_mapping, places)
            return logits

        top_k, top_p = states.get_top_k_top_p(batch.idx_mapping, places)
        limit = states.top_k.np[places].max()
        most_kept = None if limit == states.vocab_size else int(limit) + TIES
        return Limits(states.temperature.gpu[batch.idx_mapping], top_k, top_p, min_p, most_kept)


def install(runner: Any, settings: DrawSettings) -> None:
    """Make ``runner`` sample with a ``PathSampler`` or ``V2PathSampler`` of these settings.

    Raises EngineError unless it is one of vLLM's model runners with vLLM's plain sampler: vLLM would
    otherwise generate with a sampler of its own, whose log-probs and draws are others.
    """
    v2 = issubclass(type(runner), V2ModelRunner)
    if not v2 and not issubclass(type(runner), GPUModelRunner):
        raise EngineError(f"expected vLLM's V1 or V2 model runner, found {_name(runner)}")
    plain, ours = (V2Sampler, V2PathSampler) if v2 else (Sampler, PathSampler)
    found = runner.sampler
    if type(found) not in (plain, ours):
        raise EngineError(f"expected vLLM's {_name(plain)}, to replace it, found {_name(found)}")
    if v2 and runner.rejection_sampler is not None:  # it draws in place of the sampler
        raise EngineError(
            f"expected a V2 model runner without drafts, found {_name(runner.rejection_sampler)}"
        )
    if type(found) is ours and found.settings == settings:
        return
    if isinstance(found, V2Sampler):
        runner.sampler = V2PathSampler(found, settings)
    else:
        runner.sampler = PathSampler(runner, settings)


def _name(thing: Any) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
