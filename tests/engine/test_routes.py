"""Expert choices of vLLM's CPU build, as harvests record them, against Transformers' routers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer

from megatron_eqlen.environments.environment import Environment, Observation
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record import recorder
from megatron_eqlen.record.partial import HarvestProgress
from megatron_eqlen.record.reader import read_progress, read_step
from megatron_eqlen.tokens import join
from megatron_eqlen.types import Prompt, Rollout
from tests.kit.delta_net import in_float32
from tests.kit.rollout_kit import EOS, folder, open_engine, take_logprobs
from tests.pure.test_environments import speaking
from tests.pure.test_rollout_harvest import make_recipe

PROMPTS = [Prompt(f"p{i}", [5 + i, 6, 7, 8] * 17, "?", "math", "1", number=i) for i in range(4)]
"""Prompts of two and a half blocks of the cache."""


def recipe_of(**over) -> Recipe:
    rollout = {"max_response_length": 60, "max_num_seqs": 64, "keep_routes": True}
    data = {"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 70}
    return make_recipe(rollout=rollout, data=data, **over)


@pytest.fixture(scope="module")
def engine():
    """Return an engine in float32 that tests leave unchanged except for its cache."""
    engine = open_engine(folder("qwen3_moe"), temperature=1.0, keep_routes=True)
    yield engine
    engine.close()


class Counts(Environment):
    """Answers two turns, by one to four tokens."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.random, self.left = random.Random(seed), 2

    def step(self, message: str) -> Observation:
        self.left -= 1
        return Observation("20 " * self.random.randint(1, 4), done=self.left < 0)


def plan_of(answered: bool = False, progress: HarvestProgress | None = None, **over) -> HarvestPlan:
    """``answered``: an environment answers turns, which are short."""
    ends, speak = (range(1, 9), speaking(Counts)) if answered else (EOS, None)
    progress = progress or HarvestProgress()
    return HarvestPlan(PROMPTS, recipe_of(**over), ends, seed=3, progress=progress, conversations=speak)


def harvested(engine, answered: bool = False, **over) -> list[Rollout]:
    return harvest(engine, plan_of(answered, **over))[0]


def paths(rollout: Rollout):
    """Yield the path to the end of each of the rollout's segments, and the path's rows; -1: of an
    environment."""
    for part in rollout.parts:
        whole = rollout.line(part.number)
        tokens = [*rollout.prompt.token_ids, *join([segment.token_ids for segment in whole]).tolist()]
        tables = [rollout.prompt_columns[1:], *(segment.tokens for segment in whole)]
        generated = join([table.is_generated for table in tables])
        rows = join([table["routes"] for table in tables]).astype(np.int64)
        yield tokens, np.where(generated[:, None, None], rows, -1)


def router_logits(model, tokens: list[int], routes: np.ndarray) -> np.ndarray:
    """Return [tokens - 1, layers, experts] float32 router logits, from the input of each layer after earlier
    layers used the experts of ``routes``, where these are not -1."""
    found: list[torch.Tensor] = []

    def replay(router, _, output):
        logits, weights, experts = output
        experts, layer = experts.clone(), len(found)
        rows = torch.from_numpy(routes[:, layer])
        experts[: len(rows)] = torch.where(rows < 0, experts[: len(rows)], rows)
        found.append(logits)
        weights = logits.softmax(-1).gather(1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    gates = (module for name, module in model.named_modules() if name.endswith("mlp.gate"))
    hooks = [gate.register_forward_hook(replay) for gate in gates]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)[:-1].numpy()


