"""vLLM's CPU build for real: log-probs and draws against Transformers, syncs against a fresh engine."""

from __future__ import annotations

import math
import os
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams

from megatron_eqlen.engines import colocated
from megatron_eqlen.engines.protocol import SAMPLERS, EngineError, Request
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.types import Prompt
from tests.kit.rollout_kit import EOS, folder, generate, make_rollout, open_engine, reference_logits, requests
from tests.pure.test_rollout_harvest import make_recipe

SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}


@pytest.fixture(scope="module")
def engine():
    """Return one engine for tests that do not change it."""
    engine = open_engine(folder("qwen3"), **SAMPLING)
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


def test_log_probs_and_masks_are_those_of_the_distribution_that_is_sampled():
    sampling = {"temperature": 0.6, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    asked = requests(8)
    plain = open_engine(folder("qwen3"), **sampling)
    out = generate(plain, asked)
    plain.close()
    masking = open_engine(folder("qwen3"), keep_sampling_mask=True, **sampling)
    masked = deltas_of(masking, asked)
    masking.close()
    for name, (context, _, _) in asked.items():
        tokens, logprobs, reason, _ = out[name]
        logits = reference_logits(folder("qwen3"), context, tokens) / sampling["temperature"]
        kept = kept_set(logits, 12, 0.9, 0.02)
        index = torch.tensor(tokens).unsqueeze(1)
        assert kept.gather(1, index).all(), "a token outside the kept set was drawn"
        expected = logits.masked_fill(~kept, -math.inf).log_softmax(-1).gather(1, index).squeeze(1)
        assert (expected - torch.tensor(logprobs)).abs().max() < 2e-5
        assert reason == ("stop" if tokens[-1] in EOS else "length")
        assert not set(EOS) & set(tokens[:-1])
        assert masked[name]["token_ids"] == tokens, "recording changes no draw"
        assert masked[name]["kept"] == [row.nonzero()[:, 0].tolist() for row in kept]


def deltas_of(engine, asked: dict) -> dict[str, dict[str, list]]:
    """Run requests; return the tokens and columns of each."""
    for name, (context, max_tokens, seed) in asked.items():
        engine.submit(Request(name, context, max_tokens, seed))
    found: dict[str, dict[str, list]] = {}
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.request_id in asked:
                assert delta.sampler in SAMPLERS
                for name, values in {"token_ids": delta.token_ids, **delta.columns}.items():
                    found.setdefault(delta.request_id, {}).setdefault(name, []).extend(values)
    return found


FOREIGN = {
    "greedy": {"temperature": 0.0},
    "temperature and top-p": {"temperature": 1.3, "top_p": 0.8},
    "log-probs": {"temperature": 0.7, "logprobs": 5},
    "vLLM's seed": {"temperature": 1.0, "seed": 7, "min_p": 0.1},
}


def submit_foreign(engine, monkeypatch) -> None:
    """Start a request of each kind; their prompts take several steps of 64 tokens."""
    with monkeypatch.context() as patch:
        patch.setattr(colocated, "seeded", lambda seed, stock: {})
        for number, (name, params) in enumerate(FOREIGN.items()):
            others = SamplingParams(**{"detokenize": False, "logprobs": 0} | params)
            patch.setattr(engine, "params", others)
            engine.submit(Request(name, [5, 6, 7 + number] * 30, 150, 0))
    engine.requests.clear()
    engine.step()


def test_tokens_that_another_sampler_drew_end_a_harvest(engine, monkeypatch):
    monkeypatch.setattr(colocated, "seeded", lambda seed, stock: {})
    plan = HarvestPlan([Prompt("p", [5, 6], "?", "math", "1")], make_recipe(), EOS, seed=3)
    with pytest.raises(
        EngineError, match="tokens that eqlen or vLLM V2 drew, found tokens of the sampler vLLM V1"
    ):
        harvest(engine, plan)
    engine.abort([*engine.requests])


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


def test_an_evaluation_that_is_greedy_takes_the_likeliest_tokens_and_training_samples_as_before(engine):
    before = generate(engine, requests(2))
    sampled, asked = make_rollout(**SAMPLING), requests(4)
    engine.sample_as(sampled.model_copy(update={"temperature": 0.0}))
    greedy = generate(engine, asked)
    engine.sample_as(sampled)
    for name, (context, _, _) in asked.items():
        likeliest = reference_logits(folder("qwen3"), context, greedy[name][0]).argmax(-1).tolist()
        assert greedy[name][:2] == (likeliest, [0.0] * len(likeliest))
    assert {name: values[:3] for name, values in generate(engine, requests(2)).items()} == {
        name: values[:3] for name, values in before.items()
    }


def test_a_path_depends_on_its_seed_alone(engine):
    """The path does not depend on the batch around it, the cache, or the place where the request was cut."""
    asked = requests(24)
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


def test_a_prefill_in_several_steps_changes_nothing(engine):
    """Prompts of 144 tokens through steps of 64, among requests that decode already."""
    small = open_engine(folder("qwen3"), **SAMPLING, vllm={"max_num_batched_tokens": 64})
    asked = {name: (context * 3, 40, seed) for name, (context, _, seed) in requests(8).items()}
    assert {k: v[0] for k, v in generate(small, asked).items()} == {
        k: v[0] for k, v in generate(engine, asked).items()
    }
    small.close()


def test_kv_exhaustion_preempts_and_changes_nothing(engine):
    small = open_engine(folder("qwen3"), **SAMPLING, kv_cache_gib=0.0004, max_num_seqs=16)
    asked = requests(16, 60)
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
    engine.submit(Request("one", [5, 6], 50, 0))
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
    engine.submit(Request("again", context, length, seed))
    for _ in range(5):
        engine.step()
    engine.abort(["again"])
    assert generate(engine, {"again": (context, length, seed)})["again"][:3] == want[:3]


def test_what_an_engine_cannot_start_with_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # which the last of them sets, also for later tests' jobs
    with pytest.raises(ValueError, match=r"expected model\.safetensors or .*, found neither"):
        open_engine(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"rollout\.kv_cache_gib 1e-05, .*rollout\.block_size \d+ and paths of 256 tokens: No a",
    ):
        open_engine(folder("qwen3"), kv_cache_gib=1e-5)
    with pytest.raises(ValueError, match=r"256 tokens and {'attention_backend': 'none_such'}: Unknown"):
        open_engine(folder("qwen3"), vllm={"attention_backend": "none_such"})
    with pytest.raises(ValueError, match=r"rollout\.tensor_parallel: 2 does not divide"):
        open_engine(folder("qwen3"), tensor_parallel=2)
    with pytest.raises(ValueError, match=r"batch_invariant: true .* needs an NVIDIA GPU .* 9\.0, found cpu"):
        open_engine(folder("qwen3"), batch_invariant=True)
