"""Speculative decoding that changes no token: drafts are accepted where ``PathSampler`` draws the same token.

    draft of a request      d0 d1 d2        proposed by vLLM, from n-grams of its path
    logits                  l0 l1 l2 l3     l1 is computed as if d0 had been drawn, and so on
    drawn                   t0 t1 t2 t3     token t of the path by (seed, t), as without speculation
    new tokens              t0 t1           t0 = d0, so l1 is right; t1 differs from d1, so l2 is not

The draw of a token depends on its logits, its seed and its position alone, so the new tokens are those that
decoding one by one gives, with their log-probs, sampling masks and numbers, as far as the logits round alike.
vLLM's own rejection sampler is exact in distribution only, and draws from generators of its own.

Written for the V1 model runner of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from megatron_eqlen.rollout.vllm.engine import sampler
from megatron_eqlen.rollout.vllm.engine.draws import DrawSettings, Limits, uniform
from megatron_eqlen.rollout.vllm.engine.sampler import PathSampler

NOTHING = int(PLACEHOLDER_TOKEN_ID)
"""Token id that vLLM drops from the output."""


class SpeculativeSampler(nn.Module):
    """Takes the place of vLLM's ``RejectionSampler``. ``stock`` is used where ``sampler`` uses its base: for
    dummy runs, and for requests of other clients of a server."""

    def __init__(self, sampler: PathSampler, stock: nn.Module) -> None:
        super().__init__()
        self.sampler, self.stock = sampler, stock

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Sample the new tokens of each request. ``logits``: [rows, vocabulary]; each request has a row for
        each token of its draft, and one more."""
        counts = np.array(metadata.num_draft_tokens) + 1
        requests = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)
        if (rows := self.sampler.rows_of(sampling_metadata, len(counts))) is None:
            return self.stock(metadata, draft_probs, logits, sampling_metadata)
        lengths = self.sampler.runner.input_batch.num_tokens_no_spec[requests] + offsets
        draws = uniform(rows.seeds[requests], lengths.astype(np.uint64))
        request, offset = (torch.from_numpy(each).to(logits.device) for each in (requests, offsets))
        drawn, recorded, mass = self.sampler.draw(logits, _of_rows(rows.limits, request), draws)
        tokens, row = _table(drawn, request, offset, tuple(counts))
        is_draft = torch.from_numpy(offsets < counts[requests] - 1).to(logits.device)
        drafts, _ = _table(metadata.draft_token_ids, request[is_draft], offset[is_draft], tuple(counts))
        follows = torch.ones_like(tokens, dtype=torch.bool)
        follows[:, 1:] = (tokens == drafts)[:, :-1].cumprod(1)  # the draft before it is what was drawn
        new = follows & tokens.ne(NOTHING)
        sampled = ~self.sampler.runner.discard_request_mask.np[: len(counts)]
        counted = new[request, offset].cpu().numpy() & sampled[requests]
        self.sampler.count_removed(mass, counted)
        first = np.flatnonzero(offsets == 0)
        tokens_now = lengths[first] + np.add.reduceat(counted, first, dtype=np.int64)
        prompts = self.sampler.prompt_lengths(len(counts))
        self.sampler.count_tokens(rows.tickets, tokens_now - prompts, sampled)
        at = row.flatten()
        recorded = LogprobsTensors(
            recorded.logprob_token_ids[at], recorded.logprobs[at], recorded.selected_token_ranks[at]
        )
        return SamplerOutput(tokens.where(new, NOTHING), recorded)


def install(runner: Any, settings: DrawSettings) -> None:
    """Make ``runner`` sample as ``sampler.install`` does, with speculation if vLLM was started with it."""
    sampler.install(runner, settings)
    if runner.speculative_config is not None:
        import numba  # not before vLLM has started: it stumbles over llvmlite (``lifecycle.LLVMLITE``)

        numba.get_num_threads()  # starts Numba's threads, which sets torch's; ``contained`` restores these
        before = runner.rejection_sampler
        stock = before.stock if isinstance(before, SpeculativeSampler) else before
        stock.sampler = runner.sampler
        runner.rejection_sampler = SpeculativeSampler(runner.sampler, stock)


def _of_rows(limits: Limits, request: Tensor) -> Limits:
    """Return the parameters of each row; ``request`` [rows] int64 is the number of its request. Recipes with
    drafts have no min-p."""
    top_k, top_p = (None if each is None else each[request] for each in (limits.top_k, limits.top_p))
    return Limits(limits.temperature[request], top_k, top_p, lambda logits: logits, limits.most_kept)


def _table(values: Tensor, request: Tensor, offset: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return [requests, most rows of a request] int32 ``values`` and int64 indices into them; NOTHING and 0
    where there are none."""
    shape = len(counts), max(counts)
    table = torch.full(shape, NOTHING, dtype=torch.int32, device=values.device)
    row = torch.zeros(shape, dtype=torch.int64, device=values.device)
    table[request, offset] = values.to(torch.int32)
    row[request, offset] = torch.arange(len(values), device=values.device)
    return table, row
