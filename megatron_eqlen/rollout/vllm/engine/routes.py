"""Expert choices of vLLM's MoE layers: from their routers to the outputs of each request, token by token.

    worker      routers ─► buffer of a step ─► slots, one for each place in the KV cache
                              └─► each request's newest row, and from the slots the rows of its prompt
    scheduler   ─► ``EngineCoreOutput.routed_experts`` of each request, with its new token
    server      ─► an event's ``routed_experts``

vLLM 0.32's own ``enable_return_routed_experts`` does all this in its V2 model runner, except that a server
keeps rows until a request ends; a harvest aborts most requests, and loses others with their server. So
``RoutesWorker`` and ``scheduler`` are for V1, ``stream_routes`` for the servers of both.

A cached prefix is not computed again, so its rows are kept beside its keys and values: in slots, by the same
block table. A request that may read the one may read the other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.block_table import SlotMappingMode

Routes = np.ndarray
"""[positions, layers, top_k], of all layers of the model: zeros where one has no experts."""

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


@dataclass
class StepRoutes:
    """Routes of one step, passed from the worker to the scheduler."""

    newest: Routes
    """[requests, layers, top_k] routes of each request's newest position, which predicted its new
    token."""
    index: dict[str, int]
    """Index of each request in ``newest``."""
    prompts: dict[str, Routes]
    """Rows that requests asked for (``routed_experts_prompt_start``) and that got their first token now."""

    def of(self, request_id: str) -> Routes:
        """Return a request's rows: the ones it asked for, then the newest."""
        number = self.index[request_id]
        row = self.newest[number : number + 1]
        prompt = self.prompts.get(request_id)
        return row if prompt is None else np.concatenate([prompt, row])


# ---- worker ----------------------------------------------------------------------------------------------


