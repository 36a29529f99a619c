"""Recipes: strict keys, composition, overrides, checks that show the arithmetic, and a dry run's plan."""

import contextlib
import copy
import itertools
import json
import os
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin
from unittest.mock import MagicMock

import pytest
import yaml
from pydantic import ValidationError

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.cli import commands
from megatron_eqlen.environments.environment import Environment
from megatron_eqlen.job import Job, load, parse
from megatron_eqlen.metrics import COST_METRICS
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.models.checkpoint_folder import CheckpointError
from megatron_eqlen.objectives.checks import remarks
from megatron_eqlen.objectives.registry import OBJECTIVES, with_defaults
from megatron_eqlen.processes import cores, events
from megatron_eqlen.processes.hold import Hold
from megatron_eqlen.recipe import Recipe, RecipeError, When, engine_options, others
from megatron_eqlen.recipe import load as recipe_load
from megatron_eqlen.recipe.checks import idle_problems, value_of
from megatron_eqlen.recipe.keys import all_keys, section_in
from megatron_eqlen.recipe.load import dump, load_run
from megatron_eqlen.recipe.yaml_values import read_value, to_yaml
from megatron_eqlen.run import run_folder
from megatron_eqlen.run.run_folder import RunFolder, check_harvest
from tests.kit import ROOT
from tests.kit.recipes import OWN_GRADER

RECIPES = ROOT / "recipes"
SMALL = {
    "name": "small",
    "steps": 3,
    "model": {"path": "m"},
    "data": {"sources": [{"name": "a", "path": "b"}], "max_prompt_length": 100},
    "rollout": {"max_response_length": 100},
}
CARRYING = {
    "rollout": SMALL["rollout"] | {"tokens_per_step": 1000, "carry_over": True, "keep_sampling_mask": True},
    "loss": {"rollout_is": "token"},
}


def small(**changes):
    return parse(SMALL | changes, "test")


