"""The harvester against plain ``LLM.generate`` with log-probs: engines of the same settings, in turns.

Without ``--model`` a small random Qwen3 is made, whose responses end by chance after about
``--mean-length`` tokens. With ``--experts`` it is a Qwen3-MoE, and a second engine, which records routes
(``rollout.keep_routes``), harvests in turns with the first. The verifier is random, fixed by the response's
tokens, and says correct with probability ``--accuracy``: enough to count effective samples (those with a
non-zero advantage), not to learn.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_eqlen.metrics import (
    HARVEST_FORKS,
    HARVEST_GENERATED_TOKENS,
    HARVEST_OVERHEAD_SECONDS_PER_STEP,
    HARVEST_RECOMPUTED_TOKENS_PER_FORK,
    HARVEST_SLOT_OCCUPANCY,
)
from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.objectives.units import verifier_rewards
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.rollout.harvest_plan import HarvestPlan
from megatron_eqlen.sampling.comparison import all_equal
from megatron_eqlen.types import Grade, Prompt, Rollout
from tools.benchmarks.table import show

VOCABULARY = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: a small random Qwen3)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--slots", type=int, nargs="+", default=[128], help="requests decoded at once")
    parser.add_argument("--max-response-length", type=int, default=512)
    parser.add_argument("--mean-length", type=int, default=200, help="of the random model's responses")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--keep-sampling-mask", action="store_true", help="record what top-k and top-p kept")
    parser.add_argument("--experts", type=int, default=0, help="of each layer, 8 to a token; and with routes")
    parser.add_argument("--accuracy", type=float, default=0.5, help="of the simulated verifier")
    parser.add_argument("--repeat", type=int, default=3, help="medians of so many rounds count")
    parser.add_argument("--kv-cache-gib", type=float, default=2.0)
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_model(Path(folder), args.experts)
        results = [row for slots in args.slots for row in measure(model, slots, args)]
    title = (
        f"{args.prompts} prompts x {args.group_size}, responses up to {args.max_response_length}, "
        f"{args.dtype}, {torch.get_num_threads()} thread(s); per second of processor time"
    )
    show(results, title, args.json)


def make_model(folder: Path, experts: int) -> Path:
    """Make a random Qwen3 of 4 layers x 128, or with ``experts`` a Qwen3-MoE; its draws are near uniform over
    512 tokens."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 65536,
        "tie_word_embeddings": False, "pad_token_id": None,
    }  # fmt: skip
    if experts:
        shape |= {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": 64}
        shape |= {"norm_topk_prob": True}
    config = Qwen3MoeConfig(**shape) if experts else Qwen3Config(**shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def measure(model: Path, slots: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    from megatron_eqlen.rollout.vllm.engine.colocated import ColocatedEngine

    recipe = make_recipe(model, slots, args)
    eos = end_tokens(model, args)
    length = args.prompt_length + args.max_response_length
    engine = ColocatedEngine(model, recipe.rollout, args.dtype, eos, length)
    llm = stock(model, recipe, args.dtype, length)
    prompts = make_prompts(args)
    ways = {
        "generate": lambda: plain(llm, prompts, args, eos, seeded=False),
        "generate, vLLM's seeds": lambda: plain(llm, prompts, args, eos, seeded=True),
        "independent": lambda: harvested(engine, prompts, recipe, eos, "independent", args),
        "equal length": lambda: harvested(engine, prompts, recipe, eos, "equal_length", args),
    }
    engines = dict.fromkeys(["independent", "equal length"], engine)
    if args.experts:
        keeps = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"keep_routes": True})})
        routed = ColocatedEngine(model, keeps.rollout, args.dtype, eos, length)
        ways["equal length, routes"] = lambda: harvested(routed, prompts, keeps, eos, "equal_length", args)
        engines["equal length, routes"] = routed
        ways["equal length, routes"]()
    ways["generate"]()  # compiles and warms up
    resets: dict[str, Callable[[], Any]] = {
        "generate": llm.reset_prefix_cache,
        "generate, vLLM's seeds": llm.reset_prefix_cache,
    }
    for name, each in engines.items():
        resets[name] = each.reset_cache
    rounds = [{name: timed(resets[name], way) for name, way in ways.items()} for _ in range(args.repeat)]
    for opened in set(engines.values()):
        opened.close()
    return [{"slots": slots, "way": name} | summary([r[name] for r in rounds], rounds) for name in ways]


