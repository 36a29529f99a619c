"""The teacher of on-policy distillation: a frozen model in the policy's parallel groups. Its weights are on
the device only while it computes log-probs, else in host memory."""

from __future__ import annotations

import torch

from megatron_eqlen.job import Job
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.router_replay import routers
from megatron_eqlen.models.weights import load_hf
from megatron_eqlen.training.parking import Parked


class Teacher:
    """Model of ``Job.teacher``."""

    def __init__(self, job: Job, dtype: torch.dtype) -> None:
        self.chunks = build_model(job.model, job.recipe.parallel, dtype)
        load_hf(self.chunks, job.folder)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        for router in routers(self.chunks):
            router.reads_routes = False
        self.weights = Parked(lambda: [each for chunk in self.chunks for each in chunk.parameters()])
        self.weights.park()
