"""The teacher of on-policy distillation: a frozen model in the policy's parallel groups. Its weights are on
the device only while it computes log-probs, else in host memory."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_eqlen.hf.config import read_config
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.router_replay import routers
from megatron_eqlen.models.weights import load_hf
from megatron_eqlen.recipe import ParallelRecipe, layout
from megatron_eqlen.training.parking import Parked


class Teacher:
    """Model of the Hugging Face folder ``folder``. ``parallel``: the policy's."""

    def __init__(self, folder: Path, parallel: ParallelRecipe, dtype: torch.dtype) -> None:
        config = read_config(folder)
        self.chunks = build_model(config, layout.of_teacher(parallel, config), dtype)
        load_hf(self.chunks, folder)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        for router in routers(self.chunks):
            router.reads_routes = False
        self.weights = Parked(lambda: [each for chunk in self.chunks for each in chunk.parameters()])
        self.weights.park()
