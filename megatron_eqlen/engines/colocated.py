"""vLLM in the training process: the same GPUs (or CPU) generate and train in turns.

Each group of ``rollout.tensor_parallel`` ranks is one replica, whose ranks must make the same calls in the
same order. While training runs, ``sleep`` has given the GPU memory back and dropped the weights: every
harvest starts with new ones. Requests go directly to the engine core of vLLM 0.32's V1 engine: a
harvest needs no output objects and no detokenization.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_eqlen.engines.containment import importing_vllm
from megatron_eqlen.engines.protocol import (
    OURS,
    STOCK,
    EngineError,
    Request,
    of_kept,
    sampling_params,
    seeded,
    split_path,
)
from megatron_eqlen.engines.weight_table import WeightTable
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.types import Delta, Metrics, TokenTree

with importing_vllm():
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.request import Request as VllmRequest

    from megatron_eqlen.engines import lifecycle


class ColocatedEngine:
    """An ``Engine`` (see there) around vLLM in this process. ``model_path``: a Hugging Face folder, whose
    weights are version 0. ``seed``: vLLM's own; draws come from ``submit``'s."""

    def __init__(
        self,
        model_path: str | Path,
        rollout: RolloutRecipe,
        dtype: str,
        eos_token_ids: Collection[int],
        max_model_len: int,
        seed: int = 0,
    ) -> None:
        # a folder that does not fit fails here, before vLLM starts
        self.weights = WeightTable.read(model_path)
        self.core = lifecycle.build(str(model_path), rollout, dtype, max_model_len, seed)
        self.eos_token_ids = eos_token_ids
        self.sample_as(rollout)
        self.vocab_size = self.core.vllm_config.model_config.get_vocab_size()
        self.max_model_len = max_model_len
        self.max_num_seqs = rollout.max_num_seqs
        self.moe_layers = read_config(model_path).moe_layers
        self.policy_version = 0
        self.stock = STOCK if self.core.vllm_config.use_v2_model_runner else "vLLM V1"
        """Name of vLLM's own sampler in this engine."""
        self.requests: dict[str, VllmRequest] = {}
        self.numbers = itertools.count()
        """Numbers that make vLLM's names of requests unique. With asynchronous scheduling, vLLM's default on
        GPUs, an aborted request may still have a token to come, which another of its name would get."""
        self.refusal: str | None = None
        """Why requests are refused now: weights are missing or half loaded."""
        self.asleep = False
        self.preemptions = 0
        """Number of requests pushed out of the KV cache since the last ``metrics``."""
        self.sync: Metrics = {}

    def submit(self, request: Request) -> None:
        if self.refusal is not None:
            raise EngineError(f"request {request.request_id}: {self.refusal}")
        assert request.request_id not in self.requests
        # the first request after a sync brings back the KV cache: until then its memory was free for the sync
        if self.asleep:
            self._wake("kv_cache")
            self.asleep = False
        params = self.params.clone()
        params.max_tokens = request.max_tokens
        params.routed_experts_prompt_start = request.path_start
        for name, value in seeded(request.seed, self.stock).items():
            setattr(params, name, value)
        # token ids go in as they are: no tokenizer, images or adapter takes part
        asked = EngineCoreRequest(
            request_id=f"{request.request_id} {next(self.numbers)}",
            prompt_token_ids=request.token_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=request.request_id,
        )
        # vLLM's own object of the request, which counts its preemptions until the end
        vllms_own, wave = self.core.preprocess_add_request(asked)
        self.core.add_request(vllms_own, wave)
        self.requests[request.request_id] = vllms_own

    def step(self) -> list[Delta]:
        """Run one engine step. Raises EngineError if the engine ended a request with an error."""
        of_clients, computed = self.core.step_fn()
        self.core.post_step(model_executed=computed)
        # this process is vLLM's client 0
        ours = of_clients.get(0) if of_clients else None
        deltas = [self._delta(output) for output in ours.outputs] if ours else []
        for delta in deltas:
            if delta.finish_reason is not None:
                self.preemptions += self.requests.pop(delta.request_id).num_preemptions
        return deltas

    def abort(self, request_ids: Iterable[str]) -> None:
        # ids that have ended are unknown here; vLLM knows the others by names with our number
        mine = [self.requests.pop(request_id) for request_id in request_ids if request_id in self.requests]
        if mine:
            self.core.abort_requests([request.request_id for request in mine])
        self.preemptions += sum(request.num_preemptions for request in mine)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def sample_as(self, rollout: RolloutRecipe) -> None:
        self.params = SamplingParams(**sampling_params(rollout, self.eos_token_ids), max_tokens=1)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        if self.requests:
            raise EngineError(f"update_weights: {len(self.requests)} requests are unfinished")
        start = time.perf_counter()
        # set before: it stays if anything below raises
        self.refusal = "the last weight update failed half way; update_weights must succeed first"
        lifecycle.load_weights(self.core, self.weights.check(named_tensors))
        self.reset_cache()
        self.refusal = None
        self.policy_version = policy_version
        self.sync = {
            "engine/sync_seconds": time.perf_counter() - start,
            "engine/sync_bytes": self.weights.bytes_seen,
        }

    def probe(self) -> list[TokenTree]:
        return []

    def reset_cache(self) -> None:
        if not self.core.reset_prefix_cache():
            raise EngineError("the prefix cache is still in use: requests were left unfinished")

    def sleep(self) -> None:
        if self.requests:
            raise EngineError(f"sleep: {len(self.requests)} requests are unfinished")
        self.refusal = "sleep dropped the weights; wake and update_weights must come first"
        self.asleep = True
        if not current_platform.is_cpu():
            self.core.sleep(level=2)

    def wake(self) -> None:
        """Take memory for the weights only; the KV cache takes its own later, with the first request."""
        self._wake("weights")

    def close(self) -> None:
        lifecycle.close(self.core)

    def metrics(self) -> Metrics:
        metrics: Metrics = {"engine/preemptions": self.preemptions, **self.sync}
        self.preemptions, self.sync = 0, {}
        return metrics

    def _wake(self, tag: str) -> None:
        if not current_platform.is_cpu():
            self.core.wake_up(tags=[tag])

    def _delta(self, output: EngineCoreOutput) -> Delta:
        # without the number that `submit` has appended
        request_id = output.request_id.rpartition(" ")[0]
        reason: Any = None if output.finish_reason is None else str(output.finish_reason)
        if reason not in ("stop", "length", None):
            raise EngineError(f"request {request_id}: vLLM ended it with {reason}")
        chosen = output.new_logprobs
        path: dict[str, np.ndarray] = {}
        columns: dict[str, Any] = {"logprobs": chosen.logprobs[:, 0].tolist() if chosen else []}
        if output.new_sampling_mask is not None:
            columns["kept"] = output.new_sampling_mask.to_nested_list()
        if self.params.logprobs and chosen:  # of kept tokens, too
            pairs = zip(chosen.logprob_token_ids.tolist(), chosen.logprobs.tolist(), strict=True)
            columns["kept_logprobs"] = of_kept(columns["kept"], [dict(zip(*of, strict=True)) for of in pairs])
        if output.routed_experts is not None:
            new = len(output.new_token_ids)
            path["routes"], columns["routes"] = split_path(output.routed_experts, new, self.moe_layers)
        return Delta(
            request_id,
            output.new_token_ids,
            columns,
            reason,
            output.prefill_stats.num_cached_tokens if output.prefill_stats else None,
            sampler=self.stock if chosen and max(chosen.sampled_token_ranks.tolist()) else OURS,
            path=path,
        )
