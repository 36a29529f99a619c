"""Cost for a rank of sharing rollouts: skeletons to all ranks, arrays to the ranks that train them."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.run.replicas import shared
from megatron_eqlen.training.exchange import Placement, exchange_tokens
from megatron_eqlen.types import Rollout

RANKS = 2


def measure(rollouts: list[Rollout], recipe: Recipe) -> dict[str, float]:
    """Return processor seconds of a rank for all of ``rollouts``: ``share`` the skeletons, ``exchange`` the
    arrays. The slower of two ranks over gloo, each the home of half of them."""
    context = multiprocessing.get_context("fork")  # the rollouts are there already
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            work = (theirs, rank, Path(folder) / "store", rollouts, recipe)
            context.Process(target=_rank, args=work, daemon=True).start()
            theirs.close()
            pipes.append(ours)
        seconds = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send("both have answered")
    return {stage: max(rank[stage] for rank in seconds) for stage in seconds[0]}


def _rank(pipe: Connection, rank: int, store: Path, rollouts: list[Rollout], recipe: Recipe) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    prompts = list({rollout.prompt_id: rollout.prompt for rollout in rollouts}.values())
    started = time.process_time()
    known = shared(rollouts[rank::RANKS], prompts)
    knows = time.process_time()
    (trees,), _ = build_minibatches(known, recipe)
    planned = plan_rows(trees, recipe.packing.max_tokens_per_row)
    begun = time.process_time()
    exchange_tokens(planned, [Placement(0, for_loss=True)] * RANKS)
    taken = time.process_time() - begun
    # of its rows a rank gets half from the other here, and nearly all where eight train them
    pipe.send({"share": knows - started, "exchange": taken * RANKS})
    pipe.recv()