DUMPED = dump(small())
SERVED = "rollout.engine=server "
BENCHMARK = "evaluation.benchmarks=[{name: b, path: x}] "
MISTAKES = [
    ("data.sources[0].path=x", "unknown key 'data.sources[0].path' (nearest: 'data.sources.0.path')"),
    ("evaluation.benchmarks=[{name: a, path: b}, {name: a, path: b, limits: 2}]",
     "'evaluation.benchmarks.1.limits' (nearest: 'evaluation.benchmarks.1.limit')"),
    ("lr=1e-3", "unknown key 'lr' (nearest: 'optimizer.lr')"),
    ("rollout.kvcache_gib=3", "(nearest: 'rollout.kv_cache_gib')"),
    ("rollout.temp=1", "unknown key 'rollout.temp' (nearest: 'rollout.temperature')"),
    ("loss.temprature=1", "unknown key 'loss.temprature' (nearest: 'rollout.temperature')"),
    ("wieght=1", "unknown key 'wieght' (nearest: 'data.sources.0.weight')"),
    ("losses.kl_coef=0", "unknown key 'losses.kl_coef' (nearest: 'loss.kl_coef')"),
    ("critic.lr_decay=1", "unknown key 'critic.lr_decay' (another trainer's: no critic, "),
    ("Actor_Rollout_Ref.Actor.Entropy_Coeff=0.1", "(another trainer's: no entropy bonus)"),
    ("deepspeed=zero3", "(another trainer's: Megatron-Core trains the model"),
    ("trainer.total_epochs=3", "unknown key 'trainer.total_epochs' (nearest: 'steps')"),
    ("model=Qwen/Qwen3-0.6B", "model: expected a section, as in key.sub=value, found 'Qwen/Qwen3-0.6B'"),
    ("name=../../x", "name: expected 1 to 100 letters, digits"),
    ("name=..", "found '..'"),
    ("name=''", "found ''"),
    ("seed=4294967296", "seed: Input should be less than 4294967296, found '4294967296'"),
    ("cluster.watchdog_seconds=1e12", "watchdog_seconds: Input should be less than or equal to 1000000000"),
    ("steps=0", "steps: Input should be greater than 0, found '0'"),
    ("objective=gpo", "objective: 'gpo' is not one of"),
    ("group_size=7", "group_size: 7 is odd"),
    ("Learning_Rate=1e-5", "unknown key 'Learning_Rate' (nearest: 'optimizer.lr')"),
    ("objective=GRPO", "(nearest: 'grpo')"),
    ("data.sources.0.grader=mine.score", "found 'mine.score' (nearest: 'mine:score')"),
    ("data.sources.0.grader=my/rules.py:score", "cannot be imported: No module named 'my/rules': a file "
     "my/rules.py is named my.rules:score"),
    ("data.sources.0.grader=rules.py:score", "a file rules.py is named rules:score"),
    ("model.megatron.moe_permute_fuson=true",
     "model.megatron.moe_permute_fuson: the engine has no such option (nearest: 'moe_permute_fusion')"),
    ("model.megatron.moe_permute_fusion=perhaps", "moe_permute_fusion: expected bool, found 'perhaps'"),
    ("rollout.vllm.async_scheduling=7", "rollout.vllm.async_scheduling: expected bool | None, found 7"),
    ("model.megatron.attention_backend=flash cluster.device=cpu", "gpu, found flash with cpu: token trees"),
    ("model.megatron.attention_backend=fused", "attention_backend: expected flash, with cluster.device: gpu"),
    ("model.megatron.hidden_size=3", "hidden_size: refused: the model's config.json says it"),
    ("model.megatron.test_mode=true", "test_mode: refused: this package sets it"),
    ("model.megatron.no_rope_freq=[0,1]", "no_rope_freq: refused: the model's config.json says it"),
    ("model.megatron.glu_linear_offset=0.5", "refused: the model's config.json says it"),
    ("model.megatron.moe_mlp_glu_interleave_size=32", "refused: the model's config.json says it"),
    ("model.megatron.moe_apply_probs_on_input=true", "refused: the model's config.json says it"),
    ("model.megatron.apply_query_key_layer_scaling=true", "refused: the model's config.json says it"),
    ("model.megatron.cuda_graph_impl=local", "cuda_graph_impl: refused: rows differ in length"),
    ("model.megatron.flash_decode=true", "flash_decode: refused: training reads nothing of it"),
    ("model.megatron.attention_dropout=0.1", "refused: a token's log-prob must not depend on chance"),
    ("model.megatron.tp_comm_overlap=true", "tp_comm_overlap: refused: nothing makes its buffers"),
    ("model.megatron.cross_entropy_loss_fusion=true", "refused: attention and loss are not Megatron's"),
    ("model.megatron.context_parallel_size=2", "context_parallel_size: refused: `parallel` says it"),
    ("rollout.vllm.async_schedulin=true", "the engine has no such option (nearest: 'async_scheduling')"),
    ("rollout.vllm.max_num_seqs=3", "rollout.vllm.max_num_seqs: refused: `rollout` has a key for it"),
    ("rollout.vllm.generation_config=auto", "refused: what is sampled must be what is trained"),
    ("rollout.vllm.enable_mamba_cache_stochastic_rounding=true", "refused: what is sampled must be what is"),
    ("rollout.vllm.kv_transfer_config={kv_connector: A}", "cached there would outlive a weight sync"),
    ("rollout.vllm.kv_offloading_size=1", "kv_offloading_size: refused: what other weights have cached"),
    ("packing.max_tokens_per_row=150", "prompt_length 100 + rollout.max_response_length 100 = 200"),
    ("parallel.tensor=3", "tensor 3 x pipeline 1 = 3 does not divide the 1 processes (cluster"),
    ("equal_length.prefix_in_gradient=true", "acts only with packing.layout: expanded"),
    ("equal_length.suffix_reward=mean equal_length.max_pairs=1",
     "equal_length.suffix_reward: mean of one response, with equal_length.max_pairs: 1: no effect"),
    ("rollout.engine=server", "rollout.servers"),
    ("rollout.gpu_memory_utilization=0", "gpu_memory_utilization: Input should be greater than 0, found"),
    ("rollout.temperature=0.001", "temperature: Input should be greater than or equal to 0.01, found"),
    ("rollout.keep_sampling_mask=true rollout.top_k=0", "true needs rollout.top_k from 1 to 255"),
    (BENCHMARK + "evaluation.temperature=0.001", "temperature: expected 0 (greedy), or 0.01 to 2"),
    (BENCHMARK + "evaluation.temperature=2.5", "temperature: expected 0 (greedy), or 0.01 to 2, found '2.5'"),
    ("rollout.temperature=2.5", "rollout.temperature: Input should be less than or equal to 2, found '2.5'"),
    ("data.sources.0.grader=math reward.code_timeout=60", "code_timeout: 60.0 acts only with the grader"),
    ("data.sources.0.grader=tests.kit.rubrics:even_length reward.timeout=60",
     "reward.timeout: 60.0 acts only with the grader math, found tests.kit.rubrics:even_length"),
    ("data.sources.0.grader=shutil:copyfile",
     "data.sources.0.grader: shutil:copyfile: expected a parameter that takes the response, one of "),
    (f"group_size={10**20}", f"group_size: expected at most 1048576, found {10**20}"),
    (BENCHMARK + f"evaluation.samples={10**7}", "evaluation.samples: expected at most 1048576, found 100000"),
    (f"packing.max_tokens_per_row={10**20}", f"max_tokens_per_row: expected at most {10**12}, found 1000"),
    (BENCHMARK.replace("}", f", limit: {10**20}}}"), f"0.limit: expected at most {10**12}, found 10000"),
    ("optimizer.lr=1e300", "optimizer.lr: expected at most 1e+30, found 1e+300"),
    ("rollout.kv_cache_gib=1e300", "rollout.kv_cache_gib: expected at most 1048576, found 1e+300"),
    (f"lora.rank={10**9}", "lora.rank: expected at most 1048576, found 1000000000"),
    (f"rollout.vllm={{max_num_batched_tokens: {10**9}}}", "max_num_batched_tokens: expected at most 1048576"),
    (f"rollout.vllm={{stream_interval: {10**20}}}", f"stream_interval: expected at most {10**12}"),
    ("loss.rollout_rs={seq_max_k2: 1e300}", "rollout_rs.seq_max_k2: expected at most 1e+30, found 1e+300"),
    ("loss.rollout_rs={token_k1: [0.5, 1e300]}", "token_k1.1: expected at most 1e+30, found 1e+300"),
    ("data.sources.0.grader=tests.kit.rubrics:even_length reward.weights={a: -1e300}",
     "reward.weights.a: expected at least -1e+30, found -1e+300"),
    (f"profile.steps=[{10**20}] steps=null gpu_hours=1", f"steps.0: expected at most {10**12}, found 10000"),
    ("reward.timeout=1e6", "reward.timeout: expected at most 100000, found 1000000.0"),
    ("reward.step_timeout=1e10", "reward.step_timeout: expected at most 1000000000, found 10000000000.0"),
    ("rollout.request_timeout=1e20", "rollout.request_timeout: expected at most 1000000000, found 1e+20"),
    ("model.megatron.attention_softmax_in_fp32=true", "softmax_in_fp32: True has no effect: nothing reads"),
    ("model.megatron.num_layers_at_end_in_bf16=1", "end_in_bf16: 1 has no effect: nothing reads"),
    ("model.megatron.clip_grad=-1", "model.megatron.clip_grad: expected 0 to 1e+30, found -1"),
    ("model.megatron.adam_eps=0", "model.megatron.adam_eps: expected 1e-30 to 1, found 0"),
    ("model.megatron.adam_beta2=1", "model.megatron.adam_beta2: expected 0 to 0.9999999, found 1"),
    (BENCHMARK + "evaluation.temperature=0", "samples: 32: with temperature: 0 (greedy) all responses to a"),
    (BENCHMARK + "evaluation.benchmarks.0.temperature=0 evaluation.benchmarks.0.top_k=5", "top_k: 5 has no"),
    (BENCHMARK.replace("]", ", {name: b, path: y}]"), "evaluation.benchmarks: b is the name of 2, whose"),
    (BENCHMARK + "evaluation.benchmarks.0.columns.difficulty=d", "difficulty: d has no effect: neither min_"),
    ("data.sources.0.columns.instruction=i data.instruction_role=none", "i has no effect: data.instruction_"),
    (BENCHMARK.replace("}", ", reader: livecodebench, config: v6}"), "0: config and split have no effect"),
    ("data.sources=[{name: a, path: x}, {name: a, path: y}]", "data.sources: a is the name of 2, whose"),
    (BENCHMARK + "rollout.keep_sampling_mask=true evaluation.top_k=0", "to 255, also in evaluations"),
    ("model.dtype=float32 rollout.quantization=fp8", "fp8 acts only with model.dtype: bfloat16"),
    ("rollout.batch_invariant=true cluster.device=cpu", "true acts only with cluster.device: gpu, found cpu"),
    ("rollout.vllm.speculative_config.method=mtp cluster.device=cpu", "our sampler for CPUs takes no drafts"),
    ("rollout.vllm.speculative_config.method=mtp rollout.min_p=0.1", "needs rollout.min_p: 0, found 0.1"),
    ("rollout.vllm.speculative_config.method=mtp", "expected one of ngram, ngram_gpu with rollout.engine"),
    ("rollout.vllm.speculative_config.model=a", "speculative_config.method: expected one of ngram, ngram_"),
    ("rollout.keep_routes=true rollout.tensor_parallel=2", "found a colocated engine of 2 GPUs"),
    (SERVED + "rollout.servers=[http://a] rollout.park_trainer=all", "all acts only with rollout.engine:"),
    (SERVED + "rollout.servers=[notaurl]", "rollout.servers.0: expected http://HOST:PORT, found 'notaurl'"),
    (SERVED + "rollout.servers=[http://a:b]", "expected http://HOST:PORT, found 'http://a:b'"),
    (SERVED + "rollout.servers=[http://a:1,http://b,http://a:1/]", "servers.2: expected each server once"),
    (SERVED + "rollout.servers=[http://a:80,http://A]", "servers.1: expected each server once, found"),
    ("loss.rollout_is_threshold=[2,1]", "valid number or expected [low, high], found ['2', '1']"),
    ("model.dtype=float32 optimizer.grad_dtype=bfloat16", "bfloat16 acts only with model.dtype: bfloat16"),
    ("model.dtype=float32 optimizer.offload=true", "true acts only with model.dtype: bfloat16"),
    ("optimizer.offload=true optimizer.precision=bfloat16", "bfloat16 acts only with optimizer.offload"),
    ("profile.steps=[2,99] steps=30", "profile.steps: expected steps from 1 to steps, 30, found 99"),
    ("rollout.top_k=-5", "rollout.top_k: Input should be greater than or equal to -1, found '-5'"),
    ("optimizer.lr=1e-6 optimizer.min_lr=1e-5", "min_lr: expected at most optimizer.lr, 1e-06, found 1e-05"),
    ("lora.rank=8 lora.targets=[mlp,head]", "lora.targets"),
    ("lora.rank=8 lora.targets=[mlp,mlp]", "expected each target once, found mlp, mlp"),
    ("lora.targets=[mlp]", "acts only with lora.rank set, found 0"),
    ("lora.rank=8 optimizer.offload=true model.dtype=bfloat16", "true acts only with lora.rank: 0, found 8"),
    ("loss.rollout_is=token loss.rollout_is_threshold=[1.5,5]", "threshold: [1.5, 5.0] leaves out a ratio"),
    ("loss.rollout_is=token loss.rollout_is_threshold=0.5", "agree: expected at least 1"),
    ("loss.rollout_rs={token_k1: 1}", "token_k1: 1 bounds ratios, which are 1 if trainer and"),
    ("loss.rollout_rs={seq_mean_k1: [1, 1]}", "seq_mean_k1: [1.0, 1.0] leaves out a ratio of 1"),
    ("loss.rollout_rs={seq_sum_k1: [0.2, 0.9]}", "seq_sum_k1: [0.2, 0.9] leaves out a ratio of 1"),
    ("data.sources.0.reader=parket", "reader: expected one of jsonl, deepmath, gsm8k, dapo_math,"),
    ("optimizer.lr=1:00:00", "optimizer.lr: Input should be a valid number, unable to parse string as a nu"),
    ("optimizer.lr=true", "string as a number, found 'true'"),
    ("optimizer.lr=0x1f", "string as a number, found '0x1f'"),
    ("optimizer.lr=[1]", "optimizer.lr: Input should be a valid number, found ['1']"),
    ("optimizer.lr={}", "optimizer.lr: Input should be a valid number, found {}"),
    ("loss.rollout_is_threshold=3", "loss.rollout_is_threshold: 3.0 acts only with loss.rollout_is: token or "
     "sequence, found none: leave it at 2.0"),
    ("data.sources.0.columns.question=q data.sources.0.reader=prepared",
     '{"question": "q"} acts only with data.sources.0.reader: jsonl or deepmath or gsm8k or dapo_math or'),
    ("loss.max_num_gen_batches=3", "acts only with loss.dynamic_sampling set, found false"),
    ("rollout.keep_sampling_mask=true objective=rloo loss.old_logprobs=rollout",
     "acts only in an importance ratio, and objective: rloo"),
    ("rollout.quantization=fp8", "fp8 trains tokens that rounded weights sampled, and nothing"),
    ("rollout.vllm.kv_cache_dtype=fp8", "kv_cache_dtype: fp8 samples by rounded keys, and nothing"),
    ("data={}", "missing key 'data.sources'"),
    ("sampling=independent packing.max_tokens_per_row=8192 environment.options.number=x "
     "environment.name=tests.pure.test_recipe:Opened", "options.number: expected int, found 'x'"),
    ("steps", "override 'steps': expected key.sub=value"),
    ("=3", "override '=3': expected key.sub=value"),
    ("steps.more=3", "override 'steps.more=3': steps is a value ('3'), not a section"),
    ("data.sources.9.path=x", "path=x': '9' is not one of the list's numbers 0..0"),
    ("data.sources.\u00b2.path=c", "path=c': '\u00b2' is not one of the list's numbers 0..0"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), MISTAKES)
