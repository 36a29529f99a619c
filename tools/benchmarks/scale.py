"""Work of rank 0's processor in a step, on any number of GPUs: real code, scripted engines and ranks.

    prompts ─► harvest, record ─► score, grades ─► share ─► select ─► units ─► plan
                                                              metrics ◄─ fill ◄─ exchange ◄─┘

Eight ranks hold an engine and a data-parallel index (TP 8), for 16 prompts of 8 streams: the paper's step is
that of 32 GPUs. Rank 0 harvests, records and grades its own share, with lengths divided by ``--shorter``; its
seconds are multiplied by that, which counts forks and pairs too often. It then gets the skeletons of all
other ranks, at full length, and decides with them: these stages grow with the number of GPUs. Other replicas'
rollouts are those of ``--replicas`` replicas, again and again.

Seconds are of processor time, all threads, without the script's own. The network takes none.
"""

from __future__ import annotations

import argparse
import gc
import math
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_eqlen import metrics as m
from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.files import step_name, write_text
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.job import Job, parse
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.packing.pack import Packing, plan_rows
from megatron_eqlen.processes.distributed import agree, gather
from megatron_eqlen.recipe import Recipe, RewardRecipe
from megatron_eqlen.record.recorder import FILES, INTERVAL, Recorder, record_grades
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.run.replicas import Replicas, rollouts_of_all_ranks
from megatron_eqlen.run.rollouts import select
from megatron_eqlen.run.step import Batch, Step
from megatron_eqlen.tokens import Placeholder, Ragged, Tokens, join
from megatron_eqlen.training.exchange import Placement, exchange_tokens
from megatron_eqlen.types import Metrics, Node, Prompt, Rollout
from tools.benchmarks.clock import memory
from tools.benchmarks.scripted import EOS, ScriptedEngine, ScriptedRanks, write_tokenizer
from tools.benchmarks.table import show

PROMPT_TOKENS = 300
ENGINE_RANKS = 8
PROMPTS = 16
"""Prompts of a replica."""
STEP_SECONDS = 900
DECODE_SECONDS = 0.025
GRADER = "tools.research.coin:Coin"


def _eights(text: str) -> int:
    if int(text) % 8:
        raise argparse.ArgumentTypeError(f"expected a multiple of 8, found {text}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=_eights, nargs="+", default=[8, 64, 512], help="multiples of 8")
    parser.add_argument("--median", type=int, default=6000, help="of response lengths")
    parser.add_argument("--limit", type=int, default=32768, help="longest response")
    parser.add_argument("--shorter", type=int, default=16, help="divisor of the lengths that are harvested")
    parser.add_argument("--replicas", type=int, default=8, help="replicas with rollouts of their own")
    parser.add_argument("--kept", type=int, default=0, help="tokens in each sampling mask; 0: no masks")
    parser.add_argument("--requests", type=int, nargs="*", default=[512, 1024], help="in flight at once")
    parser.add_argument("--figure", type=Path, help="SVG of the seconds")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder) / "model")
        worlds = [World(Path(folder), gpus, args).measured() for gpus in args.gpus]
        steps = [decode_step(Path(folder), requests, args) for requests in args.requests]
    title = f"rank 0, CPU-seconds a step; masks of {args.kept}"
    show([{"GPUs": world["GPUs"]} | world["seconds"] for world in worlds], title)
    show([{"GPUs": world["GPUs"]} | world["sizes"] for world in worlds], "sizes")
    if args.figure:
        draw(worlds, args.figure)
    if steps:
        show(steps, "a decode step of harvest(), without the engine")
    return worlds