class RouteCapture:
    """Captures a model runner's routes. Made after the model is loaded and before CUDA graphs are captured:
    they contain the copies into vLLM's buffer."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.seconds = 0.0
        """Engine seconds spent copying and sorting rows."""
        self.capturer = RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        bind_routed_experts_capturer(runner.get_model(), self.capturer)
        self.slots: Routes | None = None

    def take_seconds(self) -> float:
        taken, self.seconds = self.seconds, 0.0
        return taken

    def begin(self) -> PendingRoutes:
        """Start copying the rows of the step that was computed last. Their slots are looked up at once: the
        next step may be prepared before the rows have arrived."""
        start = time.perf_counter()
        batch, count = self.runner.input_batch, self.runner.input_batch.num_reqs
        ends = self.runner.query_start_loc.np[: count + 1].astype(np.int64)
        scheduled, total = np.diff(ends), int(ends[-1])
        rows = self.capturer.snapshot_routing_data(total)
        copied = None
        if rows.is_cuda:
            rows = rows.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        requests = np.repeat(np.arange(count), scheduled)
        positions = np.arange(total) - ends[requests] + batch.num_computed_tokens_cpu[requests]
        pending = PendingRoutes(
            self,
            rows,
            copied,
            self._slots_of(requests, positions),
            newest=ends[1:] - 1,
            index=dict(batch.req_id_to_index),
            asked={name: self._slots_of(number, path) for name, number, path in self._asked()},
        )
        self.seconds += time.perf_counter() - start
        return pending

    def _asked(self) -> list[tuple[str, int, np.ndarray]]:
        """Return (id, number in the batch, positions) of the requests that get their first token now and
        asked for rows of their path."""
        batch, count = self.runner.input_batch, self.runner.input_batch.num_reqs
        first = batch.num_tokens_no_spec[:count] == batch.num_prompt_tokens[:count]
        found = []
        for number in np.flatnonzero(first & ~self.runner.discard_request_mask.np[:count]).tolist():
            name = batch.req_ids[number]
            params = self.runner.requests[name].sampling_params
            assert params is not None, "requests of pooling models have none"
            newest = int(batch.num_prompt_tokens[number]) - 1
            if params.routed_experts_prompt_start < newest:
                found.append((name, number, np.arange(params.routed_experts_prompt_start, newest)))
        return found

    def _slots_of(self, requests: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Return [n] int64 slots, by the block table of the first layers that keep keys and values by
        position."""
        tables = self.runner.input_batch.block_table.block_tables
        table = next(
            candidate
            for candidate in tables
            if candidate.slot_mapping_mode == SlotMappingMode.TOKEN_TO_KV_SLOT
        )
        if self.slots is None:
            places = self.runner.kv_cache_config.num_blocks * table.block_size
            dtype = np.dtype(self.capturer.output_dtype_name)
            self.slots = np.zeros(
                (places, *self.capturer.shape_per_token), dtype
            )  # takes memory when written
        blocks = table.block_table.np[requests, positions // table.block_size].astype(np.int64)
        return blocks * table.block_size + positions % table.block_size


@dataclass
class PendingRoutes:
    """Rows of a step on their way to the host."""

    capture: RouteCapture
    rows: torch.Tensor
    """[tokens of the step, layers, top_k]"""
    copied: Any
    """CUDA event of the copy; None if the rows are on the host already."""
    slots: np.ndarray
    """[tokens of the step] int64"""
    newest: np.ndarray
    """[requests] int64, index in the step of each request's newest position."""
    index: dict[str, int]
    asked: dict[str, np.ndarray]
    """Slots of the rows that each request asked for."""

    def finish(self) -> StepRoutes:
        """Return the step's routes. Call once for each step, in order."""
        if self.copied is not None:
            self.copied.synchronize()
        start, capture = time.perf_counter(), self.capture
        assert capture.slots is not None
        rows = self.rows.numpy()
        capture.slots[self.slots] = rows
        prompts = {name: capture.slots[slots] for name, slots in self.asked.items()}
        capture.seconds += time.perf_counter() - start
        return StepRoutes(rows[self.newest], self.index, prompts)


class RoutesWorker(PlatformWorker):
    """The platform's worker, with routes in its outputs."""

    routes: RouteCapture

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.routes = RouteCapture(self.model_runner)

    def sample_tokens(self, grammar_output: Any) -> Any:
        computed = self.model_runner.execute_model_state is not None
        pending = self.routes.begin() if computed and self._answers() else None
        output = super().sample_tokens(grammar_output)
        if pending is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _WithRoutes(output, pending)
        return _with_routes(output, pending)

    def _answers(self) -> bool:
        """Return True if this worker's outputs are read: in a server, only the first worker's are."""
        launched = self.parallel_config.distributed_executor_backend == "external_launcher"
        return launched or get_tp_group().rank_in_group == 0


class _WithRoutes(AsyncModelRunnerOutput):
    """An output whose tokens and routes are both still on their way to the host."""

    def __init__(self, output: AsyncModelRunnerOutput, pending: PendingRoutes) -> None:
        self.output, self.pending = output, pending

    def get_output(self) -> ModelRunnerOutput:
        return _with_routes(self.output.get_output(), self.pending)


def _with_routes(output: Any, pending: PendingRoutes) -> Any:
    output.aux_output_connector_output = pending.finish()
    return output


# ---- scheduler -------------------------------------------------------------------------------------------


def scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """Return the scheduler that vLLM would take, with routes in its outputs."""
    kind = AsyncRoutesScheduler if vllm_config.scheduler_config.async_scheduling else RoutesScheduler
    return kind(vllm_config, *args, **kwargs)


class RoutesScheduler(Scheduler):
    """vLLM's scheduler, with routes in its outputs."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        of_clients = super().update_from_output(scheduler_output, model_runner_output)
        routes: Any = model_runner_output.aux_output_connector_output
        for output in (output for outputs in of_clients.values() for output in outputs.outputs):
            if output.new_token_ids:
                output.routed_experts = routes.of(output.request_id)
        return of_clients


class AsyncRoutesScheduler(RoutesScheduler, AsyncScheduler):
    """The same with asynchronous scheduling."""


# ---- server ----------------------------------------------------------------------------------------------


def stream_routes() -> None:
    """Make this process, a server's first, send a request's rows with its tokens: vLLM would hold them back
    until the request ends."""
    new_completion, add = RequestState._new_completion_output, RequestOutput.add

    def with_rows(self: RequestState, *args: Any, **kwargs: Any) -> CompletionOutput:
        chunks, self.routed_experts_chunks = self.routed_experts_chunks, []
        output = new_completion(self, *args, **kwargs)
        output.routed_experts = np.concatenate(chunks) if chunks else None
        return output

    def add_rows(self: RequestOutput, next_output: RequestOutput, aggregate: bool) -> None:
        """Join the rows of outputs that nobody has fetched yet."""
        rows = [out.routed_experts for output in (self, next_output) for out in output.outputs]
        add(self, next_output, aggregate)
        if aggregate and (found := [routes for routes in rows if routes is not None]):
            (output,) = self.outputs
            output.routed_experts = np.concatenate(found)

    RequestState._new_completion_output = with_rows
    RequestOutput.add = add_rows