def test_a_mistake_is_an_error_that_names_the_key(tmp_path, overrides, message):
    path = tmp_path / "r.yaml"
    path.write_text(DUMPED)
    words = re.split(r" (?=[\w.]+=)", overrides)
    with pytest.raises(RecipeError) as error:
        load(path, words)
    assert message in str(error.value)
    assert len(re.findall("found", str(error.value))) < 2, "told once"


@pytest.mark.parametrize("value", ["0.9", None, [0.9]])
def test_a_number_of_the_optimizer_is_one_also_where_megatron_is_not_installed(value, monkeypatch):
    monkeypatch.setattr(engine_options, "_fields", lambda place: {})
    expected = f"model.megatron.adam_beta1: expected 0 to 0.9999999, found {value}"
    with pytest.raises(RecipeError, match=re.escape(expected)):
        small(model={"path": "m", "megatron": {"adam_beta1": value}})


def test_how_benchmarks_are_sampled_needs_some_unless_the_recipe_lists_none():
    for key, value in {"samples": 4, "temperature": 0.5, "max_response_length": 10}.items():
        with pytest.raises(RecipeError, match=f"evaluation.{key}: {value} acts only with evaluation.benchm"):
            small(evaluation={key: value})
        assert small(evaluation={key: value, "benchmarks": []})


@pytest.mark.parametrize("changes", [
    {"evaluation": {"samples": 4}}, {"group_size": 10**20}, {"optimizer": {"lr": 1e300}},
    {"model": {"path": "m", "megatron": {"clip_grad": -1}}},
    {"model": {"path": "m", "megatron": {"attention_softmax_in_fp32": True}}},
    {"reward": {"timeout": 60}, "data": {"sources": [{"name": "a", "path": "b", "grader": "code"}]}},
    {"equal_length": {"pair_count": "effective"}, "teacher": {"path": "t"}},
])  # fmt: skip
def test_a_run_that_began_with_what_is_refused_now_is_read_and_goes_on(changes, tmp_path, monkeypatch):
    """It began with an earlier version, in the folder that the command line's keys name."""
    monkeypatch.chdir(tmp_path)
    (file := tmp_path / "mine.yaml").write_text(text := json.dumps(SMALL | changes))
    assert recipe_load.parse(SMALL | changes, "RUN")
    with pytest.raises(RecipeError) as refused:
        load(file, words := ["loss.epochs=2"])
    (run := Path("runs/small/eqlen-grpo-loss.epochs=2-seed0")).mkdir(parents=True)
    (run / "recipe.yaml").write_text(text)
    assert load(file, words).run_folder == run
    moved = run.rename(tmp_path / "moved")
    with pytest.raises(RecipeError, match=re.escape(str(refused.value))):
        load(file, words)
    assert load(moved / "recipe.yaml", run=moved)
    with pytest.raises(RecipeError, match=r"32\.5 acts only with lora\.rank"):
        load(moved / "recipe.yaml", ["lora.alpha=32.5"], moved)


def test_a_run_whose_engine_has_another_version_here_is_read_and_not_continued(tmp_path):
    (tmp_path / "recipe.yaml").write_text(json.dumps(SMALL | {"rollout": {"vllm": {"brand_new": 1}}}))
    assert load_run(tmp_path).rollout.vllm == {"brand_new": 1}
    with pytest.raises(RecipeError, match=r"rollout\.vllm\.brand_new: the engine has no such option"):
        load(tmp_path / "recipe.yaml", run=tmp_path)


