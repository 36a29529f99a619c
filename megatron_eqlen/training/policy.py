"""The policy: the Megatron model in training, with its optimizer and its reference weights.

trees ─► pack ─► (old and reference log-probs) ─► forward, loss, backward ─► optimizer step
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.cost import pair_cost
from megatron_eqlen.models.megatron_checkpoint import checkpoint_metadata
from megatron_eqlen.models.weights import export_hf, load_hf
from megatron_eqlen.objectives.registry import resolve
from megatron_eqlen.packing.pack import Plan, plan
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.training.forward import microbatch_multiple, run_rows
from megatron_eqlen.training.optimizer import build_optimizer, init_state, wrap
from megatron_eqlen.training.policy_loss import LossMetrics, policy_loss, reduce_metrics
from megatron_eqlen.training.reference import ReferenceWeights
from megatron_eqlen.types import Metrics, Row, TokenTree

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy:
    """Built with the weights at ``recipe.model.path``, which stay the reference model's."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.objective = resolve(recipe)
        self.chunks = build_model(recipe.model.path, recipe.parallel, DTYPES[recipe.model.dtype])
        load_hf(self.chunks, recipe.model.path)
        self.reference = ReferenceWeights(self.chunks) if recipe.loss.kl_coef else None
        self.model = wrap(self.chunks, recipe)
        self.optimizer, self.schedule = build_optimizer(self.model, recipe)
        self.aux_loss_coef = self.chunks[0].config.moe_aux_loss_coeff
        self.pair_cost = pair_cost(self.chunks[0].model_config)
        self.version = 0
        """Optimizer steps taken."""

    def update(self, minibatches: list[list[TokenTree]]) -> Metrics:
        """Train on the step's trees: one optimizer step for each minibatch, ``loss.epochs`` times over.

        Every rank passes the same trees and trains the rows that the packer gives it. Minibatches without a
        supervised token are passed over. Metrics are those of the first optimizer step (its policy is the
        one that generated), with the gradient norm averaged over all.
        """
        plans = [plan for plan in map(self._pack, minibatches) if has_tokens(plan)]
        if not plans:
            return {"train/updates": 0.0}
        batches = [plan.rows(parallel_state.get_data_parallel_rank()) for plan in plans]
        for rows in batches:
            self._annotate(rows, old=len(batches) * self.recipe.loss.epochs > 1)
        steps = [
            self._step(rows, plan.metrics["packing/supervised_tokens"])
            for _ in range(self.recipe.loss.epochs)
            for plan, rows in zip(plans, batches, strict=True)
        ]
        grad_norm = float(np.mean([step["train/grad_norm"] for step in steps]))
        return {
            **plans[0].metrics,
            **steps[0],
            "train/grad_norm": grad_norm,
            "train/updates": float(len(steps)),
        }

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights by Hugging Face name, whole, one by one. Collective over model-parallel ranks."""
        return export_hf(self.chunks)

    def checkpoint_metadata(self) -> dict[str, Any]:
        """How Megatron lays out a checkpoint: one that any parallel layout can read."""
        return {
            **checkpoint_metadata(),
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
        }

    def sharded_state(self, is_loading: bool) -> dict[str, Any]:
        """Model, optimizer and schedule as Megatron's sharded state dict."""
        metadata = self.checkpoint_metadata()
        state: dict[str, Any] = {
            self._chunk_key(number): chunk.sharded_state_dict(metadata=metadata)
            for number, chunk in enumerate(self.chunks)
        }
        for optimizer in self.optimizer.chained_optimizers:
            if is_loading or not optimizer.optimizer.state:
                init_state(optimizer)
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        state["schedule"] = self.schedule.state_dict()
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of ``sharded_state``, after Megatron has filled it."""
        for number, chunk in enumerate(self.chunks):
            chunk.load_state_dict(state[self._chunk_key(number)], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def _chunk_key(self, number: int) -> str:
        return "model" if len(self.chunks) == 1 else f"model{number}"

    def _pack(self, trees: list[TokenTree]) -> Plan:
        config = self.chunks[0].config
        return plan(
            trees,
            self.recipe.packing.max_tokens_per_row,
            parallel_state.get_data_parallel_world_size(),
            config.tensor_model_parallel_size if config.sequence_parallel else 1,
            self.recipe.packing.layout,
            pair_cost=self.pair_cost,
            row_count_multiple_of=microbatch_multiple(config),
        )

    def _annotate(self, rows: list[Row], old: bool) -> None:
        """Fill in old and reference log-probs where the loss will look at them."""
        if old:
            _fill(rows, "old_logprobs", self._log_probs(rows))
        if self.reference is not None:
            with self.reference.swapped_in():
                _fill(rows, "ref_logprobs", self._log_probs(rows))

    def _log_probs(self, rows: list[Row]) -> list[np.ndarray]:
        """[n] float64 a row, at its supervised positions; empty before the last pipeline stage."""
        return run_rows(
            self.model,
            rows,
            self.recipe.rollout.temperature,
            lambda logprobs, entropy, row, at: logprobs.double().cpu().numpy(),
            train=False,
        )

    def _step(self, rows: list[Row], supervised_tokens: float) -> Metrics:
        """One optimizer step on this rank's ``rows``; ``supervised_tokens`` are those of all ranks."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
            # Megatron takes the router's loss times a row's tokens, for a gradient that is divided by all.
            chunk.config.moe_aux_loss_coeff = self.aux_loss_coef / supervised_tokens
        self.optimizer.zero_grad()
        logs = run_rows(self.model, rows, self.recipe.rollout.temperature, self._loss, train=True)
        self.schedule.step(increment=1)  # before the update, or the first would have a rate of 0
        _, grad_norm, _ = self.optimizer.step()
        self.version += 1
        learning_rate = self.optimizer.param_groups[0]["lr"]
        metrics = reduce_metrics(logs, parallel_state.get_data_parallel_group()) if logs else {}
        metrics = from_last_stage(metrics)
        return {**metrics, "train/grad_norm": float(grad_norm or 0.0), "train/lr": learning_rate}

    def _loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, row: Row, at: np.ndarray
    ) -> tuple[torch.Tensor, LossMetrics]:
        def of(values: np.ndarray | None) -> torch.Tensor | None:
            return None if values is None else torch.from_numpy(values[at]).to(logprobs.device)

        return policy_loss(
            logprobs,
            entropy,
            weights=of(row.weights),
            advantages=of(row.advantages),
            segment_ids=of(row.segment_ids),
            rollout_logprobs=of(row.rollout_logprobs),
            old_logprobs=of(row.old_logprobs),
            ref_logprobs=of(row.ref_logprobs),
            objective=self.objective,
            loss=self.recipe.loss,
        )


def from_last_stage(metrics: Metrics) -> Metrics:
    """What the last pipeline stage knows, on every stage."""
    box = [metrics]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast_object_list(
            box,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return box[0]


def has_tokens(plan: Plan) -> bool:
    return plan.metrics["packing/supervised_tokens"] > 0


def _fill(rows: list[Row], field: str, values: list[np.ndarray]) -> None:
    """``values`` are empty on pipeline stages that do not compute the loss."""
    for row, logprobs in zip(rows, values, strict=False):
        column = np.zeros(len(row.labels))
        column[row.weights > 0] = logprobs
        setattr(row, field, column)