def check(path: Path, rollouts: list[Rollout]) -> None:
    """Assert that the rows are Transformers' choice in float32, wherever that is clear of round-off: logits
    differ by up to 1e-5."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    compared, same = [], []
    for rollout in rollouts:
        for tokens, routes in paths(rollout):
            logits = router_logits(model, tokens, routes)
            order = np.argsort(-logits, axis=-1)
            ranked, k = np.take_along_axis(logits, order, -1), routes.shape[-1]
            clear = ranked[..., k - 1] - ranked[..., k] > 1e-3
            clear &= routes[..., 0] >= 0
            same += [*(np.sort(order[..., :k]) == np.sort(routes)).all(-1)[clear]]
            compared.append(clear.mean())
    assert all(same)
    assert np.mean(compared) > 0.5


@pytest.mark.parametrize("sampling", ["equal_length", "tree"])
def test_recorded_experts_are_those_of_transformers(engine, sampling):
    """An environment answers turns, and lines fork in mid-turn."""
    over = (
        {"objective": "treerpo", "tree_sampling": {"branching": 2, "forks": 2}} if sampling == "tree" else {}
    )
    rollouts = harvested(engine, answered=True, sampling=sampling, **over)
    lines = [rollout.line(part.parent) for rollout in rollouts for part in rollout.parts if part.parent >= 0]
    in_turn = [line for line in lines if line[-1].tokens.is_generated[-1]]
    assert any(not segment.tokens.is_generated.all() for line in in_turn for segment in line)
    check(folder("qwen3_moe"), rollouts)


@pytest.mark.parametrize("experts", [8, 256, 257])
def test_experts_are_written_as_narrow_as_vllm_does(experts):
    sizes = {"total_num_hidden_layers": 2, "num_experts": experts, "num_experts_per_tok": 4}
    model = {f"get_{name}": lambda size=size: size for name, size in sizes.items()}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**model, hf_text_config=SimpleNamespace(model_type="any")),
        parallel_config=SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1),
    )
    assert RoutedExpertsCapturer(1, config).output_dtype_name == ("uint8" if experts <= 256 else "uint16")


def test_routes_do_not_depend_on_what_the_cache_held_or_how_a_prefill_was_cut(engine):
    """Cases: a prefix that another request computed, one from a harvest before, prefills of 64 tokens, and a
    cache so small that requests are pushed out of it and computed again."""
    engine.reset_cache()
    want = harvested(engine)
    again, metrics = harvest(engine, plan_of())
    logprobs = take_logprobs(want)
    np.testing.assert_allclose(take_logprobs(again), logprobs, rtol=0, atol=5e-5)
    assert again == want
    tables = [s.tokens for rollout in want for s in rollout.parts]
    tables += [rollout.prompt_columns for rollout in want]
    assert metrics["harvest/route_bytes"] == sum(table["routes"].nbytes for table in tables)
    small = open_engine(
        folder("qwen3_moe"),
        temperature=1.0,
        keep_routes=True,
        vllm={"max_num_batched_tokens": 64},
        kv_cache_gib=0.0005,
    )
    found, metrics = harvest(small, plan_of())
    small.close()
    assert metrics["engine/preemptions"] > 0
    np.testing.assert_allclose(take_logprobs(found), logprobs, rtol=0, atol=5e-5)
    assert found == want


class Killed(Exception):
    pass


def mortal(step, life):
    """Allow ``step`` that many times, then die."""
    steps = iter(range(life))

    def next_step():
        if next(steps, None) is None:
            raise Killed
        return step()

    return next_step


def test_a_killed_harvest_continues_with_the_routes_that_it_had(engine, tmp_path, monkeypatch):
    want = harvested(engine, answered=True)
    monkeypatch.setattr(recorder, "INTERVAL", 0.0)
    monkeypatch.setattr(engine, "step", mortal(engine.step, 50))
    with pytest.raises(Killed), recorder.Recorder(tmp_path / "rank-0.arrow") as killed:
        harvest(engine, plan_of(answered=True), [killed])
    monkeypatch.undo()
    progress = read_progress(tmp_path, PROMPTS, recipe_of())
    tracks = [tokens for partial in progress.partial for tokens in partial.tracks.values()]
    assert len(tracks) > 8
    assert any(not tokens.is_generated.all() for tokens in tracks)
    with recorder.Recorder(tmp_path / "rank-0.arrow") as resumed:
        found, _ = harvest(engine, plan_of(answered=True, progress=progress), [resumed])
    assert read_step(tmp_path) == found
    np.testing.assert_allclose(take_logprobs(found), take_logprobs(want), rtol=0, atol=5e-5)
    assert found == want


def test_routes_follow_a_weight_sync_and_the_hybrid_models():
    weights = load_file(folder("qwen3_next", 1) / "model.safetensors")
    with in_float32():
        engine = open_engine(folder("qwen3_next"), temperature=1.0, keep_routes=True)
        engine.update_weights(iter(weights.items()), 1)
        rollouts, _ = harvest(engine, replace(plan_of(), prompts=PROMPTS[:2]))
        engine.close()
    check(folder("qwen3_next", 1), rollouts[:3])
