"""What lives as long as a rank's process: its place among the ranks, the screen, tokenizer and graders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron_eqlen import layout
from megatron_eqlen.objectives.registry import resolve
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.replicas import Replicas
from megatron_eqlen.report.progress import Progress
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.sampling.kind import Harvester
from megatron_eqlen.sampling.record import Part
from megatron_eqlen.timeline import Timeline
from megatron_eqlen.tokenizer import load_tokenizer
from megatron_eqlen.training import distributed
from megatron_eqlen.types import Metrics


class Session:
    """One rank's process. Use as a context manager: at its end, the functions given to ``ends_with`` are
    called, newest first.

    Every rank of a run has a session and calls the same verbs in the same order.
    """

    def __init__(self, recipe: Recipe) -> None:
        layout.check_started(recipe, distributed.world_size())
        distributed.start(recipe.parallel, recipe.seed)
        self._ends = contextlib.ExitStack()
        self._ends.callback(distributed.stop)
        self.recipe = recipe
        self.timeline = Timeline()
        self.objective = resolve(recipe)
        self.replicas = engine_replicas(recipe)
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.scorer = Scorer(recipe.reward, self.tokenizer, recipe.graders_on_node)
        self.ends_with(self.scorer.close)
        self.progress = Progress(recipe.budget, f"{recipe.name} {recipe.method}", show=distributed.is_rank0())
        self.ends_with(self.progress.close)
        if recipe.reward.workers is None:
            self.progress.say(f"reward.workers: {self.scorer.workers}, the cores of a rank")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: Any) -> None:
        self._ends.__exit__(*error)

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Leave ``context`` when the session ends; it learns of the error that ends it."""
        self._ends.enter_context(context)

    def ends_with(self, close: Callable[[], None]) -> None:
        """Call ``close`` when the session ends."""
        self._ends.callback(close)

    def begin_grading(self, harvester: Harvester, part: Part) -> None:
        """Start grading the response that ``part`` ends, if it ends one and this rank grades it."""
        if self.replicas.grades(harvester.prompt, harvester.index):
            self.scorer.begin_part(harvester, part)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Metrics]:
        """Show ``name`` while the block runs; what it yields then holds the seconds as ``time/NAME``. A stage
        beside training, in another thread, is not shown."""
        seconds: Metrics = {}
        if not distributed.is_alone():
            self.progress.stage(name)
        with self.timeline.span(name) as span:
            yield seconds
        seconds[f"time/{name}"] = span.ended - span.began


def engine_replicas(recipe: Recipe) -> Replicas:
    """Servers are driven by rank 0 alone; a colocated engine by all the ranks it lives in."""
    if recipe.rollout.engine == "server":
        return Replicas(dist.get_world_size(), in_step=False)
    return Replicas(recipe.rollout.tensor_parallel, decides=recipe.rollout.seconds_per_step is not None)