def test_limits_of_graders_may_be_set_where_these_grade_or_rows_or_a_factory_decide(tmp_path, monkeypatch):
    (tmp_path / "limited_graders.py").write_text("def factory(reward):\n    return reward\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for grader in (None, "limited_graders:factory", "code"):
        sources = [{"name": "a", "path": "b", "grader": grader}, {"name": "b", "path": "b", "grader": "math"}]
        data = {"sources": sources, "max_prompt_length": 100}
        assert small(data=data, reward={"timeout": 60, "code_memory_mb": 64, "code_sandbox": "best_effort"})


VALUES = [
    None, False, True, 0, 1, 2, 64, 0.5, 3.0, "", "a", "http://a", "/a", "deepmath", ["a"], [1, 2], ["mlp"],
    [1], [0.1, 0.2, 0.3], {"question": "a"}, {"a": "b"}, {"a": 1.0}, {}, {"token_k2": 2.0}, [],
    [{"name": "b", "path": "c"}],
]  # fmt: skip
"""Values of which each key can hold one, besides those that its type or a condition lists."""


def keys_and_conditions(section=Recipe, prefix="", inherited=()):
    """Yield every key, list items with the number 0, with its field and with when it acts."""
    for name, field in section.model_fields.items():
        own = (condition.within(prefix) for condition in field.metadata if isinstance(condition, When))
        conditions = (*inherited, *own)
        below, is_list = section_in(field.annotation)
        if below is not None:
            yield from keys_and_conditions(below, f"{prefix}{name}.{'0.' * is_list}", conditions)
        if below is None or is_list:
            yield prefix + name, field, conditions


KEYS = {key: (field, conditions) for key, field, conditions in keys_and_conditions()}
LISTED = SMALL | {"evaluation": {"benchmarks": [{"name": "a", "path": "b"}]}}
"""A recipe in which every list of sections has an item."""


def put(raw, key, value):
    """Return a copy of ``raw`` with ``value`` under ``key``."""
    changed = at = copy.deepcopy(raw)
    *parents, last = key.split(".")
    for part in parents:
        at = at[0] if part == "0" else at.setdefault(part, {})
    at[last] = value
    return changed


def takes_a_number(field):
    kinds = {field.annotation, *get_args(field.annotation)}
    kinds |= {get_args(kind)[0] for kind in kinds if get_origin(kind) is Annotated}
    return get_origin(field.annotation) not in (list, dict) and bool(kinds & {int, float})


def test_a_boolean_is_not_a_number_anywhere():
    values = dict.fromkeys((key for key, (field, _) in KEYS.items() if takes_a_number(field)), True)
    assert len(values) > 80
    assert {"loss.kl_coef", "rollout.top_k", "seed", "rollout.mismatch.tolerance"} <= {*values}
    values |= {
        "loss.rollout_is_threshold": [True, 2],
        "loss.rollout_rs": {"token_k3": True},
        "profile.steps": [True],
        "parallel.layers_per_stage": [True],
    }
    for key, value in values.items():
        with pytest.raises(RecipeError, match=rf"{key}\b.*expected a number\b.*, found True"):
            parse(put(LISTED, key, value), "test")


def with_value(raw, key, fits):
    """Return ``raw`` with a value of ``key`` that ``fits``, and with what the key needs to act."""
    field, conditions = KEYS[key]
    for condition in conditions:
        if not condition.is_met(value_of(Recipe.model_validate(raw), condition.key)):
            raw = with_value(raw, condition.key, condition.is_met)
    listed = [choice for kind in (field.annotation, *get_args(field.annotation)) for choice in get_args(kind)]
    needed = (each.values for _, others in KEYS.values() for each in others if each.key == key)
    for value in [*VALUES, *itertools.chain(*needed), *(each for each in listed if isinstance(each, str))]:
        changed = put(raw, key, value)
        with contextlib.suppress(ValidationError):
            if fits(value_of(Recipe.model_validate(changed), key)):
                return changed
    raise AssertionError(f"{key}: no value fits")


def test_every_key_acts_in_some_recipe_and_is_refused_where_another_key_keeps_it_from_acting():
    for key, (field, conditions) in KEYS.items():
        acts = with_value(LISTED, key, lambda value, field=field: value != field.get_default())
        recipe = Recipe.model_validate(acts)
        assert not [*idle_problems(recipe, recipe)]
        for condition in conditions:
            broken = with_value(acts, condition.key, lambda value, met=condition.is_met: not met(value))
            recipe = Recipe.model_validate(broken)
            assert f" acts only with {condition}, found " in next(idle_problems(recipe, recipe))


def test_the_longest_context_is_that_of_a_benchmark_which_allows_more():
    bench = {"name": "a", "path": "b"}
    for benchmarks, longest in ([], 200), ([bench | {"max_response_length": 50}], 200), ([bench], 1100):
        recipe = small(evaluation={"max_response_length": 1000, "benchmarks": benchmarks})
        assert recipe.longest_context == longest


def test_an_own_module_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_rules.py").write_text("def f(response:\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"'broken_rules:f' cannot be imported: SyntaxError: .*line 1"):
        small(data={"sources": [{"name": "a", "path": "b", "grader": "broken_rules:f"}]})


def test_further_options_of_the_engines_have_their_types_and_are_recorded(tmp_path):
    path = tmp_path / "r.yaml"
    vllm = {"async_scheduling": False, "compilation_config": {"a": {"b": [{"c": [1, 2]}]}}}
    path.write_text(yaml.safe_dump(SMALL | {"rollout": SMALL["rollout"] | {"vllm": vllm}}))
    recipe = load(path, ["model.megatron={moe_permute_fusion: true, bias_activation_fusion: true}"])
    assert recipe.rollout.vllm == vllm
    assert recipe.model.megatron == {"moe_permute_fusion": True, "bias_activation_fusion": True}
    assert parse(yaml.safe_load(dump(recipe)), "dump") == recipe


def test_options_of_adamw_go_to_the_optimizer_with_our_defaults():
    given = {"adam_beta2": 0.95, "clip_grad": 2, "moe_permute_fusion": True, "overlap_grad_reduce": True}
    model, ddp, optimizer = Job(small(model={"path": "m", "megatron": given})).megatron
    assert (model, ddp) == ({"moe_permute_fusion": True}, {"overlap_grad_reduce": True})
    assert optimizer == Job(small()).megatron.optimizer | {"adam_beta2": 0.95, "clip_grad": 2}
    defaults = {"weight_decay": 0, "clip_grad": 1, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}
    assert Job(small()).megatron.optimizer == defaults


def test_a_key_that_is_switched_on_as_by_default_is_refused_where_it_cannot_act():
    with pytest.raises(RecipeError, match=r"true acts only with rollout\.keep_routes set, .*: leave it out"):
        small(loss={"router_replay": True})


@pytest.mark.parametrize(("overrides", "remark"), [
    ("steps=30 rollout.carry_over=true rollout.tokens_per_step=9 loss.rollout_rs.token_k1=1e6",
     "loss.rollout_rs alone leaves out what is too far off"),
    ("optimizer.warmup_steps=7 loss.epochs=2", "warmup_steps: 7 is more than the run's 6 updates"),
    ("steps=30 loss.clip_ratio_high=0.3", "loss.clip_ratio_high: nothing is clipped: with one update a step"),
])  # fmt: skip
def test_a_key_that_does_little_is_a_remark(tmp_path, overrides, remark):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(SMALL | {"rollout": SMALL["rollout"] | {"keep_sampling_mask": True}}))
    recipe = load(path, overrides.split())
    (text,) = remarks(Job(recipe))
    assert remark in text


@pytest.mark.parametrize("more", [{"epochs": 2}, {"minibatches": 2}, {"old_logprobs": "rollout"}])
def test_a_clip_that_may_act_is_no_remark(more):
    recipe = small(rollout={"keep_sampling_mask": True}, loss={"clip_ratio_high": 0.3} | more)
    assert not any("clipped" in text for text in remarks(Job(recipe)))


@pytest.mark.parametrize(("key", "text", "value"), [
    ("optimizer.lr", "1e-6", 1e-6), ("optimizer.lr", "2E+3", 2000.0), ("optimizer.lr", ".5", 0.5),
    ("optimizer.lr", "1_000", 1000), ("optimizer.lr", "'7'", 7), ("report.wandb_project", "null", None),
])  # fmt: skip
def test_numbers_are_those_of_yaml_1_2_and_null_unsets_a_text(tmp_path, key, text, value):
    path = tmp_path / "r.yaml"
    path.write_text(dump(small(report={"wandb_project": "a"})))
    assert value_of(load(path, [f"{key}={text}"]), key) == value


TEXTS = ("13", "0123", "0o17", "2026", "1e6", "1:30", "12:00:00", "2026-11-23", "yes", "off", "true", ".5")


@pytest.mark.parametrize("text", TEXTS)
def test_a_key_that_holds_text_keeps_what_looks_like_something_else(tmp_path, text):
    """Cases: in files, on the command line, and in the file that a run writes."""
    path = tmp_path / "r.yaml"
    sources = f"data: {{sources: [{{name: {text}, path: b}}]}}\n"
    path.write_text(f"name: a\ninputs_from: {text}\nsteps: 3\nmodel: {{path: {text}}}\n{sources}")
    recipe = load(path, [f"report.wandb_project={text}", f"data.sources.0.exclude={text}"])
    source = recipe.data.sources[0]
    found = [recipe.inputs_from, recipe.model.path, source.name, source.exclude]
    assert [*found, recipe.report.wandb_project] == [text] * 5
    path.write_text(dump(recipe))
    assert load(path) == recipe


