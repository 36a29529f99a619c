"""Work of the processors around the accelerators: a scripted engine at the paper's size, scaled down.

    harvest, record ─► score ─► trees ─► plan ─► fill        read: a resume

Three sizes are measured, each with twice the streams and twice the lengths of the one before, so a cost that
grows faster than the tokens shows in the fitted exponent, whatever it grows with. The largest size's cost of
a token is projected to the paper's step: 64 prompts of 8 streams, 60k tokens a stream, in 900 s. Seconds are
of processor time, all threads; the script's own are not counted. What ranks send each other is not measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import pickle
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.files import step_name
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.recipe import Recipe, RewardRecipe
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.rollout.harvest_plan import HarvestPlan
from megatron_eqlen.rollout.record.reader import read_step
from megatron_eqlen.rollout.record.recorder import FILES, INTERVAL, Recorder, record_grades
from megatron_eqlen.types import Grade, Prompt, Rollout
from tools.benchmarks.scripted import EOS, ScriptedEngine, write_tokenizer
from tools.benchmarks.table import show

PROMPT_TOKENS = 300
STEP_SECONDS = 900
DECODE_SECONDS = 0.025
STEP_TOKENS = 31_000_000
REPLICAS = 4
RANKS = 8
"""Number of ranks of a replica, on one node."""
PARTS = {
    "harvest": 1, "record": 0, "grades": 1, "score": 1, "trees": REPLICAS, "plan": REPLICAS, "fill": 1,
    "read": 0,
}  # fmt: skip
"""Number of replicas whose tokens a rank processes in each step. 0: those of one, not in each step or as a
part of ``harvest``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=4, help="of the largest size, 8 streams each")
    parser.add_argument("--median", type=int, default=6000, help="of response lengths, at the largest size")
    parser.add_argument("--limit", type=int, default=32768, help="longest response, at the largest size")
    parser.add_argument("--kept", type=int, default=0, help="tokens in each sampling mask; 0: no masks")
    parser.add_argument("--requests", type=int, nargs="*", default=[256, 512, 1024], help="in flight at once")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder) / "model")
        sizes = [measure(Path(folder), part, args) for part in (4, 2, 1)]
        held = harvest_peak(Path(folder), args)
        steps = [decode_step(Path(folder), requests, args) for requests in args.requests]
    tokens = sizes[-1].tokens
    title = f"{tokens / 1e6:.2f} million tokens, masks of {args.kept}"
    results = [line(name, sizes) for name in sizes[-1].seconds]
    per_step = sum(result["of a step"] for result in results if PARTS[result["stage"]])
    show(results, title, None)
    print(f"in each step: {per_step:.1%} of {STEP_SECONDS} s")
    size = {name: count / tokens for name, count in sizes[-1].bytes.items()}
    show([size], "bytes a token", None)
    show([held], f"bytes a token at the peak of a harvest, by {RANKS} ranks in step", None)
    if steps:
        show(steps, "a decode step of harvest(), without the engine", None)
    if args.json is not None:
        found = {"stages": results, "of a step": per_step, "bytes a token": size}
        found |= {"harvest peak": held, "decode steps": steps}
        args.json.write_text(json.dumps({"title": title} | found, indent=1) + "\n", encoding="utf-8")


@dataclass
class Size:
    """Measurements of one size."""

    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    rollouts: list[Rollout] = field(default_factory=list)


def line(name: str, sizes: Sequence[Size]) -> dict[str, Any]:
    """Return a stage's line: cost of a token, growth exponent, and projection to the paper's size."""
    seconds = [size.seconds[name] for size in sizes]
    token = seconds[-1] / sizes[-1].tokens
    growth = np.polyfit(np.log([size.tokens for size in sizes]), np.log(seconds), 1)[0]
    projected = token * STEP_TOKENS * (PARTS[name] or 1) / REPLICAS
    return {
        "stage": name,
        "us/token": 1e6 * token,
        "growth": float(growth),
        "s at the paper's size": projected,
        "of a step": projected / STEP_SECONDS,
    }


