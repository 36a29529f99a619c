"""The harvester against plain ``LLM.generate`` with log-probs: engines of the same settings, in turns.

The model is a small random Qwen3, whose responses end by chance after about ``--mean-length`` tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.metrics import (
    HARVEST_FORKS,
    HARVEST_GENERATED_TOKENS,
    HARVEST_OVERHEAD_SECONDS_PER_STEP,
    HARVEST_RECOMPUTED_TOKENS_PER_FORK,
    HARVEST_SLOT_OCCUPANCY,
)
from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.types import Prompt
from tools.benchmarks.table import show

VOCABULARY = 512
PROMPT_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--slots", type=int, default=128, help="requests decoded at once")
    parser.add_argument("--max-response-length", type=int, default=512)
    parser.add_argument("--mean-length", type=int, default=200)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--keep-sampling-mask", action="store_true", help="record what top-k and top-p kept")
    parser.add_argument("--repeat", type=int, default=3, help="medians of so many rounds count")


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        results = measure(Path(folder), args)
    title = (
        f"{args.prompts} prompts x {args.group_size}, {args.slots} slots, responses up to "
        f"{args.max_response_length}, {torch.get_num_threads()} thread(s); per second of processor time"
    )
    show(results, title)


def make_model(folder: Path) -> None:
    """Make a random Qwen3 of 4 layers x 128; its draws are near uniform over 512 tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=65536,
        tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def measure(model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    from vllm import LLM

    from megatron_eqlen.engines.colocated import ColocatedEngine
    from megatron_eqlen.engines.containment import contained
    from megatron_eqlen.engines.vllm_args import engine_args

    recipe = make_recipe(model, args)
    eos = list(range(max(1, round(VOCABULARY / args.mean_length))))
    length = PROMPT_TOKENS + args.max_response_length
    engine = ColocatedEngine(model, recipe.rollout, "float32", eos, length)
    with contained():
        llm = LLM(**engine_args(str(model), recipe.rollout, "float32", length))
    rng = random.Random(0)
    questions = [[rng.randrange(16, 256) for _ in range(PROMPT_TOKENS)] for _ in range(args.prompts)]
    prompts = [Prompt(f"bench#{i}", ids, "", "math", "") for i, ids in enumerate(questions)]

    def harvested(sampling: str) -> dict[str, float]:
        plan = HarvestPlan(prompts, recipe.model_copy(update={"sampling": sampling}), eos, seed=0)
        engine.reset_cache()
        return timed(lambda: harvest(engine, plan)[1])

    def generated() -> dict[str, float]:
        llm.reset_prefix_cache()
        return timed(lambda: generate(llm, prompts, args, eos))

    ways: dict[str, Callable[[], dict[str, float]]] = {
        "generate": generated,
        "independent": lambda: harvested("independent"),
        "equal length": lambda: harvested("equal_length"),
    }
    generated()  # compiles and warms up
    rounds = [{name: way() for name, way in ways.items()} for _ in range(args.repeat)]
    engine.close()
    return [{"way": name} | summary(name, rounds) for name in ways]


def timed(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the metrics of ``work`` by their names in the table."""
    started = time.process_time()
    metrics = work()
    seconds = time.process_time() - started
    return {
        "tokens": metrics[HARVEST_GENERATED_TOKENS],
        "tok/s": metrics[HARVEST_GENERATED_TOKENS] / seconds,
        "occupancy": metrics.get(HARVEST_SLOT_OCCUPANCY, float("nan")),
        "forks": metrics.get(HARVEST_FORKS, 0),
        "recomputed/fork": metrics.get(HARVEST_RECOMPUTED_TOKENS_PER_FORK, float("nan")),
        "overhead ms/step": 1e3 * metrics.get(HARVEST_OVERHEAD_SECONDS_PER_STEP, float("nan")),
    }


def summary(name: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return medians over rounds; the ratio is taken within each round."""
    row = {key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]}
    ratios = [each[name]["tok/s"] / each["generate"]["tok/s"] for each in rounds]
    return row | {"÷ generate": statistics.median(ratios)}


def generate(llm: Any, prompts: list[Prompt], args: argparse.Namespace, eos: list[int]) -> dict[str, float]:
    """Call vLLM as a user would: all completions at once, with log-probs of the sampled tokens."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=1.0, top_k=args.top_k, top_p=args.top_p, max_tokens=args.max_response_length,
        stop_token_ids=eos, detokenize=False, logprobs=0, flat_logprobs=True,
    )  # fmt: skip
    requests = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts for _ in range(args.group_size)]
    outputs = llm.generate(requests, params, use_tqdm=False)
    return {HARVEST_GENERATED_TOKENS: sum(len(output.outputs[0].token_ids) for output in outputs)}


def make_recipe(model: Path, args: argparse.Namespace) -> Recipe:
    rollout = {
        "temperature": 1.0, "top_p": args.top_p, "top_k": args.top_k,
        "keep_sampling_mask": args.keep_sampling_mask,
        "max_response_length": args.max_response_length,
        "max_num_seqs": args.slots, "block_size": 32, "kv_cache_gib": 2.0,
    }  # fmt: skip
    data = {"sources": [{"name": "none", "path": "none"}], "max_prompt_length": PROMPT_TOKENS}
    raw = {"name": "bench", "steps": 1, "group_size": args.group_size, "model": {"path": str(model)}}
    return parse(raw | {"data": data, "rollout": rollout}, "bench harvest")
