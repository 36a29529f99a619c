"""Everything that depends on vLLM's version: written for vLLM 0.31, its V1 engine and V1 model runner.

The rest of the package sees four things: ``build`` (an in-process engine that leaves the training process
as it found it), ``submit`` / ``step`` / ``abort`` (straight to the engine core, past request outputs and
detokenization that a harvest has no use for), ``load_weights`` (with what the CPU backend forgets), and
``PathSampler`` (log-probs at the recipe's temperature, a draw fixed by seed and position).
"""

# ruff: noqa: E402 (vLLM reads and sets environment variables when it is imported)
from __future__ import annotations

import gc
import json
import logging
import os
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_trainers_environ = dict(os.environ)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.request import Request
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from megatron_eqlen import layout
from megatron_eqlen.models.hf_config import read_config
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.rollout.engine import SEED, Delta, EngineError
from megatron_eqlen.types import SamplingMask

logger = logging.getLogger(__name__)


def _restore_environ(environ: dict[str, str]) -> dict[str, str]:
    """Set the environment back, but for vLLM's own variables; returns what that undid."""
    undone = {
        name: value
        for name, value in os.environ.items()
        if environ.get(name) != value and not name.startswith("VLLM_")
    }
    for name in undone:
        del os.environ[name]
    os.environ.update(environ | {name: os.environ[name] for name in os.environ if name.startswith("VLLM_")})
    return undone


_vllms_environ = _restore_environ(_trainers_environ)
"""What importing vLLM set (compiler caches and threads); in force only while vLLM builds."""

LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this silently."""

_live_engines = 0
_owns_process_group = False


@contextmanager
def contained() -> Iterator[None]:
    """Undo what vLLM does to its process while it builds a model: it replaces ``torch.set_num_threads``,
    seeds every generator, and sets environment variables, default dtype and precision. vLLM's own
    variables (``VLLM_*``) stay; it reads them later."""
    environ = dict(os.environ)
    os.environ.update(_vllms_environ)
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # restored at the end
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        for device, state in enumerate(cuda_states):
            torch.cuda.set_rng_state(state, device)
        _restore_environ(environ)


def build(model_path: str, rollout: RolloutRecipe, dtype: str, max_model_len: int, seed: int) -> LLM:
    """An in-process engine. Where torch.distributed is initialized, every rank must call this: groups of
    ``rollout.tensor_parallel`` neighbouring ranks become one replica each (vLLM's external launcher)."""
    global _live_engines, _owns_process_group
    launched = dist.is_initialized() and not _owns_process_group
    ranks = dist.get_world_size() if launched else 1
    layout.require(layout.replicas(rollout, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    layout.require(layout.engine(rollout, read_config(model_path)))
    cpu = current_platform.is_cpu()
    kv_gib = rollout.kv_cache_gib or (1.0 if cpu else None)
    dtype = _supported_dtype(model_path, dtype)
    with contained():
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # PathSampler is written for V1's
        if launched:
            os.environ["RANK"] = str(dist.get_rank())
            os.environ.setdefault("LOCAL_RANK", "0" if cpu else str(torch.cuda.current_device()))
            os.environ.setdefault("MASTER_ADDR", "localhost")  # asked for, not used: the group exists
            os.environ.setdefault("MASTER_PORT", "0")
        else:
            _owns_process_group = True
        try:
            llm = LLM(
                model_path,
                dtype=dtype,
                seed=seed,
                skip_tokenizer_init=True,
                max_model_len=max_model_len,
                max_num_seqs=rollout.max_num_seqs,
                max_num_batched_tokens=rollout.max_num_batched_tokens,
                block_size=rollout.block_size,
                enable_prefix_caching=True,
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                kv_cache_memory_bytes=int(kv_gib * 2**30) if kv_gib else None,
                tensor_parallel_size=rollout.tensor_parallel,
                distributed_executor_backend="external_launcher" if launched else "uni",
                enforce_eager=cpu,
                enable_sleep_mode=not cpu,
                use_tqdm_on_load=False,
                generation_config="vllm",
            )
        except ValueError as error:
            raise ValueError(
                f"vLLM does not start with rollout.kv_cache_gib {kv_gib}, rollout.gpu_memory_utilization "
                f"{rollout.gpu_memory_utilization} and paths of {max_model_len} tokens: {error}"
            ) from error
        llm.llm_engine.engine_core._finalizer.detach()  # ``close`` does it
        runner = _worker_runner(llm)
        runner.sampler = PathSampler(runner, rollout.logprobs_mode == "processed", rollout.mask_width)
    _live_engines += 1
    return llm


def _supported_dtype(model_path: str, dtype: str) -> str:
    """vLLM's Gated DeltaNet on CPUs has a bfloat16 kernel and no other."""
    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    if current_platform.is_cpu() and config["model_type"] == "qwen3_next" and dtype != "bfloat16":
        logger.warning("%s: vLLM rolls qwen3_next out in bfloat16 on CPUs, not in %s", model_path, dtype)
        return "bfloat16"
    return dtype


def close(llm: LLM) -> None:
    """Stop the engine; with the last one, take down vLLM's process groups and no others (its own
    shutdown would take down the trainer's too)."""
    global _live_engines, _owns_process_group
    core = llm.llm_engine.engine_core.engine_core
    with contained():
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()
        _live_engines -= 1
        if _live_engines:
            return
        parallel_state.destroy_model_parallel()
        if _owns_process_group:
            parallel_state.destroy_distributed_environment()
            _owns_process_group = False
        elif parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None


def sampling_params(rollout: RolloutRecipe, eos_token_ids: Iterable[int]) -> SamplingParams:
    """The recipe's sampling; ``submit`` adds what differs between requests."""
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=max(rollout.top_k, 0),
        min_p=rollout.min_p,
        stop_token_ids=sorted(eos_token_ids),
        logprobs=0,
        detokenize=False,
        max_tokens=1,
    )


def submit(
    llm: LLM, request_id: str, token_ids: list[int], params: SamplingParams, max_tokens: int, seed: int
) -> Request:
    """Hand a request to the engine core, which keeps the result up to date. The caller has checked the
    ids and the length."""
    params = params.clone()
    params.max_tokens = max_tokens
    params.extra_args = {SEED: seed}
    asked = EngineCoreRequest(
        request_id=request_id,
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
    core = llm.llm_engine.engine_core.engine_core
    request, wave = core.preprocess_add_request(asked)
    core.add_request(request, wave)
    return request


def step(llm: LLM) -> list[Delta]:
    """One engine step. Raises EngineError where the engine failed a request by itself."""
    deltas = []
    for output in llm.llm_engine.engine_core.get_output().outputs:
        reason = output.finish_reason
        if reason is not None and reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise EngineError(f"request {output.request_id}: vLLM ended it with {reason}")
        chosen = output.new_logprobs
        deltas.append(
            Delta(
                output.request_id,
                output.new_token_ids,
                chosen.logprobs[:, 0].tolist() if chosen else [],
                None if reason is None else str(reason),
                _sampling_mask(chosen.logprob_token_ids) if chosen else None,
                output.prefill_stats.num_cached_tokens if output.prefill_stats else None,
            )
        )
    return deltas


def _sampling_mask(columns: np.ndarray) -> SamplingMask | None:
    """From ``PathSampler``'s [tokens, 1 + width]; None where it records no mask."""
    if columns.shape[1] == 1:
        return None
    return [tuple(sorted(set(row))) for row in columns.tolist()]


def abort(llm: LLM, request_ids: list[str]) -> None:
    llm.llm_engine.engine_core.abort_requests(request_ids)


def load_weights(llm: LLM, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Stream weights into the running model (vLLM's layerwise reload) and forget all cached prefixes.
    A stream that raises leaves some layers stale or void, but a model that can be loaded again."""
    runner = _worker_runner(llm)
    with contained():
        try:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors})
        finally:  # does nothing after a reload that came to its end
            with set_current_vllm_config(runner.vllm_config):
                finalize_layerwise_reload(runner.get_model(), runner.model_config)
        repack(runner.get_model())
    reset_cache(llm)


def repack(model: nn.Module) -> list[str]:
    """Prepack again what a reload leaves stale on the CPU backend: the kernels of experts, and an output
    layer tied to the embeddings. Returns the names of the modules concerned; nothing to do elsewhere."""
    if not current_platform.is_cpu():
        return []
    done = []
    for name, module in model.named_modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
            done.append(name)
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if None not in (head, embedding) and head is not embedding and head.weight is embedding.weight:
        head.quant_method.process_weights_after_loading(head)
        done.append("lm_head")
    return done


def reset_cache(llm: LLM) -> None:
    if not llm.reset_prefix_cache():
        raise EngineError("the prefix cache is still in use: requests were left unfinished")


def sleep(llm: LLM) -> None:
    """Drop weights and KV cache from the GPU; the CPU engine has no other place to put its memory."""
    if not current_platform.is_cpu():
        llm.sleep(level=2)


def wake(llm: LLM, tag: str) -> None:
    """Take back the memory of ``weights`` or of the ``kv_cache``."""
    if not current_platform.is_cpu():
        llm.wake_up(tags=[tag])


def vocab_size(llm: LLM) -> int:
    return llm.model_config.get_vocab_size()


def removed_mass(llm: LLM) -> tuple[float, int]:
    """Probability mass that top-k, top-p and min-p removed, summed over the sampled tokens, and how many."""
    sampler = _worker_runner(llm).sampler
    assert isinstance(sampler, PathSampler)
    return sampler.take_removed_mass()


@contextmanager
def stock_sampler(llm: LLM) -> Iterator[None]:
    """vLLM's own sampler in place of ours: what benchmarks compare with."""
    runner = _worker_runner(llm)
    ours, runner.sampler = runner.sampler, Sampler()
    try:
        yield
    finally:
        runner.sampler = ours


def _worker_runner(llm: LLM) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@dataclass
class _Rows:
    """What the sampler keeps while the batch's requests stay the same."""

    metadata: SamplingMetadata
    seeds: np.ndarray | None
    """[rows] uint64; None where a row has no seed."""


class PathSampler(Sampler):
    """Samples a batch so that token t of a path depends on the logits, its seed and t alone.

    vLLM's own per-request generators are drawn from one request at a time, consume the training process's
    generator as well, and start over when a request is submitted again; and it has no log-prob mode for
    the temperature alone. Here one uniform number per row, a hash of (seed, t), picks the token by the
    inverse of the cumulative distribution.

    Log-probs are ``log_softmax(logits / temperature)`` at the token; ``processed`` ones are normalized
    over the kept set instead: greater by minus the log of the kept mass.

    With ``mask_width`` the kept set travels where vLLM puts the ids of the most likely tokens: the drawn
    token, then ``mask_width`` kept ones, the drawn one again in place of those that are not there.
    """

    def __init__(self, runner: Any, processed: bool, mask_width: int = 0) -> None:
        super().__init__()
        self.runner = runner
        self.processed = processed
        self.mask_width = mask_width
        self.rows: _Rows | None = None
        self.removed = torch.zeros((), dtype=torch.float64, device=runner.device)
        self.sampled = 0

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """``logits`` [rows, vocabulary], any float dtype."""
        draw = self._uniform(sampling_metadata, len(logits))
        if draw is None:  # vLLM's own dummy run, or a request of somebody else's to a server
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        logits = logits.float() / sampling_metadata.temperature.unsqueeze(1)
        logprobs = logits.log_softmax(-1)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:  # min-p
            logits = processor.apply(logits)
        logits = apply_top_k_top_p(logits, sampling_metadata.top_k, sampling_metadata.top_p)
        kept = torch.where(logits > -torch.inf, logprobs, -torch.inf).exp()
        if self.mask_width:  # of equal logits at the border top-k keeps all
            masses, ids = kept.topk(min(self.mask_width, kept.shape[1]))
            kept = torch.zeros_like(kept).scatter(1, ids, masses)
        cumulative = kept.cumsum(-1, dtype=torch.float64)
        mass = cumulative[:, -1:]
        draws = torch.from_numpy(draw).to(logits.device, non_blocking=True)
        tokens = torch.searchsorted(cumulative, draws.unsqueeze(1) * mass, right=True)
        logprobs = logprobs.gather(1, tokens)
        if self.processed:
            logprobs = logprobs - mass.log().float()
        self._count_removed(mass.squeeze(1))
        columns = tokens
        if self.mask_width:
            columns = torch.cat((tokens, torch.where(masses > 0, ids, tokens)), 1)
            logprobs = logprobs.expand(-1, columns.shape[1])  # of the drawn token; nobody reads the others
        tokens, columns = tokens.to(torch.int32), columns.to(torch.int32)
        ranks = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)  # nobody asks for them
        return SamplerOutput(tokens, LogprobsTensors(columns, logprobs.contiguous(), ranks))

    def take_removed_mass(self) -> tuple[float, int]:
        total = float(self.removed), self.sampled
        self.removed.zero_()
        self.sampled = 0
        return total

    def _uniform(self, metadata: SamplingMetadata, rows: int) -> np.ndarray | None:
        """[rows] float64 in [0, 1): a hash of each row's seed and path length; None where one has no seed."""
        if self.rows is None or self.rows.metadata is not metadata:
            self.rows = _Rows(metadata, self._seeds(rows))
        if self.rows.seeds is None:
            return None
        lengths = self.runner.input_batch.num_tokens_no_spec[:rows]
        return uniform(self.rows.seeds, lengths.astype(np.uint64))

    def _seeds(self, rows: int) -> np.ndarray | None:
        """[rows] uint64"""
        requests = [self.runner.requests[request_id] for request_id in self.runner.input_batch.req_ids]
        seeds = [(request.sampling_params.extra_args or {}).get(SEED) for request in requests]
        return np.array(seeds, dtype=np.uint64) if len(seeds) == rows and None not in seeds else None

    def _count_removed(self, mass: Tensor) -> None:
        """``mass`` [rows] float64. Rows in the middle of their prefill are sampled for nothing."""
        counted = ~self.runner.discard_request_mask.np[: len(mass)]
        if not counted.all():
            mass = mass[torch.from_numpy(counted).to(mass.device)]
        self.removed += (1 - mass).clamp(min=0).sum()
        self.sampled += int(counted.sum())


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) that only ``seeds`` and ``positions`` (both uint64, same shape) determine:
    splitmix64's finalizer applied twice, upper 32 bits."""
    with np.errstate(over="ignore"):
        state = _mix(_mix(seeds) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
