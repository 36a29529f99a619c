"""Weights from the trainer, for a vLLM server's workers (``--worker-extension-cls``). Importing it registers
the weight-transfer backends ``eqlen_folder`` and ``eqlen_nccl`` (``rollout.sync``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_eqlen.engines.cpu.repack import repack
from megatron_eqlen.engines.protocol import STOCK
from megatron_eqlen.engines.vllm_args import FUNCTION, STARTED_WITH
from megatron_eqlen.engines.weight_table import WeightTable
from megatron_eqlen.engines.weights.folder import PART_BYTES
from megatron_eqlen.recipe.contents import Contents, weights

logger = logging.getLogger(__name__)


@dataclass
class NoSettings(WeightTransferInitInfo):
    """vLLM's settings for a rendezvous at the start: none, because a sync brings its own."""


@dataclass
class WeightsFile(WeightTransferUpdateInfo):
    """A part of the weights, see ``folder``."""

    path: str


class _Reload(WeightTransferEngine):
    """vLLM's layerwise reload of a whole model, for either transfer."""

    model: Any
    updating = False
    """True from the start of an update to its end or its failure."""
    received = 0
    """Weights that files have brought since the start of the newest update."""

    def start_weight_update(self) -> None:
        # After an interrupted sync some layers still wait for the rest of their weights, and vLLM would mix
        # the new ones with those. After a complete sync this has no effect.
        finalize_layerwise_reload(self.model, self.model_config)
        initialize_layerwise_reload(self.model)
        self.updating, self.received = True, 0

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)
        self.updating = False

    def reset_weight_update_target(self) -> None:
        """End an update, complete or not: a layer without all its weights would end the engine."""
        super().reset_weight_update_target()
        if self.updating:
            self.finish_weight_update()


class FolderWeightTransfer(_Reload, WeightTransferEngine[NoSettings, WeightsFile]):
    """Weight transfer by files, each of which holds some of the weights; every worker reads all."""

    init_info_cls = NoSettings
    update_info_cls = WeightsFile

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.table = WeightTable.read(self.model_config.model)

    def init_transfer_engine(self, init_info: NoSettings) -> None:
        pass

    def receive_weights(self, update_info: WeightsFile) -> None:
        """Load a part. One that cannot be read, or is of another model, is logged, and the trainer notices
        that weights are missing (``received``). If ranks raised here, vLLM would take the others' answers to
        this call for answers to its next, and the next trainer's sync would fail."""
        path = Path(update_info.path)
        most = PART_BYTES + 4 * max(map(math.prod, self.table.shapes.values()))
        try:
            if not path.is_file() or path.stat().st_size > most:  # a pipe or a device has no end
                raise ValueError(f"expected a file of at most {most} bytes")
            part = load(path.read_bytes())  # not mapped: a trainer that gives up removes the file
            list(self.table.check(part.items(), whole=False))
        except (OSError, ValueError, SafetensorError) as error:
            logger.warning("weights of %s: %s", path, error)
            return
        self.model.load_weights([(name, tensor.to(self.device)) for name, tensor in part.items()])
        self.received += len(part)

    def shutdown(self) -> None:
        pass


class NcclWeightTransfer(_Reload, NCCLWeightTransferEngine):
    """vLLM's own NCCL transfer, fed by ``nccl``, which makes a group for each update."""

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self.shutdown()


TRANSFERS = {"eqlen_folder": FolderWeightTransfer, "eqlen_nccl": NcclWeightTransfer}
for name, engine in TRANSFERS.items():
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, engine)


class WorkerExtension:
    """Methods for ``/collective_rpc``; mixed into vLLM's worker."""

    model_config: Any
    vllm_config: Any
    weight_transfer_engine: _Reload
    finish_weight_update: Callable[[], None]

    def eqlen_setup(self) -> dict[str, Any]:
        """Return the engine's limits, the ``rollout`` keys it started with and the name of vLLM's sampler."""
        if self.weight_transfer_engine.updating:  # left open by a trainer that was killed
            self.finish_weight_update()
        started = self.vllm_config.additional_config
        return {
            "started_with": {key: started.get(key) for key in STARTED_WITH},
            FUNCTION: started.get(FUNCTION),
            "stock": STOCK if self.vllm_config.use_v2_model_runner else "vLLM V1",
            "received": self.weight_transfer_engine.received,
            "vocab_size": self.model_config.get_vocab_size(),
            "max_model_len": self.model_config.max_model_len,
        }

    def eqlen_weights(self) -> Contents:
        """Return the contents of the files that the server was started with."""
        return weights(Path(self.model_config.model))
