"""vLLM's V2 model runner on a CPU, as GPUs use it: its own sampler, masks, routes and speculation, with its
Triton kernels in Triton's interpreter.

    tools/gpuless tests/gpuless/test_v2_runner.py

Each kernel costs milliseconds, so a step takes about 0.1 s.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from vllm import envs
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.sample.sampler import Sampler

from megatron_eqlen.engines import vllm_args
from megatron_eqlen.engines.colocated import ColocatedEngine
from megatron_eqlen.engines.protocol import STOCK, Request
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.types import Rollout
from tests.engine.test_rollout_vllm import deltas_of, kept_set, submit_foreign
from tests.engine.test_routes import PROMPTS, check, recipe_of
from tests.kit.rollout_kit import (
    EOS,
    folder,
    generate,
    make_rollout,
    open_engine,
    reference_logits,
    requests,
    take_logprobs,
)

LIMITS: dict[str, Any] = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
DRAFTS: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.fixture(scope="module", autouse=True)
def pytorch_keeps_top_k():
    """vLLM's top-k kernel takes seconds a step in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_topp_sampler, "HAS_TRITON", False)
        yield


def keep_asynchronous(patch: pytest.MonkeyPatch) -> None:
    """Keep vLLM's decision to schedule a step before the tokens of the last one are known, which it revokes
    on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    platforms = CpuPlatform.check_and_update_config

    def keeping(vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        platforms(vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keeping))


def open_v2(*args: Any, **over: Any) -> ColocatedEngine:
    """Open an engine as on GPUs. Prompts of the tests take several steps."""
    with pytest.MonkeyPatch.context() as patch:
        envs.disable_envs_cache()  # it holds the last engine's runner
        patch.setattr(vllm_args, "VLLM_SAMPLES", True)
        keep_asynchronous(patch)
        engine = open_engine(*args, **{"max_num_seqs": 8, "vllm": {"max_num_batched_tokens": 64}} | over)
    assert type(engine.core.model_executor.driver_worker.worker.model_runner.sampler) is Sampler, "vLLM's own"
    assert engine.stock == STOCK
    return engine


def test_routes_of_a_harvest_are_those_of_transformers():
    """Cases: forked and aborted requests, prompts from the cache, and requests that a small cache pushed out.
    vLLM makes no MoE model beside a dense one, so this comes first."""
    harvests: list[list[Rollout]] = []
    preempted = 0.0
    for gib, times in ((0.02, 2), (0.0003, 1)):
        engine = open_v2(folder("qwen3_moe"), temperature=1.0, keep_routes=True, kv_cache_gib=gib)
        for _ in range(times):
            found, metrics = harvest(engine, HarvestPlan(PROMPTS[:2], recipe_of(group_size=2), EOS, seed=3))
            harvests.append(found)
            preempted += metrics["engine/preemptions"]
        engine.close()
    assert preempted > 0
    assert all(take_logprobs(found).size for found in harvests)
    assert harvests[1:] == harvests[:1] * 2
    check(folder("qwen3_moe"), harvests[0])


@pytest.fixture(scope="module")
def v2():
    engine = open_v2(folder("qwen3"), keep_sampling_mask=True, **LIMITS)
    assert engine.core.vllm_config.scheduler_config.async_scheduling, "vLLM's default"
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(v2):
    """Return tokens and columns of ``requests(8)``."""
    return deltas_of(v2, requests(8, 16))


def test_log_probs_and_masks_are_those_of_the_distribution_that_is_sampled(expected):
    assert_sampled(expected, LIMITS["min_p"])


def test_with_speculation_they_are_so_too():
    limits = LIMITS | {"min_p": 0.0}
    engine = open_v2(folder("qwen3"), keep_sampling_mask=True, vllm={"speculative_config": DRAFTS}, **limits)
    assert_sampled(deltas_of(engine, requests(8, 16)), min_p=0.0)
    engine.close()


def assert_sampled(found: dict[str, dict[str, list]], min_p: float) -> None:
    for name, (context, _, _) in requests(8, 16).items():
        tokens = found[name]["token_ids"]
        logits = reference_logits(folder("qwen3"), context, tokens) / LIMITS["temperature"]
        kept = kept_set(logits, 12, 0.9, min_p)
        assert found[name]["kept"] == [row.nonzero()[:, 0].tolist() for row in kept]
        logprobs = logits.masked_fill(~kept, -math.inf).log_softmax(-1)
        exact = logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(found[name]["logprobs"]), exact, atol=2e-5, rtol=0)


def test_a_forked_path_continues_as_its_seed_says(v2, expected):
    """Forks find their prefixes in the cache; what they draw is what the unforked path drew, and with another
    seed something else."""
    paths = {name: found["token_ids"] for name, found in expected.items() if len(found["token_ids"]) > 8}
    for change in (0, 1):
        forks = {
            name: (context + paths[name][:8], 8, seed + change)
            for name, (context, _, seed) in requests(8, 16).items()
            if name in paths
        }
        for name, (tokens, _, _, cached) in generate(v2, forks).items():
            assert (tokens == paths[name][8:]) == (change == 0)
            assert cached >= 32


def test_other_clients_requests_in_the_batch_change_none_of_ours(v2, expected, monkeypatch):
    submit_foreign(v2, monkeypatch)
    together = deltas_of(v2, dict([*requests(8, 16).items()][:4]))
    for name, found in together.items():
        np.testing.assert_allclose(found["logprobs"], expected[name]["logprobs"], rtol=0, atol=5e-6)
        assert found | expected[name] == expected[name]
    assert {delta.sampler for delta in v2.step()} == {STOCK}
    v2.core.abort_requests([*v2.core.scheduler.requests])


def test_an_aborted_requests_name_is_free_at_once_and_none_of_its_tokens_come(v2, expected):
    asked = requests(8, 16)
    for name in ("r0", "r1"):
        v2.submit(Request(name, *asked[name]))
    for _ in range(4):
        v2.step()
    v2.abort(["r0"])
    context, max_tokens, seed = asked["r2"]
    v2.submit(Request("r0", context, max_tokens, seed))
    tokens: list[int] = []
    while v2.has_unfinished:
        tokens += [token for delta in v2.step() if delta.request_id == "r0" for token in delta.token_ids]
    assert tokens == expected["r2"]["token_ids"]


def test_preempted_requests_draw_what_undisturbed_ones_draw(expected):
    """Their ends are in a third block, for which the cache has no place."""
    small = open_v2(folder("qwen3"), kv_cache_gib=0.0003, **LIMITS)
    found = deltas_of(small, {name: (context, 30, seed) for name, (context, _, seed) in requests(8).items()})
    assert small.metrics()["engine/preemptions"] > 0
    small.close()
    for name, columns in found.items():
        assert columns["token_ids"][:16] == expected[name]["token_ids"]


def test_after_a_sync_answers_are_those_of_a_freshly_loaded_engine(v2):
    weights = load_file(folder("qwen3", 1) / "model.safetensors")
    v2.update_weights(weights.items(), policy_version=1)
    fresh = open_v2(folder("qwen3", 1), **LIMITS)
    assert [tokens for tokens, *_ in generate(v2, requests(8, 16)).values()] == [
        tokens for tokens, *_ in generate(fresh, requests(8, 16)).values()
    ]
    fresh.close()
    v2.update_weights(load_file(folder("qwen3") / "model.safetensors").items(), policy_version=2)


def test_drafts_that_an_engine_cannot_make_are_refused(monkeypatch):
    monkeypatch.setattr(vllm_args, "VLLM_SAMPLES", True)

    def arguments(speculation: dict[str, Any], **over: Any) -> dict[str, Any]:
        rollout = make_rollout(vllm={"speculative_config": speculation}, **over)
        return vllm_args.engine_args(str(folder("qwen3")), rollout, "float32", 256)

    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    assert arguments(mtp, engine="server", servers=["http://a"])["speculative_config"] == mtp
    monkeypatch.setattr(vllm_args, "VLLM_SAMPLES", False)
    with pytest.raises(ValueError, match=r"speculative_config: expected a GPU, found a CPU"):
        arguments(mtp)
    arguments({})
