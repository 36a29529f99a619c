"""State that lives as long as a rank's process: its rank, the screen, tokenizer and graders."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torch.utils import deterministic

from megatron_eqlen.job import Job
from megatron_eqlen.models import groups
from megatron_eqlen.objectives.checks import remarks
from megatron_eqlen.plan.memory import memory
from megatron_eqlen.processes import distributed, events, failures
from megatron_eqlen.processes.collector import importing
from megatron_eqlen.processes.events import EventWriter
from megatron_eqlen.processes.timeline import Timeline
from megatron_eqlen.processes.watchdog import Watchdog
from megatron_eqlen.recipe import RecipeError, layout
from megatron_eqlen.recipe.inputs import revisions
from megatron_eqlen.report.progress import Progress
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.run.replicas import Replicas
from megatron_eqlen.training import peak_memory
from megatron_eqlen.types import Metrics

PHASES = {"harvest": "generate"} | {name: name for name in ("train", "sync", "evaluate", "checkpoint")}
"""Phases of the memory plan, by stage."""


class Session:
    """One rank's process; a context manager that calls the functions given to ``ends_with``, newest first.
    Every rank of a run has a session and calls the same verbs in the same order."""

    def __init__(self, job: Job) -> None:
        recipe = job.recipe
        layout.check_started(recipe, distributed.world_size())
        if recipe.rollout.batch_invariant:
            use_deterministic_kernels()
        seconds = recipe.cluster.watchdog_seconds
        timeout = timedelta(seconds=max(1800.0, 2 * (seconds or 0.0)))  # longer than a hang lasts
        groups.start(recipe.parallel, recipe.seed, timeout)
        self._ends = contextlib.ExitStack()
        self.watchdog = Watchdog(dist.get_rank(), dist.get_world_size(), seconds)
        self.ends_with(self.watchdog.stop)  # nearly last, since the functions that end first may hang
        self._ends.callback(groups.stop)
        self.job, self.recipe, self.objective = job, recipe, job.objective
        own, first = revisions(recipe), distributed.agree(lambda: revisions(recipe))
        if own != first:  # a branch on the hub moved while ranks of several nodes resolved it
            raise RecipeError(f"expected the revisions of rank 0, {first}, found {own}")
        self.events = EventWriter()
        self.timeline = Timeline(self.events.note)
        # servers are driven by rank 0 alone, a colocated engine by all ranks it lives in
        servers = recipe.rollout.engine == "server"
        ranks = dist.get_world_size() if servers else recipe.rollout.tensor_parallel
        self.replicas = Replicas(ranks, in_step=not servers)
        with importing():  # Transformers
            self.tokenizer = job.tokenizer
        self.scorer = Scorer(recipe.reward, self.tokenizer, recipe.graders_on_node, recipe.seed)
        self.ends_with(self.scorer.close)
        title = f"{recipe.name} {recipe.method}"
        self.progress = Progress(recipe.budget, title, distributed.is_rank0(), note=self.events.note)
        for remark in remarks(job):
            self.progress.warn(remark)
        if recipe.reward.workers is None:
            self.progress.say(f"reward.workers: {self.scorer.workers}, the cores of a rank")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:  # before any cleanup that makes other ranks fail
            failures.record(error)
        self._ends.__exit__(kind, error, trace)

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Enter ``context``; leave it, with the error if there is one, when the session ends."""
        self._ends.enter_context(context)

    def ends_with(self, close: Callable[[], None]) -> None:
        self._ends.callback(close)

    def keep_date(self, run: Path) -> None:
        """Make chat templates write the date of the first start in ``run``, so that prompts stay the same."""
        self.tokenizer.today = distributed.agree(lambda: events.began(run))

    def watch(self, folder: Path) -> None:
        """From now on, notice hangs, and write their records to a folder of this try under ``folder``."""
        self.watchdog.start(folder / distributed.agree(lambda: time.strftime("%Y%m%d-%H%M%S")))

    @contextlib.contextmanager
    def stage(self, name: str, patience: float = 0.0) -> Iterator[Metrics]:
        """Run the block as a stage. At its end the metrics yielded hold its seconds (``time/NAME``) and,
        except in a thread beside training, the peak memory. ``patience``: see ``Watchdog.stage``."""
        measured: Metrics = {}
        # a harvest beside training would reset the peak that the trainer's stage is measuring
        alone = distributed.is_alone()
        if not alone:
            peak_memory.begin()
        try:
            with (
                record_function(f"stage {name}"),
                self.watchdog.stage(name, patience),
                self.timeline.span(name) as span,
            ):
                yield measured
        except torch.OutOfMemoryError as error:
            # say in which stage memory ran out, and what the plan had counted for it
            error.add_note(peak_memory.shortage(name, self.planned))
            raise
        measured[f"time/{name}"] = span.ended - span.began
        if not alone:
            measured |= peak_memory.measured(name, self.planned)

    @cached_property
    def planned(self) -> dict[str, float]:
        """Bytes of a GPU that the plan counts, by stage; empty without a GPU."""
        if not torch.cuda.is_available():
            return {}
        phases = memory(self.job).phases
        return {stage: phases[phase] for stage, phase in PHASES.items()}


def use_deterministic_kernels() -> None:
    """Select deterministic kernels for training and batch-invariant ones for a colocated vLLM. Call before
    CUDA, NCCL, Transformer Engine and vLLM are used or imported: they read the environment then. An operation
    without a deterministic kernel gives a warning with its name."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # in this mode torch fills uninitialized memory, to show reads of it, which costs time in every step
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] (a property)
