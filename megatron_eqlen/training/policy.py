"""Policy: the Megatron model in training, with its optimizer and its reference weights.

trees ─► plan ─► exchange ─► (other policies' log-probs) ─► forward, loss, backward ─► optimizer step
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_eqlen import metrics as m
from megatron_eqlen.job import Job
from megatron_eqlen.models import groups
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.lora import add_adapters, switched_off
from megatron_eqlen.models.router_replay import measuring_agreement, moe_layers, routers
from megatron_eqlen.models.weights import export_hf, load_hf, save_adapters, save_hf
from megatron_eqlen.packing.pack import Packing, RankRows, plan_rows
from megatron_eqlen.packing.tree import NonFiniteTreeError
from megatron_eqlen.plan.flops import pair_cost
from megatron_eqlen.processes.distributed import agree, gather, is_rank0
from megatron_eqlen.recipe import contents
from megatron_eqlen.tokens import TEACHER
from megatron_eqlen.training import finite
from megatron_eqlen.training.agreement import NO_TOKEN, Compared, WorstToken, mismatch_of, worst_token
from megatron_eqlen.training.exchange import Placement, exchange
from megatron_eqlen.training.forward import RowResult, row_multiple, run_rows, supervised_positions
from megatron_eqlen.training.optimizer import build_optimizer, gradient_norm, take_step, wrap
from megatron_eqlen.training.parking import Parked, ReferenceWeights, TrainerMemory
from megatron_eqlen.training.policy_loss import RowLoss, policy_loss, reduce_metrics
from megatron_eqlen.types import Metrics, Row, TokenTree

logger = logging.getLogger(__name__)


class Teacher:
    """Frozen model of ``Job.teacher`` in the policy's parallel groups, parked while it computes nothing."""

    def __init__(self, job: Job, dtype: torch.dtype) -> None:
        self.chunks = build_model(job.model, job.recipe.parallel, dtype)
        load_hf(self.chunks, job.folder)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        for router in routers(self.chunks):
            # rows hold the policy's experts
            router.reads_routes = False
        self.weights = Parked(lambda: [each for chunk in self.chunks for each in chunk.parameters()])
        self.weights.park()


@dataclass(frozen=True)
class Minibatch:
    """Data of one optimizer step."""

    rows: RankRows | None
    """Rows of this rank; None if there is a problem."""
    problem: finite.NumericalProblem | None = None
    exchanged: Metrics = field(default_factory=dict)
    """Metrics of the exchange."""

    @property
    def trains(self) -> bool:
        return self.rows is None or bool(self.rows.packing.forest.weight.any())


@dataclass(frozen=True)
class Updated:
    """Result of an update, the same on every rank. ``mismatch``: mean |trainer - engine| log-prob over its
    comparable tokens, or over those of drawn lines if it is larger; None: there are none."""

    metrics: Metrics
    mismatch: float | None
    worst: WorstToken