class World:
    """A step of rank 0 among ``gpus`` ranks."""

    def __init__(self, folder: Path, gpus: int, args: argparse.Namespace) -> None:
        self.folder, self.gpus, self.args = folder, gpus, args
        self.recipe = make_recipe(folder / "model", args.limit, args.kept, PROMPTS * gpus // ENGINE_RANKS)
        self.seconds: dict[str, float] = {}
        self.sizes: dict[str, float] = {}

    def timed[T](self, name: str, work: Callable[[], T], times: float = 1, without: Any = None) -> T:
        """Return the result of ``work`` and keep its seconds ``times`` over, but for those of a script."""
        gc.collect()
        scripted, started = without.seconds if without else 0.0, time.process_time()
        result = work()
        taken = time.process_time() - started - (without.seconds - scripted if without else 0.0)
        self.seconds[name] = times * taken
        return result

    def measured(self) -> dict[str, Any]:
        with ScriptedRanks.world(self.gpus) as ranks:
            self._measure(ranks)
        self.seconds["all"] = sum(self.seconds.values())
        return {"GPUs": self.gpus, "seconds": self.seconds, "sizes": self.sizes}

    def _measure(self, ranks: ScriptedRanks) -> None:
        recipe, shorter, replicas = self.recipe, self.args.shorter, Replicas(ENGINE_RANKS)
        source = PromptSource(recipe.data, load_tokenizer(recipe.model.path), seed=0)
        wanted = recipe.data.prompts_per_step
        prompts = self.timed("prompts", lambda: agree(lambda: source.next(wanted)))
        source.close()
        prompts = [replace(prompt, grader=GRADER) for prompt in prompts]
        scorer = Scorer(RewardRecipe(), load_tokenizer(recipe.model.path))
        pool = [
            self._replica(prompts[number :: replicas.count], number, scorer, replicas)
            for number in range(min(self.args.replicas, replicas.count))
        ]
        scorer.close()
        memory(reset=True)
        before = memory()
        part = [longer(rollout, shorter) for rollout in replicas.part(pool[0])]
        bare = [[longer(rollout.skeleton(), shorter) for rollout in rollouts] for rollouts in pool]
        ranks.answers = [
            pickle.dumps(skeletons_of(rank, bare, prompts, replicas)) for rank in range(self.gpus)
        ]
        everyone = self.timed("share", lambda: rollouts_of_all_ranks(part, prompts), without=ranks)
        self.sizes["MB of prompts"] = len(pickle.dumps(prompts)) / 1e6
        self.sizes["MB of skeletons"] = self.gpus * max(map(len, ranks.answers)) / 1e6
        ranks.answers = []
        job, graded = Job(recipe), Batch(everyone, {}, None)
        session: Any = SimpleNamespace(recipe=recipe, objective=job.objective, job=job)
        self.timed("select", lambda: select(graded, Step(0, 0), session), without=ranks)
        answers = iter(answers_of(everyone, Job(recipe), self.gpus))

        def gathered(items: list[Any]) -> list[Any]:
            ranks.answers = next(answers)
            return gather(items)

        (trees,), measured = self.timed(
            "units", lambda: build_minibatches(everyone, Job(recipe), gather=gathered, rank=0), without=ranks
        )
        ranks.answers = []
        indices = self.gpus // ENGINE_RANKS
        row = recipe.packing.max_tokens_per_row
        planned = self.timed("plan", lambda: plan_rows(trees, row, indices, ENGINE_RANKS))
        placements = [Placement(rank // ENGINE_RANKS, True) for rank in range(self.gpus)]
        planned = self.timed("exchange", lambda: exchange_tokens(planned, placements), without=ranks)
        planned = with_masks(planned, self.args.kept)
        self.timed("fill", lambda: planned.rows(0))
        packed = self.timed("metrics", lambda: planned.metrics)
        self.timed("over ranks", lambda: m.over_ranks(gather([measured | packed])), without=ranks)
        self.sizes |= {
            "MB exchanged": ranks.received / 1e6,
            "GB of memory": (memory() - before) / 1e9,
            "rows of an index": packed["packing/rows"] / indices,
            "max/mean cost": packed["packing/max_over_mean_cost"],
            "million tokens": sum(len(part) for rollout in everyone for part in rollout.parts) / 1e6,
        }

    def _replica(
        self, prompts: list[Prompt], number: int, scorer: Scorer, replicas: Replicas
    ) -> list[Rollout]:
        """Return the graded rollouts of a replica; measure them if it is rank 0's."""
        shorter = self.args.shorter
        recipe = make_recipe(self.folder / "model", self.args.limit // shorter, self.args.kept)
        engine = ScriptedEngine(self.args.median // shorter, len(prompts[0].token_ids), self.args.kept)
        if number:
            rollouts, _ = harvest(engine, HarvestPlan(prompts, recipe, [EOS], seed=number), [])
            scorer.score(rollouts)
            return rollouts
        streams = self.folder / f"{self.gpus}" / "streams" / step_name(0)
        file = streams / FILES.replace("*", "0")
        driver = time.thread_time()
        rollouts, _ = self.timed("harvest", lambda: harvested(engine, prompts, recipe, shorter))
        driver = time.thread_time() - driver
        looks = self.seconds["harvest"] - driver  # as many, whatever the lengths
        self.seconds["harvest"] = shorter * (driver - engine.seconds)

        def write() -> None:
            with Recorder(file) as recorder:
                for rollout in rollouts:
                    recorder.write(rollout)

        self.timed("record", write, shorter)
        self.seconds["record"] += looks
        self.timed("score", lambda: scorer.score(replicas.part(rollouts)), shorter)
        scorer.score(rollouts)
        self.timed("grades", lambda: record_grades(file, rollouts))
        written = sum(file.stat().st_size for file in streams.iterdir())
        self.sizes["MB recorded"] = shorter * written / 1e6
        return rollouts


def longer(rollout: Rollout, times: int) -> Rollout:
    """Return the rollout with each part's tokens ``times`` over."""
    return replace(
        rollout, parts=[replace(part, tokens=repeated(part.tokens, times)) for part in rollout.parts]
    )


def repeated(tokens: Tokens, times: int) -> Tokens:
    columns = {name: join([values] * times) for name, values in tokens.columns.items()}
    return Tokens(columns, times * len(tokens))


def with_masks(packing: Packing, kept: int) -> Packing:
    """Return the packing with masks around the tokens of scripted ranks, which send zeros, counts too."""

    def masked(node: Node) -> Node:
        masks = node.tokens.columns.get("kept")
        if not isinstance(masks, Ragged) or isinstance(masks.counts, Placeholder) or masks.counts.any():
            return node
        masks = Ragged(np.zeros(kept * len(masks), np.int32), np.full(len(masks), kept, np.uint8))
        return replace(node, tokens=Tokens({**node.tokens.columns, "kept": masks}, len(node.tokens)))

    return replace(packing, forest=replace(packing.forest, nodes=[masked(n) for n in packing.forest.nodes]))


def skeletons_of(
    rank: int, pool: list[list[Rollout]], prompts: list[Prompt], replicas: Replicas
) -> list[Rollout]:
    """Return what a rank sends to all others: skeletons of the rollouts that it grades. Replica r takes the
    rollouts that replica r modulo the size of ``pool`` made of its prompts."""
    replica, place = divmod(rank, ENGINE_RANKS)
    mine = prompts[replica :: replicas.count]
    rollouts = pool[replica % len(pool)]
    streams = len(rollouts) // len(mine)
    skeletons: list[Rollout] = []
    for number, rollout in enumerate(rollouts):
        prompt = mine[number // streams]
        if (prompt.number // replicas.count + rollout.index) % ENGINE_RANKS == place:
            named = Prompt(prompt.prompt_id, [], "", "", "")
            parts = [replace(part, home=rank) for part in rollout.parts]
            skeletons.append(replace(rollout, prompt=named, parts=parts))
    return skeletons


def answers_of(rollouts: list[Rollout], job: Job, ranks: int) -> list[list[bytes]]:
    """Return what each rank sends in each gather of ``build_minibatches``: what is sent of its rollouts; none
    for what a rank says of all, where others answer as rank 0 does."""
    answers: list[list[bytes]] = []
    homes = {key: r.home or 0 for number, r in enumerate(rollouts) for key in (number, r.prompt_id)}

    def noted(items: list[Any]) -> list[Any]:
        shares: list[list[Any]] = [[] for _ in range(ranks)]
        for item in items if isinstance(items[0], tuple) and isinstance(items[0][0], int | str) else ():
            shares[homes[item[0]]].append(item)
        answers.append([pickle.dumps(share) for share in shares] if any(shares) else [])
        return items

    build_minibatches(rollouts, job, gather=noted)
    return answers


def harvested(
    engine: ScriptedEngine, prompts: list[Prompt], recipe: Recipe, shorter: int, seed: int = 0
) -> tuple[list[Rollout], Metrics]:
    """Harvest and record, the tokens of unfinished rollouts included."""
    with tempfile.TemporaryDirectory() as home, EverySoManySteps(Path(home) / "rank-0.arrow") as recorder:
        assert isinstance(recorder, EverySoManySteps)
        recorder.every = max(1, round(INTERVAL / DECODE_SECONDS / shorter))
        return harvest(engine, HarvestPlan(prompts, recipe, [EOS], seed=seed), [recorder])


def decode_step(folder: Path, requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a decode step while all slots are taken, with lengths of 1/16: forks, pairs
    and ends are then 16 times as frequent, and a fork's prefix as much shorter. Tokens are recorded during
    the harvest."""
    recipe = make_recipe(folder / "model", args.limit // 16, args.kept)
    engine = ScriptedEngine(args.median // 16, PROMPT_TOKENS, args.kept, max_num_seqs=requests)
    prompts = make_prompts(math.ceil(requests / recipe.group_size))
    gc.collect()
    everything, driver = time.process_time(), time.thread_time()
    _, metrics = harvested(engine, prompts, recipe, 1)
    everything, driver = time.process_time() - everything, time.thread_time() - driver
    in_flight = metrics["harvest/slot_occupancy"] * requests
    step = 1e3 / metrics["harvest/engine_steps"] * requests / in_flight
    own = driver - engine.seconds
    return {
        "requests": requests,
        "in flight": in_flight,
        "ms a step": own * step,
        "us/token": 1e6 * own / metrics["harvest/generated_tokens"],
        "recorder's thread": (everything - driver) * step,
    }


class EverySoManySteps(Recorder):
    """Looks at the tracks as often as it would if a decode step took ``DECODE_SECONDS``."""

    steps, every = 0, 1

    def decode_step_finished(self, last: bool = False) -> None:
        self.steps += 1
        super().decode_step_finished(last or self.steps % self.every == 0)


def make_recipe(model: Path, limit: int, kept: int, prompts: int = PROMPTS) -> Recipe:
    rollout = {"max_response_length": limit, "top_k": kept, "keep_sampling_mask": bool(kept)}
    sources = [{"name": "scripted", "reader": "jsonl", "path": str(model / "questions.jsonl")}]
    data = {"sources": sources, "prompts_per_step": prompts, "max_prompt_length": 2 * PROMPT_TOKENS}
    packing = {"max_tokens_per_row": 2 * PROMPT_TOKENS + limit}
    raw = {"name": "host", "steps": 500, "model": {"path": str(model)}, "data": data, "rollout": rollout}
    return parse(raw | {"packing": packing}, "host")


def make_prompts(count: int) -> list[Prompt]:
    return [
        Prompt(f"scripted/{i}", [1 + i] * PROMPT_TOKENS, "?", GRADER, "", "scripted", i) for i in range(count)
    ]


def draw(worlds: list[dict[str, Any]], file: Path) -> None:
    """Write a figure of each stage's seconds against the number of GPUs."""
    from matplotlib.figure import Figure  # slow to import

    from megatron_eqlen.experiments.figures import svg

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="GPUs", ylabel="CPU-seconds a step, rank 0")
    gpus = [world["GPUs"] for world in worlds]
    for stage in worlds[0]["seconds"]:
        values = [world["seconds"][stage] for world in worlds]
        axes.plot(gpus, values, marker=".", label=stage, color="black" if stage == "all" else None)
    axes.axhline(STEP_SECONDS, linestyle=":", color="grey")
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus])
    axes.legend(fontsize=7, ncols=2)
    write_text(file, svg(figure))
