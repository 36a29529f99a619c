"""What this package adds to a vLLM server: its sampler, and weights that arrive over HTTP.

Loaded inside the server's workers by ``--worker-extension-cls`` (see ``vllm_server.server_command``);
importing it registers the weight-transfer backend named ``BACKEND``.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_eqlen.rollout.vllm_compat import PathSampler, repack

BACKEND = "eqlen_http"


@dataclass
class Nothing(WeightTransferInitInfo):
    """No rendezvous: the bytes come with each request."""


@dataclass
class Chunk(WeightTransferUpdateInfo):
    tensors: str = ""
    """Some of the model's weights by Hugging Face name: a safetensors file, base64."""


class HttpWeightTransfer(WeightTransferEngine[Nothing, Chunk]):
    """vLLM's layerwise reload, fed chunk by chunk."""

    init_info_cls = Nothing
    update_info_cls = Chunk

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Chunk) -> None:
        self.model.load_weights(load(base64.b64decode(update_info.tensors)).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)

    def shutdown(self) -> None:
        pass


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, HttpWeightTransfer)


class WorkerExtension:
    """Methods for ``/collective_rpc``; mixed into vLLM's worker."""

    model_runner: Any
    model_config: Any

    def eqlen_setup(self, logprobs_mode: str) -> dict[str, int]:
        """Sample as ``PathSampler`` does; returns the engine's limits."""
        if not isinstance(self.model_runner.sampler, PathSampler):
            self.model_runner.sampler = PathSampler(self.model_runner, logprobs_mode == "processed")
        return {
            "vocab_size": self.model_config.get_vocab_size(),
            "max_model_len": self.model_config.max_model_len,
        }

    def eqlen_removed_mass(self) -> list[float]:
        """Probability mass removed and tokens sampled since the last call."""
        return list(self.model_runner.sampler.take_removed_mass())
