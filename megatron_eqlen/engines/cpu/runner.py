"""vLLM's engine on CPUs, with what its V2 model runner has on GPUs: draws by seed and position, sampling
masks and routes, in the same fields of its outputs (vLLM 0.32, V1 model runner)."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_eqlen.engines.cpu.norms import choose_kernels
from megatron_eqlen.engines.cpu.routes import RouteCapture
from megatron_eqlen.engines.cpu.sampler import PathSampler


class ReferenceWorker(CPUWorker):
    """vLLM's worker with ``PathSampler``, kernels of RMS norms and, with ``rollout.keep_routes``, routes."""

    routes: RouteCapture | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        choose_kernels()
        started: Any = self.vllm_config.additional_config
        self.sampler = PathSampler(self.model_runner, bool(started["keep_sampling_mask"]))
        self.model_runner.sampler = self.sampler
        if started["keep_routes"]:
            self.routes = RouteCapture(self.model_runner)

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self.model_runner.execute_model_state is None:  # nothing was computed
            return super().sample_tokens(grammar_output)
        routes = None if self.routes is None else self.routes.take()
        # vLLM rewinds another client's generator after a part of a prefill, which CPU generators cannot: so
        # such a row, whose token is not used, draws without it.
        batch = self.model_runner.input_batch
        partial = np.flatnonzero(self.model_runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        kept = {row: batch.generators.pop(row) for row in partial if row in batch.generators}
        output: Any = super().sample_tokens(grammar_output)
        batch.generators.update(kept)
        output.aux_output_connector_output = routes
        output.sampling_masks = self.sampler.masks
        return output


class ReferenceScheduler(Scheduler):
    """vLLM's scheduler, with masks and routes in its outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        started: Any = self.vllm_config.additional_config
        self.return_sampling_mask = bool(started["keep_sampling_mask"])

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        of_clients = super().update_from_output(scheduler_output, model_runner_output)
        routes: Any = model_runner_output.aux_output_connector_output
        if routes is not None:
            for output in (output for outputs in of_clients.values() for output in outputs.outputs):
                if output.new_token_ids:
                    output.routed_experts = routes.of(output.request_id)
        return of_clients
