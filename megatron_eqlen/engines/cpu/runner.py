"""vLLM's engine on CPUs, with what its V2 model runner has on GPUs: draws by seed and position, sampling
masks and routes, in the same fields of its outputs (vLLM 0.32, V1 model runner).

RMS norms take vLLM's CPU kernels, which its CPU platform does not choose: 22 µs in place of 139 for 64 rows
of 576 with a residual, float32, on one core without AVX-512.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import ir
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_eqlen.engines.cpu.routes import RouteCapture
from megatron_eqlen.engines.cpu.sampler import PathSampler

PROVIDER = "eqlen_cpu"
"""Name of the kernels of RMS norms."""
VECTOR = 16
"""Numbers that they read at once: a row holds whole vectors."""
ROUNDS = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
DTYPES = (torch.float32, torch.bfloat16) if ROUNDS else (torch.float32,)
"""Dtypes of their rows. Without AVX-512 they truncate to bfloat16 in place of rounding."""


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


def choose_kernels() -> None:
    """Make the engine of this process use the kernels of RMS norms where they apply."""
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        op.set_default([PROVIDER, "native"])


def _applies(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    same = weight is not None and weight.dtype == x.dtype and x.dtype in DTYPES
    return same and variance_size is None and x.shape[-1] % VECTOR == 0


def _applies_with_residual(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _applies(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


@ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_applies)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    x = x.contiguous()  # of queries, a part of a row
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


@ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_applies_with_residual, inplace=True)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