@pytest.mark.parametrize(("text", "message"), [
    ("name: a\nsteps: 3\nname: b\n", "line 3: key 'name' is given twice (first in line 1)"),
    ("loss:\n  kl_coef: 0\n  kl_coef: 1\n", "line 3: key 'loss.kl_coef' is given twice (first in line 2)"),
    ("data: {sources: [{name: a, name: b}]}\n", "line 1: key 'data.sources.0.name' is given twice"),
    ("name: [a\n", "line 2: "),
    ("[" * 2000 + "]" * 2000, "line 1: nested too deeply"),
    ("[" * 200_000, "line 1: nested too deeply"), ("- " * 200_000, "line 1: nested too deeply"),
], ids=["key", "section", "list", "no YAML", "nested", "not closed", "in blocks"])  # fmt: skip
def test_a_file_that_says_a_key_twice_or_is_no_yaml_is_named_with_the_line(tmp_path, text, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: not valid YAML: {message}")
    assert "\n" not in str(error.value)


def test_what_no_batch_script_can_hold_is_refused():
    for value in ("90", "1:30", "24:00:00", "2-12", "2-12:30:00", "UNLIMITED"):
        small(cluster={"time": value})
    for value in ("banana", "1:00\n", "-1", ""):
        with pytest.raises(RecipeError, match=rf"cluster.time: expected .*, found {re.escape(repr(value))}"):
            small(cluster={"time": value})
    with pytest.raises(RecipeError, match=r"run_dir: expected a path in one line, found 'a\\nb'"):
        small(run_dir="a\nb")


@pytest.mark.parametrize(("text", "hint"), [
    ("optimizer.lr: 1e-6", "'optimizer.lr' (in a file optimizer: {lr: ...})"),
    ("rollout: {mismatch.then: end}", "'rollout.mismatch.then' (in a file mismatch: {then: ...})"),
    ("data.sources.0.path: a", "(nearest: 'data.sources.0.path')"),
])  # fmt: skip
def test_a_key_with_dots_in_a_file_is_told_its_section(tmp_path, text, hint):
    (tmp_path / "r.yaml").write_text(f"extends: {RECIPES}/tiny_cpu.yaml\n{text}\n")
    with pytest.raises(RecipeError, match=re.escape(hint)):
        load(tmp_path / "r.yaml")


def test_paths_may_begin_at_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text(dump(small(run_dir="~/runs/x")))
    (tmp_path / "r.yaml").write_text("extends: ~/base.yaml\nmodel: {path: ~/m}\n")
    sources = "[{name: a, path: ~/a.jsonl, exclude: ~/b.jsonl}]"
    recipe = load(tmp_path / "r.yaml", [f"data.sources={sources}"])
    assert recipe.run_folder == tmp_path / "runs/x"
    paths = [recipe.model.path, recipe.data.sources[0].path, recipe.data.sources[0].exclude]
    assert paths == [f"{tmp_path}/{name}" for name in ("m", "a.jsonl", "b.jsonl")]


def test_extends_merges_sections_and_overrides_win(tmp_path):
    (tmp_path / "base.yaml").write_text("steps: 5\nmodel: {path: m, dtype: float32}\noptimizer: {lr: 1e-6}\n")
    child = "extends: base.yaml\nname: child\nmodel: {path: other}\ndata: {sources: [{name: a, path: b}]}\n"
    (tmp_path / "child.yaml").write_text(child)
    recipe = load(tmp_path / "child.yaml", ["optimizer.warmup_steps=3", "data.sources.0.path=c", "seed=4"])
    assert (recipe.steps, recipe.model.path, recipe.model.dtype) == (5, "other", "float32")
    assert recipe.optimizer.lr == 1e-6
    assert (recipe.optimizer.warmup_steps, recipe.data.sources[0].path, recipe.seed) == (3, "c", 4)


def test_mappings_merge_with_those_that_a_file_extends_and_an_empty_one_or_the_command_line_replaces(
    tmp_path,
):
    base = SMALL | {
        "loss": {"rollout_rs": {"token_k1": 3, "seq_max_k2": 40}},
        "rollout": {"top_k": 0, "top_p": 1},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    child, bounds = tmp_path / "child.yaml", "loss.rollout_rs={token_k1: 2}"
    for text, words, found in (
        ("{token_k1: 2}", (), {"token_k1": 2.0, "seq_max_k2": 40.0}),
        ("{}", (), {}),
        ("null", (), None),
        ("{token_k2: 1}", (bounds,), {"token_k1": 2.0}),
        ("{}", ("loss.rollout_rs.token_k1=2",), {"token_k1": 2.0}),
    ):
        child.write_text(f"extends: base.yaml\nloss: {{rollout_rs: {text}}}\n")
        assert load(child, ["rollout.max_response_length=100", *words]).loss.rollout_rs == found


SHIPPED = sorted(path for path in RECIPES.glob("*.yaml") if "methods:" not in path.read_text())  # no sweeps


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_have_no_key_without_effect_and_their_dump_is_the_same_recipe(path, tmp_path):
    recipe = load(path)
    assert [*remarks(Job(recipe))] == []
    (tmp_path / "dump.yaml").write_text(dump(recipe))
    assert load(tmp_path / "dump.yaml") == recipe


NAMED = {"recipes": RECIPES, "tiny": RECIPES / "tiny_cpu.yaml", "large": RECIPES / "qwen3_32b.yaml"}
NAMED["next"] = RECIPES / "qwen3_next_80b.yaml"


@pytest.fixture
def eqlen(capsys, tmp_path):
    """Return a function that runs a command and returns its status and what it printed."""

    def run(words: str) -> tuple[int, str, str]:
        try:
            status = cli.main(words.format(here=tmp_path, **NAMED).split())
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return run


def test_a_run_holds_the_gpus_of_the_servers_it_uses():
    rollout = {"max_response_length": 100, "tensor_parallel": 4, "servers": ["http://a", "http://b"]}
    cluster = {"nodes": 2, "processes_per_node": 8}
    assert small(rollout=rollout | {"engine": "server"}, cluster=cluster).gpus == 16 + 2 * 4
    assert small(cluster=cluster).gpus == 16


@pytest.mark.parametrize(("changes", "text"), [
    ("", "12 processes a rank"),
    ("reward.workers=5", "5 processes a rank"),
    ("rollout.engine=server rollout.servers=[http://a]", "96 processes a rank"),  # rank 0 alone grades
])  # fmt: skip
def test_plan_says_how_many_processes_grade(eqlen, monkeypatch, changes, text):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(96)))
    monkeypatch.setattr(cores, "cgroup_quotas", list)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    printed = eqlen(f"plan {{large}} {changes}")[1]
    assert re.search(f"\ngraders .*{text}", printed)


def test_an_errors_notes_are_printed(capsys, monkeypatch):
    def fail(arguments):
        error = ValueError("x is refused")
        error.add_note("while an answer to prompt q#7 was graded")
        raise error

    monkeypatch.setattr(commands, "plan", fail)
    assert cli.main(["plan", "recipe"]) == 2
    said = "eqlen plan: x is refused (while an answer to prompt q#7 was graded)\n"
    assert capsys.readouterr().err == said


