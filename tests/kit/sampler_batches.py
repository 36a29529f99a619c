"""Inputs of vLLM's sampler, as its model runner makes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MinPLogitsProcessor


def batch(requests: dict[str, SamplingParams], vocabulary: int, device: str = "cpu") -> tuple[Any, Any]:
    """Return the input of vLLM's sampler from its model runner: (runner, metadata).

    The number of tokens of a request is its place. To vLLM, top-k that is off has the vocabulary's size; no
    tensor is passed for a limit that is off for all.
    """
    params = list(requests.values())
    runner = SimpleNamespace(
        device=device,
        requests={name: SimpleNamespace(sampling_params=request) for name, request in requests.items()},
        input_batch=SimpleNamespace(
            req_ids=list(requests),
            num_tokens_no_spec=np.arange(len(params)),
            num_prompt_tokens=np.zeros(len(params), np.int64),
        ),
        discard_request_mask=SimpleNamespace(np=np.zeros(len(params), bool)),
    )
    top_k = [param.top_k if param.top_k > 0 else vocabulary for param in params]
    top_p = [param.top_p for param in params]
    metadata = SimpleNamespace(
        temperature=torch.tensor([param.temperature for param in params], device=device),
        top_p=torch.tensor(top_p, device=device) if min(top_p) < 1 else None,
        top_k=torch.tensor(top_k, dtype=torch.int32, device=device) if min(top_k) < vocabulary else None,
        logitsprocs=SimpleNamespace(argmax_invariant=[_min_p(params, device)]),
    )
    return runner, metadata


def _min_p(params: list[SamplingParams], device: str) -> MinPLogitsProcessor:
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(params)))
    processor = MinPLogitsProcessor(config, torch.device(device), is_pin_memory=False)
    added: Any = [(row, param, None, []) for row, param in enumerate(params)]
    processor.update_state(BatchUpdate(batch_size=len(params), removed=[], added=added, moved=[]))
    return processor