def timed(reset_cache: Callable[[], Any], way: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run once from a cold prefix cache."""
    reset_cache()
    wall, processor = time.perf_counter(), time.process_time()
    found = way()
    return found | {
        "tok/s": found["tokens"] / (time.process_time() - processor),
        "wall tok/s": found["tokens"] / (time.perf_counter() - wall),
    }


def summary(runs: list[dict[str, float]], rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return medians over rounds; the ratio is taken within each round."""
    row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    ratios = [run["tok/s"] / each["generate"]["tok/s"] for run, each in zip(runs, rounds, strict=True)]
    return row | {"÷ generate": statistics.median(ratios)}


def stock(model: Path, recipe: Recipe, dtype: str, length: int) -> Any:
    """Return vLLM's ``LLM`` beside a ``ColocatedEngine`` of the same settings."""
    from vllm import LLM

    from megatron_eqlen.rollout.vllm.engine.containment import contained
    from megatron_eqlen.rollout.vllm.engine.engine_args import engine_args

    with contained():
        return LLM(**engine_args(str(model), recipe.rollout, dtype, length))


def plain(
    llm: Any, prompts: list[Prompt], args: argparse.Namespace, eos: list[int], seeded: bool
) -> dict[str, float]:
    """Call vLLM as a user would: all completions at once, with log-probs of the sampled tokens."""
    from vllm import SamplingParams

    requests = [prompt.token_ids for prompt in prompts for _ in range(args.group_size)]
    params = [
        SamplingParams(
            temperature=1.0, top_k=args.top_k, top_p=args.top_p, max_tokens=args.max_response_length,
            stop_token_ids=eos, detokenize=False, logprobs=0, flat_logprobs=True,
            seed=number if seeded else None,
        )
        for number in range(len(requests))
    ]  # fmt: skip
    outputs = llm.generate(
        [{"prompt_token_ids": token_ids} for token_ids in requests], params, use_tqdm=False
    )
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    nothing = float("nan")
    return {"tokens": tokens, "occupancy": nothing, "forks": 0, "recomputed/fork": nothing,
            "overhead ms/step": nothing, "effective/1k tok": nothing}  # fmt: skip


def harvested(
    engine: Any,
    prompts: list[Prompt],
    recipe: Recipe,
    eos: list[int],
    sampling: str,
    args: argparse.Namespace,
) -> dict[str, float]:
    recipe = recipe.model_copy(update={"sampling": sampling})
    rollouts, metrics = harvest(engine, HarvestPlan(prompts, recipe, eos, seed=0))
    tokens = metrics[HARVEST_GENERATED_TOKENS]
    return {
        "tokens": tokens,
        "occupancy": metrics[HARVEST_SLOT_OCCUPANCY],
        "forks": metrics[HARVEST_FORKS],
        "recomputed/fork": metrics[HARVEST_RECOMPUTED_TOKENS_PER_FORK],
        "overhead ms/step": 1e3 * metrics[HARVEST_OVERHEAD_SECONDS_PER_STEP],
        "effective/1k tok": 1e3 * effective_samples(rollouts, recipe, args.accuracy) / tokens,
    }


def effective_samples(rollouts: list[Rollout], recipe: Recipe, accuracy: float) -> int:
    """Count members of comparison units with unequal rewards: sides of pairs, or completions of groups."""
    count = 0
    for rollout in rollouts:
        for segment, response in rollout.ended():
            segment.grade = Grade(float(coin(response.tolist()) < accuracy), "simulated")
        units = verifier_rewards(rollout, recipe)
        count += sum(len(rewards) for rewards in units if not all_equal(rewards))
    return count


def coin(response: list[int]) -> float:
    """Return a number in [0, 1), fixed by the tokens."""
    return int.from_bytes(hashlib.blake2b(str(response).encode(), digest_size=4).digest()) / 2**32


def make_recipe(model: Path, slots: int, args: argparse.Namespace) -> Recipe:
    rollout = {
        "temperature": 1.0, "top_p": args.top_p, "top_k": args.top_k,
        "keep_sampling_mask": args.keep_sampling_mask,
        "logprobs_mode": "processed" if args.keep_sampling_mask else "raw",
        "max_response_length": args.max_response_length,
        "max_num_seqs": slots, "block_size": args.block_size, "kv_cache_gib": args.kv_cache_gib,
    }  # fmt: skip
    return parse(
        {
            "name": "bench", "steps": 1, "group_size": args.group_size, "model": {"path": str(model)},
            "data": {"sources": [{"name": "none", "path": "none"}], "max_prompt_length": args.prompt_length},
            "rollout": rollout,
        },
        "bench harvest",
    )  # fmt: skip


def end_tokens(model: Path, args: argparse.Namespace) -> list[int]:
    """Return a model's own end tokens, or enough ids to give the random model's near-uniform draws the mean
    length."""
    if args.model is None:
        return list(range(max(1, round(VOCABULARY / args.mean_length))))
    from transformers import GenerationConfig

    eos = GenerationConfig.from_pretrained(model).eos_token_id
    return [eos] if isinstance(eos, int) else list(eos)


def make_prompts(args: argparse.Namespace) -> list[Prompt]:
    rng = random.Random(0)
    return [
        Prompt(f"bench#{i}", [rng.randrange(16, 256) for _ in range(args.prompt_length)], "", "math", "")
        for i in range(args.prompts)
    ]