def test_inspect_looks_at_its_paths_before_it_imports(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_eqlen.report.text", None)  # an import fails
    for words in (["nope", "--model", str(tmp_path)], [str(tmp_path), "--model", "nope"]):
        assert cli.main(["inspect", *words]) == 2
        assert capsys.readouterr().err == "eqlen inspect: nope: No such file or directory\n"


PRINTED = [
    ("--version", f"eqlen {version('megatron_eqlen')}\n$"),
    ("train {large} --dry-run", "32.762B parameters(.|\n)*fits"),
    ("plan {next}", "79.674B parameters, 3.5[0-9]*B active for a token"),
    ("plan {large} optimizer.offload=false", "DOES NOT FIT: train: "),
    ("plan {large} steps=3", "WARNING: model.path: .* does not exist; data.sources.0.path: .* does"),
    ("plan {large} steps=3", r"WARNING: optimizer.warmup_steps: 20 is more than .*\n$"),
    ("train {large} --dry-run seed=3 steps=4", "seed: 3\nsteps: 4\n"),
    ("train {large} seed=3 --dry-run steps=4", "seed: 3\nsteps: 4\n"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "printed"), PRINTED)
def test_a_command_prints(eqlen, words, printed):
    status, out, _ = eqlen(words)
    assert status == 0
    assert re.search(printed, out)


LONG = "n" * 300
REFUSED = [
    ("train {tiny} objetive=grpo", "nearest: 'objective'"),
    ("plan {here}/loop.yaml", "eqlen plan: {here}/loop.yaml: no such recipe file\n"),
    ("plan /proc/self/mem", "eqlen plan: /proc/self/mem: Input/output error\n"),
    ("train {here}/extends.yaml", "nope.yaml: no such recipe file ({here}/extends.yaml extends it)"),
    ("train {here}/extends-list.yaml", "extends: expected a recipe file, found ['b.yaml']"),
    ("train {here}/extends-a.yaml", "extends itself"),
    ("train {here}/empty.yaml", "{here}/empty.yaml: expected keys and values, found nothing"),
    ("train {recipes}/paper_tables.yaml", "found a sweep of several: eqlen sweep {recipes}/paper"),
    ("sweep {tiny}", "found a recipe: eqlen train {tiny}"),
    ("compare nope", "eqlen compare: nope: No such file or directory"),
    ("evaluate nope", "eqlen evaluate: nope: no such recipe file"),
    ("evaluate {tiny} --out {here}/empty.yaml/x", "empty.yaml: Not a directory"),
    ("harvest {tiny} --out {here}/empty.yaml", "empty.yaml: Not a directory"),
    ("harvest {tiny} --out {here}/out", "found step-00000000 without recipe.yaml"),  # not written over
    ("evaluate {tiny} --out {here}/out", "eqlen evaluate: {here}/out: exists already"),
    ("train {tiny} model.path={here}/none run_dir={here}/run", "model.path: {here}/none does not exist"),
    ("train {large} run_dir={here}/empty.yaml", "eqlen train: {here}/empty.yaml: Not a directory"),
    ("submit {large} run_dir={here}/empty.yaml", "eqlen submit: {here}/empty.yaml: Not a directory"),
    ("train {large} run_dir={here}/empty.yaml/x/y", "eqlen train: {here}/empty.yaml: Not a directory"),
    (f"train {{large}} run_dir={{here}}/{LONG}", f"eqlen train: {{here}}/{LONG}: File name too long"),
    (f"submit {{large}} run_dir={{here}}/{LONG}", f"eqlen submit: {{here}}/{LONG}: File name too long"),
    ("recipe --from verl {here}/image.yaml", "image.yaml: cannot be read as a configuration: 'utf-8' codec"),
    ("recipe --from verl {here}/empty.yaml A=1", "expected a script to take 'A=1', which other files do not"),
    ("train {large} --all", "eqlen train: expected --all only with --dry-run"),
    ("train {large} --dry-run --from a@1", "--dry-run without --from and --replay"),
    ("sweep {recipes}/paper_tables.yaml --jobs 3 --tables", "--jobs: 3 at a time, but --dry-run and --t"),
    ("evaluate {tiny} --model {here} model.path=a", "model.path=a: --model names another model, {here}"),
    # below the usage
    ("train", "the following arguments are required: recipe\n"),
    ("train {large} --dry-run seed", "train: unrecognized arguments: seed\n"),
    ("train {large} --sed=3", "train: unrecognized arguments: --sed=3\n"),
    ("report run a=b", "report: unrecognized arguments: a=b\n"),
    ("plan {tiny} --servers 2 rollout.servers=[http://a]", "[http://a]: --servers 2 starts the servers and"),
    ("submit {tiny} --servers 2 rollout.engine=colocated", "engine=colocated: --servers 2 starts the"),
    (f"plan {{tiny}} --servers {10**11}", f"--servers: expected at most 10000 nodes, found {10**11}"),
    ("plan {large} --servers -1", "argument --servers: expected a number from 1 on, found '-1'\n"),
    ("sweep s.yaml --jobs 0", "argument --jobs: expected a number from 1 on, found '0'\n"),
    ("convert hf-to-megatron a b --tensor 0", "error: --tensor: expected a number from 1 on, found 0\n"),
    ("train {tiny} --steps 3", " arguments: --steps 3 (a recipe key is given without dashes: steps=3)\n"),
    ("train {tiny} --optimizer.lr=1e-5", " (a recipe key is given without dashes: optimizer.lr=1e-5)\n"),
    ("train {tiny} --group-size --dry-run", " (a recipe key is given without dashes: group_size=VALUE)\n"),
    ("train {tiny} --stepz 3", "unrecognized arguments: --stepz 3\n"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_a_mistaken_command_is_told_what_is_wrong_in_one_line(eqlen, tmp_path, words, message):
    for name, text in (("", "nope.yaml"), ("-list", "[b.yaml]"), ("-a", "extends-b.yaml")):
        (tmp_path / f"extends{name}.yaml").write_text(f"extends: {text}\n")
    (tmp_path / "extends-b.yaml").write_text("extends: extends-a.yaml\n")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "image.yaml").write_bytes(b"\xff\xd8")
    (tmp_path / "out/step-00000000").mkdir(parents=True)
    status, _, error = eqlen(words)
    usage, _, _ = error.rpartition("\neqlen")
    assert status == 2
    assert message.format(here=tmp_path, **NAMED) in error
    assert usage.startswith("usage: ") or error.count("\n") == 1


def test_a_run_does_not_begin_in_the_folder_of_another(tmp_path):
    run = tmp_path / "run"
    RunFolder(first := small(run_dir=str(run))).open(first)
    (tmp_path / "link").symlink_to(run / "streams")
    for inside in (run / "streams", run / "streams/new", tmp_path / "link", tmp_path / "link/new"):
        recipe = small(run_dir=str(inside))
        with pytest.raises(RecipeError, match=rf"^run_dir: .*, found {inside} in {run}$"):
            RunFolder(recipe).check(recipe)
    beside = small(run_dir=str(tmp_path / "other"))
    RunFolder(beside).check(beside)
    within = small(run_dir=str(run / "probes/step-00000001/weights"))  # a probe's
    RunFolder(within).open(within)
    RunFolder(within).check(within)


def test_a_start_that_made_nothing_leaves_room_for_another_recipe_and_other_inputs(tmp_path):
    recipe = small(run_dir=str(tmp_path / "run"))
    RunFolder(recipe).open(recipe)
    (tmp_path / "run" / "contents.json").write_text("{}")
    assert RunFolder(recipe).is_empty()
    other = small(run_dir=str(tmp_path / "run"), optimizer={"lr": 1.0})
    RunFolder(other).open(other)
    assert "lr: 1.0" in (tmp_path / "run" / "recipe.yaml").read_text()
    assert not (tmp_path / "run" / "contents.json").exists()


MADE = (
    "metrics.jsonl", "evaluation/before.json", "evaluation/after.json", "export", "streams/step-00000000",
    "checkpoints/step-00000001", "a checkpoint that was saved and is gone",
)  # fmt: skip


@pytest.mark.parametrize("made", MADE)
def test_a_folder_in_which_a_start_made_anything_keeps_its_recipe(tmp_path, made):
    recipe, other = (small(run_dir=str(tmp_path / "run"), optimizer={"lr": lr}) for lr in (0.5, 1.0))
    RunFolder(recipe).open(recipe).close()
    if "/" in made or "." in made or made == "export":
        (tmp_path / "run" / made).mkdir(parents=True)
    else:
        events.append(tmp_path / "run", "saved", step=1)
    assert not RunFolder(recipe).is_empty()
    with pytest.raises(RecipeError, match=r"optimizer\.lr: 0\.5 -> 1\.0"):
        RunFolder(other).open(other)


def run_of_three_steps(folder: Path) -> Path:
    """Make a run with checkpoints after steps 2 and 3, evaluated before and after them."""
    for step in ("step-00000002", "step-00000003"):
        checkpoint = folder / "checkpoints" / step
        checkpoint.mkdir(parents=True)
        (checkpoint / "common.pt").write_text(step)
        checkpoint_folder.write_manifest(checkpoint, checkpoint_folder.describe(checkpoint, ["common.pt"]))
    for name in ("metrics.jsonl", "evaluation/before.json", "evaluation/after.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    for number in range(3):
        (folder / f"streams/step-0000000{number}").mkdir(parents=True)
        (folder / f"streams/step-0000000{number}/rank-0.arrow").touch()
    return folder


@pytest.mark.parametrize("carries", [True, False])
def test_a_run_that_begins_from_a_step_has_what_was_known_then_and_no_damaged_weights(tmp_path, carries):
    source, run = run_of_three_steps(tmp_path / "source"), tmp_path / "run"
    recipe = small(run_dir=str(run), **(CARRYING if carries else {}))
    folder = RunFolder(recipe)
    (weights := source / "checkpoints/step-00000002/common.pt").write_text("step-0000000!")
    with pytest.raises(CheckpointError, match=r"common\.pt: damaged: expected crc32"):
        folder.begin_from(f"{source}@2", recipe)
    weights.write_text("step-00000002")
    half = run / "checkpoints/.step-00000002.partial"  # a start that was killed while it copied
    half.mkdir()
    (half / "common.pt").write_text("step")
    folder.begin_from(f"{source}@2", recipe)
    checkpoint = [f"checkpoints/step-00000002/{name}" for name in ("common.pt", "manifest.json")]
    expected = {"events.jsonl", "metrics.jsonl", "evaluation/before.json", "checkpoints/latest", ".lock"}
    expected |= {*checkpoint}
    expected |= {"streams/step-00000001/rank-0.arrow"} if carries else set()  # the last step's rollouts
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} == expected
    assert (run / "evaluation/before.json").read_text() == "evaluation/before.json"


def test_a_run_can_write_to_what_it_copied_of_a_run_that_is_kept_read_only(tmp_path):
    source, run = run_of_three_steps(tmp_path / "source"), tmp_path / "run"
    (kept := source / "streams/step-00000001/environments").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/run.sh").touch(0o555)
    (kept / "tools").symlink_to(tmp_path / "tools")
    for path in (*source.rglob("*"), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    recipe = small(run_dir=str(run), **CARRYING)
    RunFolder(recipe).begin_from(f"{source}@2", recipe)
    copied = run / "streams/step-00000001/environments/tools"
    assert not copied.is_symlink()
    assert os.access(copied / "run.sh", os.X_OK), "a state's programs stay programs"
    assert [path for path in run.rglob("*") if not path.stat().st_mode & 0o200] == []


def test_a_run_whose_copying_of_a_step_was_killed_does_not_begin_without_it(tmp_path, monkeypatch):
    source, run = run_of_three_steps(tmp_path / "source"), tmp_path / "run"
    folder = RunFolder(recipe := small(run_dir=str(run)))
    with monkeypatch.context() as killed:
        killed.setattr(checkpoint_folder, "copy", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder.begin_from(f"{source}@2", recipe)
    expected = f"holds no checkpoint, but this run begins from {source}@2: give --from {source}@2, give"
    assert expected in (folder.lost_checkpoints() or "")
    folder.begin_from(f"{source}@2", recipe)
    assert checkpoint_folder.latest(folder.checkpoints)


def test_of_two_starts_from_other_steps_the_later_one_is_refused(tmp_path, monkeypatch):
    source, run = run_of_three_steps(tmp_path / "source"), tmp_path / "run"
    folder = RunFolder(recipe := small(run_dir=str(run), steps=4))

    def after_another(path: Path) -> Hold:
        monkeypatch.setattr(run_folder, "Hold", Hold)
        folder.begin_from(f"{source}@3", recipe)  # while this one waits
        return Hold(path)

    monkeypatch.setattr(run_folder, "Hold", after_another)
    with pytest.raises(RecipeError, match=r"source@2: .*/run has begun, .*/source@3$"):
        folder.begin_from(f"{source}@2", recipe)


def test_a_run_that_has_only_copied_the_step_it_begins_from_takes_another_recipe(tmp_path):
    source, run = run_of_three_steps(tmp_path / "source"), tmp_path / "run"
    recipe, other = (
        small(run_dir=str(run), model={"path": path}, **CARRYING) for path in ("refused", "right")
    )
    for each in (recipe, recipe, other):
        folder = RunFolder(each)
        folder.begin_from(f"{source}@2", each)
        folder.open(each).close()
        assert f"path: {each.model.path}" in folder.recipe.read_text()
    for own in ("streams/step-00000002", "checkpoints/step-00000003", "evaluation/after.json", "export"):
        (run / own).mkdir()
        RunFolder(other).begin_from(f"{source}@2", other)
        with pytest.raises(RecipeError, match="'right' -> 'refused'"):
            RunFolder(recipe).check(recipe)
        (run / own).rmdir()


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ({"steps": 2}, "steps: expected a limit beyond .*source@2, found 2 of 2 steps: this run would end"),
        ({"steps": 9, "gpu_hours": 0.25}, "gpu_hours: expected .*found 2 of 9 steps, 0.5 of 0.25 GPU"),
    ],
)
def test_a_run_is_refused_whose_limit_was_reached_at_the_step_that_it_begins_from(tmp_path, limit, found):
    source, run = run_of_three_steps(tmp_path / "source"), tmp_path / "run"
    lines = [
        {"step": step, "time": 0.0, COST_METRICS["gpu_hours"]: hours} for step, hours in ((1, 0.2), (2, 0.5))
    ]
    (source / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = small(run_dir=str(run), **limit)
    with pytest.raises(RecipeError, match=found):
        RunFolder(recipe).begin_from(f"{source}@2", recipe)
    assert not run.exists()
    RunFolder(recipe).begin_from(f"{source}@2", small(run_dir=str(run), steps=3, gpu_hours=0.6))
    assert (run / "checkpoints/step-00000002").is_dir()


def test_a_run_that_has_begun_keeps_its_recipe_until_a_longer_one_is_accepted(tmp_path):
    recipe, longer = (small(run_dir=str(tmp_path / "run"), steps=steps) for steps in (3, 9))
    hold = RunFolder(recipe).open(recipe)
    (tmp_path / "run/streams/step-00000000").mkdir(parents=True)
    hold.close()
    folder, stored = RunFolder(longer), tmp_path / "run/recipe.yaml"
    before = stored.read_text()
    stored.write_text(before.replace("  keep_sampling_mask: false\n", ""))  # of before there was this key
    assert stored.read_text() != before
    folder.open(longer)
    assert "steps: 3" in stored.read_text(), "its inputs may still refuse it"
    folder.write_recipe(longer)
    assert "steps: 9" in stored.read_text()


def test_a_run_that_has_begun_keeps_the_commit_of_its_model(tmp_path):
    here, pinned = {"run_dir": str(tmp_path / "run")}, {"path": "ann/tiny", "revision": "a" * 40}
    RunFolder(recipe := small(model=pinned, **here)).open(recipe)
    (tmp_path / "run/streams/step-00000000").mkdir(parents=True)
    RunFolder(recipe).check(small(model={"path": "ann/tiny"}, **here))
    with pytest.raises(RecipeError, match=r"model.revision: 'a{40}' -> 'b{40}'"):
        RunFolder(recipe).check(small(model=pinned | {"revision": "b" * 40}, **here))


def test_a_run_that_goes_on_after_its_end_keeps_what_it_exported_and_evaluated(tmp_path):
    folder = RunFolder(small(run_dir=str(tmp_path)))
    for name in ("export/model.safetensors", "adapter/adapter_config.json", "evaluation/after.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "time": 1.0}\n')
    folder.reopen()
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.is_file()}
    ended = {"export-step-00000003/model.safetensors", "adapter-step-00000003/adapter_config.json"}
    assert found == {"metrics.jsonl", "evaluation/step-00000003.json", *ended}


def test_a_harvest_has_a_folder_of_its_own_or_completes_its_own(tmp_path):
    recipe, other, run = small(seed=1), small(seed=2), tmp_path / "run"
    check_harvest(tmp_path / "new", recipe)
    (tmp_path / "cut off/step-00000000").mkdir(parents=True)
    (tmp_path / "cut off/recipe.yaml").write_text(dump(small(seed=1, cluster={"time": "9:00"})))
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed/recipe.yaml").write_text(dump(small(seed=5)))
    events.append(tmp_path / "cut off", "harvest")
    for name in ("failed", "cut off"):
        (tmp_path / name / "contents.json").write_text("{}")
        check_harvest(tmp_path / name, recipe)
    kept = [str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/contents.json")]
    assert kept == ["cut off/contents.json"], "one that recorded nothing may read other inputs"
    (run / "streams/step-00000000").mkdir(parents=True)
    (run / "recipe.yaml").write_text(dump(recipe))
    (run / "metrics.jsonl").touch()
    (tmp_path / "foreign/step-00000003").mkdir(parents=True)
    (tmp_path / "link").symlink_to(run / "streams")
    for out, message in (
        (run, f"found the run {run}"),
        (run / "streams", f"found the run {run}"),
        (run / "streams/new", f"found the run {run}"),
        (tmp_path / "link", f"found the run {run}"),
        (tmp_path / "foreign", "found step-00000003 without recipe.yaml"),
    ):
        with pytest.raises(ValueError, match=rf"^--out {out}: .*{message}.* choose another --out$"):
            check_harvest(out, recipe)
    (tmp_path / "loop").symlink_to("loop")
    check_harvest(tmp_path / "loop", recipe)  # who makes the folder says that it cannot
    with pytest.raises(ValueError, match=r"holds a harvest with another recipe \(seed: 1 -> 2\)"):
        check_harvest(tmp_path / "cut off", other)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_defaults_written_out_are_the_same_objective(name):
    """The recipe that states all of them also loads."""
    named = {"reward": {"weights": {"right": 1.0}}, "data": SMALL["data"] | OWN_GRADER}
    named = named if name == "gdpo" else {}
    trees = {"sampling": "tree", "tree_sampling": {"forks": 1}} if name in ("treerpo", "grpo_ma") else {}
    before = small(**{"objective": name, "sampling": "independent"} | named | trees)
    after = with_defaults(Job(before))
    assert Job(after).objective == Job(before).objective
    assert parse(yaml.safe_load(dump(after)), "dump") == after


def test_plan_prints_the_objectives_defaults_and_not_null(eqlen):
    asked = "plan {large} objective=dapo sampling=independent"
    printed, _, plan = eqlen(f"{asked} --all")[1].partition("layout      ")
    loss = yaml.safe_load(printed)["loss"]
    text = "clip_ratio_low: 0.2\nclip_ratio_high: 0.28\nclip_ratio_c: 10.0\nloss_agg_mode: token-mean\n"
    text += "overlong_buffer: 4096\noverlong_factor: 1.0\ndynamic_sampling: true\n"
    assert yaml.safe_load(text).items() <= loss.items()
    (line,) = (line for line in plan.splitlines() if line.startswith("objective"))
    assert "clip_ratio_c 10.0, " in line
    assert "overlong_buffer 4096, overlong_factor 1.0, dynamic_sampling true" in line
    assert "null" not in line
    changed, _, again = eqlen(asked)[1].partition("layout      ")
    assert again == plan
    recipe = yaml.safe_load(changed)
    assert (recipe["objective"], recipe["sampling"], "loss" in recipe) == ("dapo", "independent", False)
    assert "null" not in changed


@pytest.mark.parametrize(("text", "fault"), [
    ("optimizer: &x {lr: *x}", "line 1: 'optimizer.lr' contains itself"),
    ("data: &x [[*x]]", "line 1: 'data.0.0' contains itself"),
    ("a: &a [" + "x, " * 999 + "x]\nb: &b [" + "*a, " * 999 + "*a]\nc: [*b]", "more than 1,000,000 values"),
    ("".join(f"k{n}: 1\n" for n in range(5000)), "unknown key 'k0'.*and more: 5003 errors in all"),
    ("name: x\nsteps: [" + "1, " * 20_000 + "1]", r"steps: .{,600}$"),
])  # fmt: skip
def test_a_recipe_of_any_size_and_shape_is_refused_in_short(eqlen, tmp_path, text, fault):
    (tmp_path / "odd.yaml").write_text(text)
    code, _, error = eqlen(f"plan {tmp_path / 'odd.yaml'}")
    assert (code, len(error) < 5000, bool(re.search(fault, error))) == (2, True, True), error[:500]


@pytest.mark.parametrize("key", ["batch_size", "rollout.batch_size"])
def test_the_nearest_key_is_named_only_where_it_is_near(eqlen, key):
    error = eqlen("plan {large} " + key + "=3")[2]
    assert f"unknown key '{key}'" in error
    assert "nearest" not in error


@pytest.mark.parametrize(("key", "went"), others.read_table()["went"].items())
def test_a_key_that_went_is_refused_with_its_new_place_and_carried_from_what_runs_stored(tmp_path, key, went):
    """A stored recipe has all keys: those with the default that they had go, others get their new place."""
    *sections, name = key.split(".")

    def stored(value):
        plain = at = small().model_dump(mode="json")
        for section in sections:
            at = at[section][0] if isinstance(at[section], list) else at[section]
        at[name] = value
        (tmp_path / "recipe.yaml").write_text(to_yaml(plain))
        return load_run(tmp_path)

    assert stored(went["was"]) == small()
    if new := re.fullmatch(r"(\w+)\.(\w+)\.(\w+)", went["to"]):
        values = {"false": True, "8192": 4096, "alltoall": "allgather", "{}": {"method": "ngram"}}
        value = values.get(str(went["was"]).lower(), 0.5)
        assert getattr(getattr(stored(value), new[1]), new[2]) == {new[3]: value}
    elif key not in map(".".join, all_keys()):
        shown = key.replace("sources", "sources.0")
        refused = re.escape(f"unknown key {shown!r} (it went to {went['to']})")
        with pytest.raises(RecipeError, match=refused):
            stored(2)
        (tmp_path / "other.yaml").write_text((tmp_path / "recipe.yaml").read_text())
        with pytest.raises(RecipeError, match=refused):
            load(tmp_path / "other.yaml")


@dataclass(frozen=True)
class Point:
    x: int
    y: int


class Opened(Environment):
    """Has options of several types."""

    def __init__(self, prompt, seed, text: str = "", number: int = 0, flag: bool = False, rate: float = 0.0,
                 either: "int | str" = 0, mode: Literal["1", "on"] = "on", names: tuple[str, ...] = (),
                 nowhere: "Nowhere" = None, free=None, place: Path = Path(),  # noqa: F821
                 point: Point = Point(0, 0)):  # fmt: skip
        ...

    def step(self, message): ...


OPENED = [
    ("text", "3.10", "3.10"), ("text", "007", "007"), ("text", "yes", "yes"), ("number", "'7'", 7),
    ("number", "007", 7), ("flag", "yes", True), ("flag", "'off'", False), ("rate", "3", 3.0),
    ("either", "3", 3), ("either", "'3'", "3"), ("mode", "1", "1"), ("names", "[1, x]", ["1", "x"]),
    ("nowhere", "'3.12'", "3.12"), ("free", "3.12", 3.12), ("free", "'3.12'", "3.12"),
    ("free", "'007'", "007"),
    ("free", "007", 7), ("free", "1e-6", 1e-6), ("free", "'1e-6'", "1e-6"), ("free", "3.0", 3.0),
    ("free", "no", False), ("free", "'no'", "no"), ("free", "t", "t"), ("free", "'null'", "null"),
    ("free", "nan", "nan"), ("free", "[{a: 1, b: '1'}]", [{"a": 1, "b": "1"}]), ("place", "7", "7"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), OPENED)
def test_an_option_of_an_environment_has_the_type_of_its_parameter_and_quoted_text_is_text(
    tmp_path, name, text, value
):
    """Cases: in files, on the command line, in the file that a run writes, and in a sweep."""
    path, key = tmp_path / "r.yaml", f"environment.options.{name}"
    path.write_text(dump(small(sampling="independent", packing={"max_tokens_per_row": 8192})))
    recipe = load(path, [named := "environment.name=tests.pure.test_recipe:Opened", f"{key}={text}"])
    found = recipe.environment.options[name]
    assert (found, type(found)) == (value, type(value))
    swept = f"{key}={to_yaml(read_value(text), default_flow_style=True)}"
    assert load(path, [named, swept]) == recipe
    options = f"environment: {{name: {named.partition('=')[2]}, options: {{{name}: {text}}}}}"
    path.with_name("file.yaml").write_text(f"extends: r.yaml\n{options}\n")
    assert (again := load(path.with_name("file.yaml"), [swept])).environment == recipe.environment
    assert again.variant == {}
    path.write_text(dump(recipe))
    assert load(path) == recipe_load.load(path) == recipe


def test_an_environment_gets_options_of_types_that_a_recipe_cannot_write():
    options = {"place": "7", "names": ["1", "x"], "free": ["1"], "point": {"x": "1", "y": 2}}
    found = recipe_load.typed_options("tests.pure.test_recipe:Opened", options, "python")
    assert found == {"place": Path("7"), "names": ("1", "x"), "point": Point(1, 2)}
    written = recipe_load.typed_options("tests.pure.test_recipe:Opened", options, "json")
    assert written == {"place": "7", "names": ["1", "x"], "point": {"x": 1, "y": 2}}
