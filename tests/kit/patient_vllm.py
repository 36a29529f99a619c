"""Changes to vLLM for machines whose cores the tests share; processes that a zygote forks have them.

On CPUs vLLM's processes poll shared memory without a pause while they wait for each other, and a model's
class is inspected in a process that imports vLLM once more. On GPUs ranks meet in NCCL, here in gloo. Each
worker looks through all modules for kernels that it replaces; they are replaced here, once. The ranks of
log-probs, the experts of groups and a worker's share of tokens are found by functions that would be
compiled, in 15 s each on a fresh machine. torch takes 30 ns for each product of two fp8 numbers: here they
become float32 first. An engine sets up its loggers, each of which empties the caches of all: they are set
up here as ``quiet`` has them. The template of a run's page is compiled here, too. vLLM leaves a port free
between its choice and the start of the listener; here it is held, since another test may be given it.
"""

import time

import torch
from vllm.config.logging import LoggingConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.logger import configure_logging
from vllm.model_executor.layers import vocab_parallel_embedding as embedding
from vllm.model_executor.layers.fused_moe.router import grouped_topk_router
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.sample import sampler

from megatron_eqlen.report import page
from tests.kit.servers import free_ports

torch._scaled_mm = lambda a, b, scale_a, scale_b, out_dtype, bias=None: (
    a.float() @ b.float() * scale_a * scale_b + (0 if bias is None else bias)
).to(out_dtype)
shm_broadcast.sched_yield = lambda: time.sleep(0.002)
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
sampler.batched_count_greater_than = sampler.batched_count_greater_than._torchdynamo_orig_callable
grouped_topk_router.grouped_topk = grouped_topk_router.grouped_topk._torchdynamo_orig_callable
embedding.get_masked_input_and_mask = embedding.get_masked_input_and_mask._torchdynamo_orig_callable
registry._run_in_subprocess = lambda function: function()
current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
for executor in (multiproc_executor, uniproc_executor):
    executor.get_open_port = lambda: free_ports(1)[0]
configure_logging(LoggingConfig(log_level="ERROR"))
page._environment().get_template("page.html.jinja")
