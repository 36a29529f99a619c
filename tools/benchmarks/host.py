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
from megatron_eqlen.types import Metrics, Prompt, Rollout
from tools.benchmarks.scripted import EOS, ScriptedEngine, write_tokenizer
from tools.benchmarks.table import show

PROMPT_TOKENS = 300
STEP_SECONDS = 900
DECODE_SECONDS = 0.025
STEP_TOKENS = 31_000_000
REPLICAS = 4
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
        steps = [decode_step(Path(folder), requests, args) for requests in args.requests]
    results = [line(name, sizes) for name in sizes[-1].seconds]
    in_each = sum(result["of a step"] for result in results if PARTS[result["stage"]])
    show(results, f"{sizes[-1].tokens / 1e6:.2f} million tokens, masks of {args.kept}", args.json)
    print(f"in each step: {in_each:.1%} of {STEP_SECONDS} s")
    show([sizes[-1].bytes], "bytes a token", None)
    if steps:
        show(steps, "a decode step of harvest(), without the engine", None)


@dataclass
class Size:
    """Measurements of one size."""

    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    """Bytes a token."""


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
    prompts = make_prompts(max(1, args.prompts // part))
    streams = folder / f"run-{part}" / "streams" / step_name(0)
    file = streams / FILES.replace("*", "0")
    size = Size()

    def timed(name: str, work: Callable[[], Any]) -> Any:
        gc.collect()
        started = time.process_time()
        result = work()
        size.seconds[name] = time.process_time() - started
        return result

    def write() -> None:
        with Recorder(file) as recorder:
            for rollout in rollouts:
                recorder.write(rollout)

    rollouts, _ = timed("harvest", lambda: harvested(engine, prompts, recipe))
    size.seconds["harvest"] -= engine.seconds
    size.tokens = sum(len(part) for rollout in rollouts for part in rollout.parts)
    timed("record", write)
    scorer = Scorer(RewardRecipe(), load_tokenizer(folder / "model"))
    timed("score", lambda: scorer.score(rollouts))
    timed("grades", lambda: record_grades(file, rollouts))
    timed("read", lambda: read_step(streams))
    written = sum(file.stat().st_size for file in streams.iterdir())
    size.bytes = {"on disk": written / size.tokens, "in memory": resident(rollouts) / size.tokens}
    (trees,), _ = timed("trees", lambda: build_minibatches(rollouts, recipe))
    planned = timed("plan", lambda: plan_rows(trees, recipe.packing.max_tokens_per_row))
    timed("fill", lambda: planned.rows(0))
    return size


def harvested(engine: ScriptedEngine, prompts: list[Prompt], recipe: Recipe) -> tuple[list[Rollout], Metrics]:
    """Harvest and record, the tokens of unfinished rollouts included."""
    with tempfile.TemporaryDirectory() as home, EverySoManySteps(Path(home) / "rank-0.arrow") as recorder:
        return harvest(engine, HarvestPlan(prompts, recipe, [EOS], seed=0), [recorder])


def resident(rollouts: list[Rollout]) -> int:
    """Return the bytes that the rollouts take."""
    sent = pickle.dumps(rollouts)
    gc.collect()
    tracemalloc.start()
    received = pickle.loads(sent)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del received
    return taken


def decode_step(folder: Path, requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a decode step while all slots are taken, with lengths of 1/16: forks, pairs
    and ends are then 16 times as frequent, and a fork's prefix as much shorter. Tokens are recorded during
    the harvest."""
    recipe = make_recipe(folder / "model", args.limit // 16, args.kept)
    engine = ScriptedEngine(args.median // 16, PROMPT_TOKENS, args.kept, max_num_seqs=requests)
    prompts = make_prompts(math.ceil(requests / recipe.group_size))
    gc.collect()
    everything, driver = time.process_time(), time.thread_time()
    _, metrics = harvested(engine, prompts, recipe)
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
    rollout = {"max_response_length": limit, "top_k": kept, "keep_sampling_mask": bool(kept)}
    data = {"sources": [{"name": "scripted", "path": "none"}], "max_prompt_length": PROMPT_TOKENS}
    packing = {"max_tokens_per_row": PROMPT_TOKENS + limit}
    raw = {"name": "host", "steps": 500, "model": {"path": str(model)}, "data": data, "rollout": rollout}
    return parse(raw | {"packing": packing}, "host")


def make_prompts(count: int) -> list[Prompt]:
    grader = "tools.research.coin:Coin"
    return [
        Prompt(f"scripted/{i}", [1 + i] * PROMPT_TOKENS, "?", grader, "", "scripted", i) for i in range(count)
    ]
