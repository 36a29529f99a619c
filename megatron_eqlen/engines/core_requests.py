"""Requests sent directly to vLLM's engine core: a harvest needs no output objects and no detokenization.

Written for vLLM 0.32 and its V1 engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from megatron_eqlen.engines.protocol import (
    OURS,
    STOCK,
    Delta,
    EngineError,
    of_kept,
    path_start,
    sampler_of,
    seeded,
    split_path,
)

FINISHED: dict[FinishReason, Literal["stop", "length"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}
"""Finish reasons of completed requests."""


def submit(
    core: EngineCore,
    request_id: str,
    number: int,
    token_ids: list[int],
    params: SamplingParams,
    max_tokens: int,
    seed: int,
    path_rows: int = 0,
) -> Request:
    """Submit a request to the engine core and return its record, which ``step`` updates.

    ``number`` differs for each request of an engine and makes vLLM's name for it unique. With asynchronous
    scheduling, vLLM's default on GPUs, an aborted request may still have a token to come; a new request of
    the same name would get it.
    """
    params = params.clone()
    params.max_tokens = max_tokens
    params.routed_experts_prompt_start = path_start(token_ids, path_rows)
    for name, value in seeded(seed, stock_sampler(core)).items():
        setattr(params, name, value)
    asked = EngineCoreRequest(
        request_id=f"{request_id} {number}",
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=request_id,
    )
    request, wave = core.preprocess_add_request(asked)
    core.add_request(request, wave)
    return request


def stock_sampler(core: EngineCore) -> str:
    """Return the name of vLLM's own sampler in this engine."""
    return STOCK if core.vllm_config.use_v2_model_runner else "vLLM V1"


def step(core: EngineCore, layers: Sequence[int] = (), centered: bool = False) -> list[Delta]:
    """Run one engine step. ``layers``: the layers whose routes are kept. ``centered``: log-probs of the kept
    tokens are returned. Raises EngineError if the engine ended a request with an error."""
    stock = stock_sampler(core)
    deltas = []
    of_clients, computed = core.step_fn()
    core.post_step(model_executed=computed)
    ours = of_clients.get(0) if of_clients else None
    outputs = ours.outputs if ours else []
    for output in outputs:
        request_id = output.request_id.rpartition(" ")[0]
        reason = output.finish_reason
        if reason is not None and reason not in FINISHED:
            raise EngineError(f"request {request_id}: vLLM ended it with {reason}")
        chosen = output.new_logprobs
        path: dict[str, np.ndarray] = {}
        columns: dict[str, Any] = {"logprobs": chosen.logprobs[:, 0].tolist() if chosen else []}
        if output.new_sampling_mask is not None:
            columns["kept"] = output.new_sampling_mask.to_nested_list()
        if centered and chosen:
            pairs = zip(chosen.logprob_token_ids.tolist(), chosen.logprobs.tolist(), strict=True)
            columns["kept_logprobs"] = of_kept(columns["kept"], [dict(zip(*of, strict=True)) for of in pairs])
        if output.routed_experts is not None:
            new = len(output.new_token_ids)
            path["routes"], columns["routes"] = split_path(output.routed_experts, new, layers)
        deltas.append(
            Delta(
                request_id,
                output.new_token_ids,
                columns,
                None if reason is None else FINISHED[reason],
                output.prefill_stats.num_cached_tokens if output.prefill_stats else None,
                sampler=sampler_of(chosen.sampled_token_ranks.max(), stock) if chosen else OURS,
                path=path,
            )
        )
    return deltas