class Policy:
    """Policy built with the weights at ``model.path``, which are also those of the reference model."""

    def __init__(self, job: Job) -> None:
        self.job, self.recipe, self.objective = job, job.recipe, job.objective
        recipe, dtype = job.recipe, getattr(torch, job.recipe.model.dtype)
        has_adapters = recipe.lora.rank > 0
        self.chunks = build_model(
            job.model, recipe.parallel, dtype, separate_norms=has_adapters, **job.megatron.model
        )
        # weights first, then adapters on them, then DDP's buffers around both
        load_hf(self.chunks, job.folder)
        if has_adapters:
            add_adapters(self.chunks, recipe.lora, recipe.seed)
        # of the files of weights that adapters are trained on: checkpoints have the adapters alone
        self.base = agree(lambda: contents.weights(job.folder)) if has_adapters else None
        self.reference: Callable[[], AbstractContextManager[None]] | None = None
        """Makes a context in which the model is the reference model."""
        if recipe.loss.kl_coef:
            # the reference is the frozen model under the adapters, or else a copy on the host
            adapted = partial(switched_off, self.chunks)
            self.reference = adapted if has_adapters else ReferenceWeights(self.chunks).swapped_in
        self.teacher = Teacher(job.teacher, dtype) if job.teacher else None
        self.ddp_chunks = wrap(self.chunks, recipe.optimizer.grad_dtype, job.megatron.ddp)
        self.optimizer, self.schedule = build_optimizer(self.ddp_chunks, recipe, job.megatron.optimizer)
        self.memory = TrainerMemory(self.ddp_chunks, self.optimizer, recipe.parked)
        self.pair_cost = pair_cost(self.chunks[0].model_config)
        self.placement = Placement(
            parallel_state.get_data_parallel_rank(),
            parallel_state.is_pipeline_last_stage(ignore_virtual=True),
            moe_layers(self.chunks),
        )
        for router in routers(self.chunks):
            router.replays = recipe.loss.router_replay
        self.placements = gather([self.placement])
        self.version = 0
        """Number of optimizer steps taken."""
        self.skipped_in_a_row = 0
        """Number of skipped updates since the last taken update."""

    def park(self) -> Metrics:
        """Free memory for the engine, as ``rollout.park_trainer`` specifies, and return its bytes.
        ``weights`` and checkpoints still work; ``update`` needs ``unpark``."""
        before = sum(self.memory.on_device().values())
        self.memory.park()
        return {"memory/parked_bytes": float(before - sum(self.memory.on_device().values()))}

    def unpark(self) -> None:
        """Restore the memory that ``park`` freed, bit for bit; gradients are zeros."""
        self.memory.unpark()

    def update(self, minibatches: list[list[TokenTree]], drawn: Sequence[TokenTree] = ()) -> Updated:
        """Train on the step's trees: an optimizer step per minibatch, ``loss.epochs`` times over. Collective.

        Every rank passes the same trees, as skeletons if the arrays have another home, and trains the rows
        that the packer assigns to it. Minibatches without supervised tokens are left out. If a row's loss or
        the gradient's norm is not finite, all ranks skip the step: weights, optimizer and schedule stay.
        Metrics are merged over the steps taken. ``drawn``: lines that are only compared with the engine.
        Raises NonFiniteError after more than ``optimizer.max_skipped_updates`` skipped updates in a row.
        """
        assert not self.memory.away, "parked"
        sampled_by, compared = self.version, self.compare(drawn)
        batches = [batch for batch in map(self._prepare, minibatches) if batch.trains]
        rows_of_batches = [batch.rows for batch in batches if batch.rows is not None]
        # before the first update: `old` is of the weights that the step began with; one update needs none
        for rows in rows_of_batches:
            self._annotate(rows, old=self.objective.has_ratio and len(batches) * self.recipe.loss.epochs > 1)
        steps = [self._step(batch, sampled_by) for _ in range(self.recipe.loss.epochs) for batch in batches]
        packed = m.in_turn([b.exchanged | b.rows.packing.metrics for b in batches if b.rows is not None])
        # both counts have a value where no step is taken
        idle = {"train/updates": 0.0, "train/skipped_updates": 0.0}
        metrics = packed | m.in_turn([idle, *(measured for measured, _ in steps)])
        worst = max([NO_TOKEN, *(worst for _, worst in steps)])
        mismatch = mismatch_of(metrics) if metrics["train/updates"] else None
        if compared:
            of_drawn = Compared.joined(compared.values())
            metrics["mismatch/drawn_abs_diff"] = of_drawn.mean
            mismatch = float(np.maximum(of_drawn.mean, mismatch or 0.0))  # NaN if one is
            worst = max(worst, of_drawn.worst)
        return Updated(metrics, mismatch, worst)

    def compare(self, trees: Sequence[TokenTree]) -> dict[str, Compared]:
        """Return sums of the log-probs, in trainer and engine, of supervised tokens that the present weights
        sampled, by tree; NaN if a number is not finite. Not while parked. Collective."""
        if not trees:
            return {}
        batch = self._prepare([*trees])
        if batch.rows is None:
            worst = WorstToken(math.nan, str(batch.problem))
            return {trees[0].name: Compared(1, math.nan, math.nan, math.nan, worst)}
        rows = batch.rows
        segments: dict[int, tuple[str, Compared]] = {}
        for row, trainer in zip(rows, self._log_probs(rows), strict=False):  # none before the last stage
            at = supervised_positions(row)
            engine, numbers = row.column("logprobs")[at], row.segment_ids[at]
            # log-probs agree only where the same weights have sampled
            current = (row.column("versions")[at] == self.version) | (not self.recipe.rollout.trains_older)
            for segment in np.unique(numbers[current]).tolist():
                own = np.flatnonzero((numbers == segment) & current)
                difference = np.abs(trainer - engine)[own]
                tree, node = rows.packing.forest.of_segment(segment)
                worst = WorstToken(float(difference.max()), f"node {node} of tree {tree!r}")
                sums = float(trainer[own].sum()), float(engine[own].sum()), float(difference.sum())
                segments[segment] = tree, Compared(len(own), *sums, worst)
        of_trees: dict[str, list[Compared]] = {}
        # tensor-parallel ranks bring the same segments: each counts once, in one order on every rank
        for _, (tree, part) in sorted(dict(gather([*segments.items()])).items()):
            of_trees.setdefault(tree, []).append(part)
        return {tree: Compared.joined(parts) for tree, parts in of_trees.items()}

    def check_weights(self) -> None:
        """Raise NonFiniteError, on every rank, if a weight is not finite on any rank. Not while parked."""
        if problem := finite.first_problem(finite.weight_problem(self.chunks)):
            raise finite.NonFiniteError(str(problem))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights by Hugging Face name, unsharded. Not while parked. See ``export_hf``."""
        return export_hf(self.chunks)

    def export(self, folder: Path) -> None:
        """Write the weights to ``folder`` as a Hugging Face folder, with adapters merged. Collective."""
        with self.memory.weights.resident():
            save_hf(self.chunks, self.job.folder, folder, getattr(torch, self.recipe.model.dtype))

    def export_adapters(self, folder: Path) -> None:
        """Write the adapters to ``folder`` as a PEFT folder. Collective."""
        with self.memory.weights.resident():
            save_adapters(self.chunks, self.recipe.lora, self.recipe.model.path, folder)

    def _pack(self, trees: list[TokenTree]) -> Packing:
        config = self.chunks[0].config
        interleaved = config.virtual_pipeline_model_parallel_size
        models = [self.chunks, *([self.teacher.chunks] if self.teacher else [])]
        return plan_rows(
            trees,
            self.recipe.packing.max_tokens_per_row,
            parallel_state.get_data_parallel_world_size(),
            math.lcm(*(row_multiple(chunks[0].config) for chunks in models)),
            self.recipe.packing.layout,
            pair_cost=self.pair_cost,
            # Megatron's interleaved schedule takes micro-batches in groups of the pipeline's size
            row_count_multiple_of=config.pipeline_model_parallel_size if interleaved else 1,
        )

    def _prepare(self, trees: list[TokenTree]) -> Minibatch:
        """Prepare a minibatch; it has a problem on every rank if any rank finds a number not finite."""
        try:
            packing, exchanged = exchange(self._pack(trees), self.placements, self.chunks[0].model_config)
            rows = packing.rows(self.placement.data_parallel, self.placement.for_loss)
            batch = Minibatch(rows, exchanged=exchanged)
        # any other TreeError is a fault of the program, and ends the run
        except NonFiniteTreeError as error:
            batch = Minibatch(None, finite.NumericalProblem(0, str(error)))
        problem = finite.first_problem(batch.problem)
        return Minibatch(None, problem) if problem else batch

    def _annotate(self, rows: RankRows, old: bool) -> None:
        """Compute the log-probs of other policies that the loss needs."""
        if old:
            with self._measuring_route_agreement(rows):
                rows.others["old"] = self._log_probs(rows)
        if self.reference is not None:
            with self.reference():
                rows.others["ref"] = self._log_probs(rows)
        if self.teacher is not None:
            with self.teacher.weights.resident():
                rows.others["teacher"] = self._log_probs(rows, self.teacher.chunks)

    def _log_probs(self, rows: RankRows, chunks: list[Any] | None = None) -> list[np.ndarray]:
        """Return for each row [n] float64, at supervised positions; empty before the last pipeline stage."""

        def result(logprobs: torch.Tensor, entropy: torch.Tensor, row: Row, at: np.ndarray) -> np.ndarray:
            return logprobs.double().cpu().numpy()

        return self._run(rows, result, train=False, chunks=chunks)

    def _run(
        self, rows: RankRows, result: RowResult, *, train: bool, chunks: list[Any] | None = None
    ) -> list[Any]:
        """Call ``run_rows`` with the recipe's options. ``chunks``: of a model; None: of the policy."""
        temperature, chunk = self.recipe.trained_temperature, self.recipe.packing.logits_chunk
        return run_rows(chunks or self.ddp_chunks, rows, temperature, result, train=train, logits_chunk=chunk)

    def _step(self, batch: Minibatch, sampled_by: int) -> tuple[Metrics, WorstToken]:
        """Take or skip one optimizer step with this rank's rows; return metrics and the worst token.
        ``sampled_by``: version of the weights whose tokens are compared with the engine."""
        if batch.problem:
            return self._skip(batch.problem), NO_TOKEN
        assert batch.rows is not None
        losses = self._backward(batch.rows, sampled_by)
        grad_norm = gradient_norm(self.optimizer)
        nodes = batch.rows.packing.forest.nodes if grad_norm == 0 and is_rank0() else []
        if any(node.weight and np.any(node.advantage) for node in nodes):
            logger.warning("update %d: the gradient of every weight is exactly 0", self.version + 1)
        # the last pipeline stages of all data-parallel ranks know metrics and worst token
        local = (reduce_metrics(losses, groups.own().dp), worst_token(batch.rows, losses)) if losses else None
        stages = [part for part in gather([local]) if part is not None]
        worst, measured = max(worst for _, worst in stages), stages[0][0]
        problem = finite.first_problem(
            finite.row_problem(batch.rows, losses) or finite.gradient_problem(self.chunks, grad_norm)
        )
        if problem:
            return self._skip(problem), worst
        self.schedule.step(increment=1)  # before the update, since the first learning rate is 0
        take_step(self.optimizer, grad_norm)
        self.version, self.skipped_in_a_row = self.version + 1, 0
        rate = self.optimizer.param_groups[0]["lr"]
        taken = {"train/updates": 1.0, "train/grad_norm": grad_norm, "train/lr": rate}
        return measured | (batch.rows.route_agreement or {}) | taken, worst

    def _backward(self, rows: RankRows, sampled_by: int) -> list[RowLoss]:
        """Compute the rows' gradients; return each row's loss and metrics, on the last pipeline stage."""
        for chunk in self.ddp_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self._measuring_route_agreement(rows):
            return self._run(rows, partial(self._loss, sampled_by=sampled_by), train=True)

    @contextlib.contextmanager
    def _measuring_route_agreement(self, rows: RankRows) -> Iterator[None]:
        """Measure ``rows.route_agreement``, of router and recorded experts, in the first pass over them."""
        if rows.route_agreement is not None or not rows.packing.forest.has_path_columns.any():
            yield
            return
        with measuring_agreement(self.chunks) as agreement:
            yield
        rows.route_agreement = agreement.metrics()

    def _skip(self, problem: finite.NumericalProblem) -> Metrics:
        """Skip the step: change nothing, and log the reason."""
        self.skipped_in_a_row += 1
        allowed = self.recipe.optimizer.max_skipped_updates
        if is_rank0():
            limit = f"{self.skipped_in_a_row} in a row, optimizer.max_skipped_updates {allowed}"
            logger.warning("update %d is skipped (%s); %s", self.version + 1, limit, problem)
        if self.skipped_in_a_row > allowed:
            most = f"optimizer.max_skipped_updates is {allowed}; the last: {problem}"
            raise finite.NonFiniteError(
                f"{self.skipped_in_a_row} updates in a row could not be taken, {most}"
            )
        return {"train/updates": 0.0, "train/skipped_updates": 1.0}

    def _loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, row: Row, at: np.ndarray, sampled_by: int
    ) -> tuple[torch.Tensor, RowLoss]:
        def of(values: np.ndarray) -> torch.Tensor:
            # [n]: the row's supervised positions on this rank
            return torch.from_numpy(values[at]).to(logprobs.device)

        others = row.others | ({TEACHER.name: row.column(TEACHER.name)} if self.recipe.teacher.url else {})
        trains_older = self.recipe.rollout.trains_older
        return policy_loss(
            logprobs,
            entropy,
            weights=of(row.weights),
            advantages=of(row.advantages),
            segment_ids=of(row.segment_ids),
            rollout_logprobs=None if self.recipe.supervised else of(row.column("logprobs")),
            others={policy: of(known) for policy, known in others.items()},
            compared=of(row.column("versions") == sampled_by) if trains_older else None,
            objective=self.objective,
            loss=self.recipe.loss,
        )
