"""A decode step's sampling on made-up logits of Qwen3's vocabulary, one table line for each batch size.

``all``: log-softmax, then masks, sums and draws over the whole vocabulary. ``top-k first``: the same draws
from the tokens of top-k alone. ``log-softmax``: what both need.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MinPLogitsProcessor

from megatron_eqlen.rollout.engine import SEED
from megatron_eqlen.rollout.vllm.engine import sampler
from megatron_eqlen.rollout.vllm.engine.draws import DrawSettings
from tools.benchmarks.clock import fastest
from tools.benchmarks.table import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    title = f"ms a step, top-k {args.top_k}, top-p {args.top_p}, {args.vocabulary} logits a row"
    show([measure(rows, args) for rows in args.rows], title, args.json)


def measure(rows: int, args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, args.vocabulary, generator=generator).to(device, torch.bfloat16)
    limits = {"top_k": args.top_k, "top_p": args.top_p, "temperature": 0.6}
    requests = {str(row): SamplingParams(extra_args={SEED: row}, **limits) for row in range(rows)}
    runner, metadata = batch(requests, args.vocabulary, device)
    path_sampler = sampler.PathSampler(runner, DrawSettings(processed=False))
    top_k_first = 1e3 * fastest(lambda: path_sampler.forward(logits, metadata), args.repeats)
    with mock.patch.object(sampler, "TIES", args.vocabulary):
        plain = sampler.PathSampler(runner, DrawSettings(processed=False))
        everything = 1e3 * fastest(lambda: plain.forward(logits, metadata), args.repeats)
    return {
        "rows": rows,
        "all": everything,
        "top-k first": top_k_first,
        "log-softmax": 1e3 * fastest(lambda: logits.float().log_softmax(-1), args.repeats),
        "all / top-k first": everything / top_k_first,
    }


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
