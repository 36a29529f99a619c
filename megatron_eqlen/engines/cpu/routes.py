"""Expert choices of vLLM's MoE layers on CPUs, where vLLM's ``enable_return_routed_experts`` is missing.

    worker      routers ─► buffer of a step ─► slots, one for each place in the KV cache
                              └─► each request's newest row, and from the slots the rows of its prompt
    scheduler   ─► ``EngineCoreOutput.routed_experts`` of each request, with its new token

A cached prefix is not computed again, so its rows are kept beside its keys and values, in slots of the same
block table. A request that may read the one may read the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.worker.block_table import SlotMappingMode

Routes = np.ndarray
"""[positions, layers, top_k], of all layers of the model: zeros where one has no experts."""


@dataclass
class StepRoutes:
    """Routes of one step, passed from the worker to the scheduler."""

    newest: Routes
    """[requests, layers, top_k] routes of each request's newest position, which predicted its new token."""
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


class RouteCapture:
    """Captures a model runner's routes. Made after the model is loaded."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.capturer = RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        bind_routed_experts_capturer(runner.get_model(), self.capturer)
        self.slots: Routes | None = None

    def take(self) -> StepRoutes:
        """Return the routes of the last step. Call once a step, before its tokens are added to the batch."""
        batch, count = self.runner.input_batch, self.runner.input_batch.num_reqs
        # [requests + 1] bounds of each request's positions in this step
        ends = self.runner.query_start_loc.np[: count + 1].astype(np.int64)
        scheduled, total = np.diff(ends), int(ends[-1])
        rows = self.capturer.snapshot_routing_data(total).numpy()
        # [positions of the step] each: number of the request, and position on its path
        requests = np.repeat(np.arange(count), scheduled)
        positions = np.arange(total) - ends[requests] + batch.num_computed_tokens_cpu[requests]
        places = self._slots_of(requests, positions)
        assert self.slots is not None
        self.slots[places] = rows
        prompts = {name: self.slots[self._slots_of(number, path)] for name, number, path in self._asked()}
        return StepRoutes(rows[ends[1:] - 1], dict(batch.req_id_to_index), prompts)

    def _asked(self) -> list[tuple[str, int, np.ndarray]]:
        """Return (id, number in batch, positions) of requests that want rows and get a first token now."""
        batch, count = self.runner.input_batch, self.runner.input_batch.num_reqs
        # nothing generated yet, and the prefill ends with this step
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
        """Return [n] int64 slots, by the block table of the first layers with keys and values by position."""
        tables = self.runner.input_batch.block_table.block_tables
        table = next(t for t in tables if t.slot_mapping_mode == SlotMappingMode.TOKEN_TO_KV_SLOT)
        if self.slots is None:
            places = self.runner.kv_cache_config.num_blocks * table.block_size
            dtype = np.dtype(self.capturer.output_dtype_name)
            # takes memory when written
            self.slots = np.zeros((places, *self.capturer.shape_per_token), dtype)
        blocks = table.block_table.np[requests, positions // table.block_size].astype(np.int64)
        return blocks * table.block_size + positions % table.block_size