def measure(folder: Path, part: int, args: argparse.Namespace) -> Size:
    """Measure every stage at 1 / ``part`` of the prompts and lengths."""
    recipe = make_recipe(folder / "model", args.limit // part, args.kept)
    engine = ScriptedEngine(args.median // part, PROMPT_TOKENS, args.kept)
    streams = folder / f"run-{part}" / "streams" / step_name(0)
    prompts = make_prompts(max(1, args.prompts // part))
    size = Size()
    rollouts = size.rollouts = harvested(engine, prompts, recipe, size)
    size.tokens = sum(len(part) for rollout in rollouts for part in rollout.parts)
    record(rollouts, streams, size)
    size.bytes["on disk"] = sum(file.stat().st_size for file in streams.iterdir())
    train(rollouts, recipe, size)
    return size


def timed(size: Size, name: str, work: Callable[[], Any]) -> Any:
    gc.collect()
    started = time.process_time()
    result = work()
    size.seconds[name] = time.process_time() - started
    return result


def harvested(engine: ScriptedEngine, prompts: list[Prompt], recipe: Recipe, size: Size) -> list[Rollout]:
    """Harvest and record, the tokens of unfinished rollouts included."""

    def work() -> list[Rollout]:
        with tempfile.TemporaryDirectory() as home, EverySoManySteps(Path(home) / "rank-0.arrow") as recorder:
            return harvest(engine, HarvestPlan(prompts, recipe, [EOS], seed=0), [recorder])[0]

    rollouts = timed(size, "harvest", work)
    size.seconds["harvest"] -= engine.seconds
    return rollouts


def record(rollouts: list[Rollout], folder: Path, size: Size) -> None:
    """Write the rollouts to disk and read them back, grades included."""
    file = folder / FILES.replace("*", "0")

    def write() -> None:
        with Recorder(file) as recorder:
            for rollout in rollouts:
                recorder.write(rollout)

    timed(size, "record", write)
    scorer = Scorer(RewardRecipe(), load_tokenizer(folder.parents[2] / "model"))
    timed(size, "score", lambda: scorer.score(rollouts))
    timed(size, "grades", lambda: record_grades(file, rollouts))
    timed(size, "read", lambda: read_step(folder))


def train(rollouts: list[Rollout], recipe: Recipe, size: Size) -> None:
    """Go from one replica's rollouts to filled rows."""
    size.bytes["skeletons"] = len(pickle.dumps([rollout.skeleton() for rollout in rollouts]))
    size.bytes["in memory"] = resident(pickle.dumps(rollouts))
    (trees,), _ = timed(size, "trees", lambda: build_minibatches(rollouts, recipe))
    planned = timed(size, "plan", lambda: plan_rows(trees, recipe.packing.max_tokens_per_row))
    timed(size, "fill", lambda: planned.rows(0))


def resident(sent: bytes) -> int:
    """Return the bytes that the rollouts take."""
    gc.collect()
    tracemalloc.start()
    rollouts = pickle.loads(sent)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del rollouts
    return taken


def harvest_peak(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return bytes a token of a replica's rank that records, of one that only grades its part, and of the
    node."""
    recipe = make_recipe(folder / "model", args.limit // 4, args.kept)

    def peak(whole: Callable[[Prompt, int], bool]) -> float:
        engine = ScriptedEngine(args.median // 4, PROMPT_TOKENS, args.kept)
        gc.collect()
        tracemalloc.start()
        rollouts, _ = harvest(
            engine, HarvestPlan(make_prompts(2), recipe, [EOS], seed=0, keeps_columns=whole)
        )
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most / sum(len(part) for rollout in rollouts for part in rollout.parts)

    records = peak(lambda prompt, index: True)
    grades = peak(lambda prompt, index: (prompt.number + index) % RANKS == 0)
    paper = (records + (RANKS - 1) * grades) * STEP_TOKENS / REPLICAS
    return {"it records": records, "it grades": grades, "GB a node at the paper's size": paper / 1e9}


def decode_step(folder: Path, requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a decode step while all slots are taken, with lengths of 1/16: forks, pairs
    and ends are then 16 times as frequent, and a fork's prefix as much shorter. Tokens are recorded during
    the harvest."""
    recipe = make_recipe(folder / "model", args.limit // 16, args.kept)
    engine = ScriptedEngine(args.median // 16, PROMPT_TOKENS, args.kept, max_num_seqs=requests)
    prompts = make_prompts(math.ceil(requests / recipe.group_size))
    gc.collect()
    with tempfile.TemporaryDirectory() as home, EverySoManySteps(Path(home) / "rank-0.arrow") as recorder:
        everything, driver = time.process_time(), time.thread_time()
        _, metrics = harvest(engine, HarvestPlan(prompts, recipe, [EOS], seed=0), [recorder])
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

    steps = 0

    def decode_step_finished(self, last: bool = False) -> None:
        self.steps += 1
        super().decode_step_finished(last or self.steps % round(INTERVAL / DECODE_SECONDS) == 0)


def make_recipe(model: Path, limit: int, kept: int) -> Recipe:
    sampling = {"max_response_length": limit, "top_k": kept, "keep_sampling_mask": bool(kept)}
    rollout = sampling | {"logprobs_mode": "processed" if kept else "raw"}
    data = {"sources": [{"name": "scripted", "path": "none"}], "max_prompt_length": PROMPT_TOKENS}
    packing = {"max_tokens_per_row": PROMPT_TOKENS + limit}
    raw = {"name": "host", "steps": 500, "model": {"path": str(model)}, "data": data, "rollout": rollout}
    return parse(raw | {"packing": packing}, "host")


def make_prompts(count: int) -> list[Prompt]:
    grader = f"{__name__}:Coin"
    return [
        Prompt(f"scripted/{i}", [1 + i] * PROMPT_TOKENS, "?", grader, "", "scripted", i) for i in range(count)
    ]


class Coin:
    """A grader that costs nothing: half of the responses are right."""

    def __init__(self, reward: RewardRecipe) -> None: ...

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        return [Grade(float(len(text) % 2), "scored") for text in texts]

    def close(self) -> None: ...
