"""vLLM's V2 model runner on a CPU, its Triton kernels in Triton's interpreter, against the V1 runner.

    tools/gpuless tests/gpuless/test_v2_runner.py

Each kernel costs milliseconds, so a step takes about 0.1 s.
"""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file
from vllm import envs
from vllm.v1.sample.ops import topk_topp_sampler

from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.rollout.harvest_plan import HarvestPlan
from megatron_eqlen.rollout.vllm.engine import engine_args, lifecycle
from megatron_eqlen.rollout.vllm.engine.colocated import ColocatedEngine
from megatron_eqlen.rollout.vllm.engine.sampler import PathSampler, V2PathSampler
from megatron_eqlen.types import Rollout
from tests.engine.test_routes import PROMPTS, recipe_of
from tests.kit.asynchronous import without_refusal
from tests.kit.rollout_kit import EOS, folder, generate, make_rollout, open_engine, requests

ALL: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 12,
    "top_p": 0.9,
    "min_p": 0.02,
    "logprobs_mode": "processed",
    "keep_sampling_mask": True,
    "keep_columns": ["entropy"],
}


@pytest.fixture(scope="module", autouse=True)
def pytorch_keeps_top_k():
    """vLLM's top-k kernel takes seconds a step in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_topp_sampler, "HAS_TRITON", False)
        yield


def open_on(runner: int, *args: Any, **over: Any) -> ColocatedEngine:
    """Open an engine on vLLM's model runner V1 or V2. Prompts of the tests take several steps."""
    with pytest.MonkeyPatch.context() as patch:
        envs.disable_envs_cache()  # it holds the last engine's runner
        patch.setitem(engine_args.RUNNER, "VLLM_USE_V2_MODEL_RUNNER", str(runner - 1))
        engine = open_engine(*args, **{"max_num_seqs": 8, "max_num_batched_tokens": 64} | over)
    sampler = lifecycle.worker(engine.core).model_runner.sampler
    assert type(sampler) is (PathSampler, V2PathSampler)[runner - 1]
    return engine


@pytest.fixture(scope="module", params=["in turns", "asynchronous"])
def v2(request):
    """Engines that schedule as on CPUs, or as on GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "asynchronous":
            without_refusal(patch)
        engine = open_on(2, folder("qwen3"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected():
    """Return V1's answers to ``requests(8)``."""
    engine = open_on(1, folder("qwen3"))
    answers = generate(engine, requests(8, 16))
    engine.close()
    return answers


def recorded(engine: ColocatedEngine) -> dict[str, list[Any]]:
    """Return everything that an engine sends of eight requests, and its metrics."""
    found: dict[str, list[Any]] = {}
    for name, (context, max_tokens, seed) in requests(8, 16).items():
        engine.submit(name, context, max_tokens, seed)
    while engine.has_unfinished:
        for delta in engine.step():
            columns = {name: [*values] for name, values in delta.columns.items()}
            found.setdefault(delta.request_id, []).append((delta.token_ids, columns, delta.finish_reason))
    found["metrics"] = [engine.metrics()]
    engine.close()
    return found


@pytest.mark.parametrize("scheduling", ["in turns", "asynchronous"])
def test_routes_of_a_harvest_are_those_of_v1(scheduling):
    """Cases: forked and aborted requests, prompts from the cache, requests that a small cache pushed out, and
    new weights."""
    weights = load_file(folder("qwen3_moe", 1) / "model.safetensors")
    sampled = {"temperature": 1.0, "keep_routes": True}
    rollouts: dict[int, list[list[Rollout]]] = {}
    preempted = 0.0
    for runner in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            if (scheduling, runner) == ("asynchronous", 2):
                without_refusal(patch)
            cache = {"kv_cache_gib": 0.0003} if runner == 2 else {}
            engine = open_on(runner, folder("qwen3_moe"), **sampled, **cache)
        for version in (0, 0, 1):
            if version:
                engine.update_weights(weights.items(), version)
            plan = HarvestPlan(PROMPTS[:2], recipe_of(group_size=2), EOS, seed=3)
            found, metrics = harvest(engine, plan)
            rollouts.setdefault(runner, []).append(found)
            preempted += metrics["engine/preemptions"]
        engine.close()
    assert rollouts[2] == rollouts[1]
    assert preempted > 0
    first, again, later = rollouts[2]
    assert first == again != later
    assert any(segment.tokens["routes"].any() for rollout in first for segment in rollout.parts)


