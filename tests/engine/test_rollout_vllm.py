"""vLLM's CPU build for real: log-probs and draws against Transformers, syncs against a fresh engine."""

from __future__ import annotations

import math
import os
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_eqlen.rollout.engine import EngineError
from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.rollout.harvest_plan import HarvestPlan
from megatron_eqlen.rollout.record import recorder
from megatron_eqlen.rollout.record.reader import read_progress
from megatron_eqlen.rollout.vllm.engine.draws import uniform
from megatron_eqlen.sampling.track import track_seed
from megatron_eqlen.types import Prompt
from tests.kit.rollout_kit import (
    EOS,
    folder,
    generate,
    open_engine,
    reference_logits,
    requests,
    take_logprobs,
)
from tests.pure.test_rollout_harvest import make_recipe


@pytest.fixture(scope="module")
def engine(opened):
    """Return one engine for tests that do not change it: the paper's sampling, temperature 1."""
    engine = opened(folder("qwen3"), temperature=1.0)
    yield engine
    engine.close()


def kept_set(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return the tokens that sampling keeps, by the definitions: min-p relative to the largest probability,
    the top_k largest, then the fewest of the largest that reach top_p."""
    probs = logits.softmax(-1)
    keep = probs >= min_p * probs.max(-1, keepdim=True).values
    probs = torch.where(keep, probs, 0.0)
    order = probs.argsort(-1, descending=True)
    ranked = probs.gather(-1, order)
    ranked[..., top_k:] = 0
    ranked = ranked / ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    kept_ranked = (before < top_p) & (ranked > 0)
    return torch.zeros_like(keep).scatter(-1, order, kept_ranked)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_those_of_the_declared_mode(mode):
    sampling = {"temperature": 0.6, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    engine = open_engine(folder("qwen3"), logprobs_mode=mode, **sampling)
    asked = requests(16)
    out = generate(engine, asked)
    removed, sampled = [], 0
    for name, (context, _, _) in asked.items():
        tokens, logprobs, reason, _ = out[name]
        logits = reference_logits(folder("qwen3"), context, tokens) / sampling["temperature"]
        kept = kept_set(logits, 12, 0.9, 0.02)
        index = torch.tensor(tokens).unsqueeze(1)
        assert kept.gather(1, index).all(), "a token outside the kept set was drawn"
        if mode == "processed":
            logits = logits.masked_fill(~kept, -math.inf)
        expected = logits.log_softmax(-1).gather(1, index).squeeze(1)
        assert (expected - torch.tensor(logprobs)).abs().max() < 2e-5
        assert reason == ("stop" if tokens[-1] in EOS else "length")
        assert not set(EOS) & set(tokens[:-1])
        removed.append((logits.softmax(-1) * ~kept).sum().item())
        sampled += len(tokens)
    metrics = engine.metrics()
    if mode == "raw":
        assert metrics["engine/removed_probability"] == pytest.approx(sum(removed) / sampled, abs=1e-5)
    engine.close()


def test_the_sampling_mask_is_the_kept_set_and_the_entropy_is_that_of_its_tokens():
    sampling = {"temperature": 0.6, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    engine = open_engine(
        folder("qwen3"), logprobs_mode="processed", keep_sampling_mask=True, max_num_seqs=8,
        keep_columns=["entropy"], **sampling,
    )  # fmt: skip
    asked = requests(16)
    masks = {name: [] for name in asked}
    for name, (context, max_tokens, seed) in asked.items():
        engine.submit(name, context, max_tokens, seed)
    tokens, entropies = {name: [] for name in asked}, {name: [] for name in asked}
    while engine.has_unfinished:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
            masks[delta.request_id] += map(tuple, delta.columns["kept"])
            entropies[delta.request_id] += delta.columns["entropy"]
    engine.close()
    plain = open_engine(folder("qwen3"), logprobs_mode="processed", **sampling)
    expected = generate(plain, asked)
    plain.close()
    for name, (context, _, _) in asked.items():
        assert tokens[name] == expected[name][0], "recording changes no draw"
        logits = reference_logits(folder("qwen3"), context, tokens[name]) / sampling["temperature"]
        kept = kept_set(logits, 12, 0.9, 0.02)
        assert masks[name] == [tuple(row.nonzero()[:, 0].tolist()) for row in kept]
        drawn_from = torch.distributions.Categorical(logits=logits.masked_fill(~kept, -1e9).double())
        assert entropies[name] == pytest.approx(drawn_from.entropy().tolist(), abs=1e-5)


def test_draws_follow_the_kept_distribution(engine):
    """8,000 first tokens of one context; each frequency within 4.5 standard errors."""
    context, count = [9, 10, 11, 12], 8000
    drawn = np.zeros(96)
    for start in range(0, count, 2000):
        out = generate(engine, {f"d{i}": (context, 1, start + i) for i in range(2000)})
        for tokens, *_ in out.values():
            drawn[tokens[0]] += 1
    logits = reference_logits(folder("qwen3"), context, [0])
    kept = kept_set(logits, 20, 0.95, 0.0)
    probs = logits.masked_fill(~kept, -math.inf).softmax(-1)[0].double().numpy()
    assert drawn[probs == 0].sum() == 0
    error = np.sqrt(probs * (1 - probs) / count)
    assert (np.abs(drawn / count - probs) <= 4.5 * error + 1e-12).all()


def test_a_path_depends_on_its_seed_alone(engine):
    """The path does not depend on the batch around it, the cache, or the place where the request was cut."""
    asked = requests(64)
    together = generate(engine, asked)
    engine.reset_cache()
    context, length, seed = asked["r7"]
    alone = generate(engine, {"r7": asked["r7"]})["r7"]
    assert alone[0] == together["r7"][0]
    cut = len(alone[0]) // 2
    rest = generate(engine, {"r7~1": (context + alone[0][:cut], length - cut, seed)})["r7~1"]
    assert alone[0][:cut] + rest[0] == alone[0]
    other = generate(engine, {"r7": (context, length, seed + 1)})["r7"]
    assert other[0] != alone[0]


def test_a_killed_harvest_resumes_with_the_same_tokens(engine, tmp_path, monkeypatch):
    """The real engine computes the recorded tokens in one prefill, while it decoded them before the kill, so
    that the last bit of a log-prob may differ."""
    recipe = make_recipe(rollout={"max_response_length": 60, "max_num_seqs": 64})
    prompts = [Prompt(f"p{i}", [5 + i, 6, 7, 8] * 5, "?", "math", "1", number=i) for i in range(6)]
    want, whole = harvest(engine, HarvestPlan(prompts, recipe, EOS, seed=3))
    engine.reset_cache()
    monkeypatch.setattr(recorder, "INTERVAL", 0.0)
    monkeypatch.setattr(engine, "step", mortal(engine.step, 40))
    with pytest.raises(Killed), recorder.Recorder(tmp_path / "rank-0.arrow") as killed:
        harvest(engine, HarvestPlan(prompts, recipe, EOS, seed=3), [killed])
    monkeypatch.undo()
    engine.reset_cache()
    progress = read_progress(tmp_path, prompts, recipe)
    assert sum(len(partial.tracks) for partial in progress.partial) > 12
    assert progress.generated_tokens > 0.5 * whole["harvest/generated_tokens"]
    found, rest = harvest(engine, HarvestPlan(prompts, recipe, EOS, seed=3, progress=progress))
    np.testing.assert_allclose(take_logprobs(found), take_logprobs(want), rtol=0, atol=5e-6)
    assert found == want
    assert rest["harvest/generated_tokens"] == whole["harvest/generated_tokens"]


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


def test_a_prefill_in_several_steps_changes_nothing(engine, opened):
    """Prompts of 144 tokens through steps of 64, among requests that decode already."""
    small = opened(folder("qwen3"), temperature=1.0, max_num_batched_tokens=64)
    engine.metrics()  # only what follows
    asked = {name: (context * 3, 40, seed) for name, (context, _, seed) in requests(8).items()}
    assert {k: v[0] for k, v in generate(small, asked).items()} == {
        k: v[0] for k, v in generate(engine, asked).items()
    }
    assert small.metrics()["engine/removed_probability"] == pytest.approx(
        engine.metrics()["engine/removed_probability"], rel=1e-4
    )
    small.close()


def test_kv_exhaustion_preempts_and_changes_nothing(engine, opened):
    small = opened(folder("qwen3"), temperature=1.0, kv_cache_gib=0.0004, max_num_seqs=32)
    asked = requests(32, 100)
    assert {k: v[0] for k, v in generate(small, asked).items()} == {
        k: v[0] for k, v in generate(engine, asked).items()
    }
    assert small.metrics()["engine/preemptions"] > 0
    small.close()


def test_building_and_running_leaves_the_process_as_it_was():
    def state():
        return (
            torch.set_num_threads, torch.get_num_threads(), torch.get_default_dtype(),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision(),
            torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(),
            {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        )  # fmt: skip

    old, new = folder("qwen3"), folder("qwen3", 1)
    before = state()
    engine = open_engine(old)
    built = state()
    generate(engine, requests(4))
    engine.update_weights(iter(load_file(new / "model.safetensors").items()), 1)
    ran = state()
    engine.close()
    assert before == built
    assert before == ran
    assert before == state()


def test_unfinished_requests_and_aborts(engine):
    engine.submit("one", [5, 6], 50, 0)
    with pytest.raises(EngineError, match="1 requests are unfinished"):
        engine.update_weights(iter(()), 1)
    with pytest.raises(EngineError, match="1 requests are unfinished"):
        engine.sleep()
    engine.abort(["one", "unknown"])
    assert not engine.has_unfinished
    assert engine.step() == []


def test_an_aborted_requests_name_is_free_at_once_and_none_of_its_tokens_come(engine):
    context, length, seed = requests(1)["r0"]
    want = generate(engine, {"again": (context, length, seed)})["again"]
    engine.submit("again", context, length, seed)
    for _ in range(5):
        engine.step()
    engine.abort(["again"])
    assert generate(engine, {"again": (context, length, seed)})["again"][:3] == want[:3]


def test_what_an_engine_cannot_start_with_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected model\.safetensors or .*, found neither"):
        open_engine(tmp_path)
    with pytest.raises(
        ValueError, match=r"rollout\.kv_cache_gib 1e-05, .* and paths of 256 tokens: No avail"
    ):
        open_engine(folder("qwen3"), kv_cache_gib=1e-5)
    with pytest.raises(ValueError, match=r"rollout\.tensor_parallel: 2 does not divide"):
        open_engine(folder("qwen3"), tensor_parallel=2)
    with pytest.raises(ValueError, match=r"batch_invariant: true .* needs an NVIDIA GPU .* 9\.0, found cpu"):
        open_engine(folder("qwen3"), batch_invariant=True)


def test_the_draws_of_paths_and_positions_are_independent_uniforms():
    """Over 1,000 paths x 1,000 positions: mean, variance, and correlation of neighbours either way."""
    seeds = np.array(
        [track_seed(0, f"p#{i // 16}", i % 16 // 2, i % 2) for i in range(1000)], dtype=np.uint64
    )
    grid = np.broadcast_arrays(seeds[:, None], np.arange(1000, dtype=np.uint64))
    draws = uniform(*grid)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 1 / 2) < 5 / np.sqrt(12 * draws.size)
    assert abs(draws.var() - 1 / 12) < 5 / np.sqrt(180 * draws.size)
    for later, earlier in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1])):
        assert abs(np.corrcoef(later.ravel(), earlier.ravel())[0, 1]) < 5e-3