def test_v2_has_no_routes_for_the_ranks_of_a_colocated_replica(monkeypatch):
    """vLLM hands them to the scheduler of the first rank, and every rank has one."""
    monkeypatch.setitem(engine_args.RUNNER, "VLLM_USE_V2_MODEL_RUNNER", "1")
    rollout = make_rollout(keep_routes=True, tensor_parallel=2)
    with pytest.raises(ValueError, match=r"rollout\.keep_routes: expected vLLM's V1 .*tensor_parallel: 2"):
        engine_args.engine_args(str(folder("qwen3_moe")), rollout, "float32", 256)
    servers = rollout.model_copy(update={"engine": "server"})
    args = engine_args.engine_args(str(folder("qwen3_moe")), servers, "float32", 256)
    assert args["enable_return_routed_experts"]


@pytest.mark.parametrize("sampling", [{"top_k": 0, "top_p": 1.0}, ALL], ids=["free", "all limits"])
def test_tokens_logprobs_masks_and_entropies_are_those_of_v1(sampling):
    ours, theirs = (recorded(open_on(runner, folder("qwen3"), **sampling)) for runner in (2, 1))
    assert ours == theirs


def test_a_forked_path_continues_as_its_seed_says(v2, expected):
    """Forks find their prefixes in the cache; what they draw is what the unforked path drew."""
    assert generate(v2, requests(8, 16)) == expected
    forks = {
        name: (context + expected[name][0][:8], 8, seed)
        for name, (context, _, seed) in requests(8, 16).items()
        if len(expected[name][0]) > 8
    }
    answers = generate(v2, forks)
    for name, (tokens, _, _, cached) in answers.items():
        assert tokens == expected[name][0][8:]
        assert cached >= 32


def test_an_aborted_requests_name_is_free_at_once_and_none_of_its_tokens_come(v2, expected):
    asked = requests(8, 16)
    for name in ("r0", "r1"):
        v2.submit(name, *asked[name])
    for _ in range(4):
        v2.step()
    v2.abort(["r0"])
    context, max_tokens, seed = asked["r2"]
    v2.submit("r0", context, max_tokens, seed)
    tokens: list[int] = []
    while v2.has_unfinished:
        tokens += [token for delta in v2.step() if delta.request_id == "r0" for token in delta.token_ids]
    assert tokens == expected["r2"][0]


def test_after_a_sync_answers_are_those_of_a_freshly_loaded_v1(v2):
    weights = load_file(folder("qwen3", 1) / "model.safetensors")
    v2.update_weights(weights.items(), policy_version=1)
    fresh = open_on(1, folder("qwen3", 1))
    assert generate(v2, requests(8, 16)) == generate(fresh, requests(8, 16))
    fresh.close()
    v2.update_weights(load_file(folder("qwen3") / "model.safetensors").items(), policy_version=2)


def test_preempted_requests_draw_what_undisturbed_ones_draw(expected):
    """Their ends are in a third block, for which the cache has no place."""
    small = open_on(2, folder("qwen3"), kv_cache_gib=0.0003)
    for name, (context, _, seed) in requests(8).items():
        small.submit(name, context, 30, seed)
    tokens: dict[str, list[int]] = {}
    while small.has_unfinished:
        for delta in small.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert small.metrics()["engine/preemptions"] > 0
    small.close()
    for name, found in tokens.items():
        assert found[:16] == expected[name][0]
