"""Layouts: Megatron-Core and vLLM can build every approved one, and none of the refused ones."""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.cli import commands
from megatron_eqlen.hf.config import ModelConfig, parse_config
from megatron_eqlen.hf.config_fields import FAMILIES as FAMILY_TABLE
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.names import local_parameters
from megatron_eqlen.plan.trainer import rank_buffers
from megatron_eqlen.recipe import LoraRecipe, ParallelRecipe, RolloutRecipe, layout
from tests.kit import ROOT
from tests.kit.marks import examples
from tests.kit.meta import meta_device
from tests.kit.tiny_models import FAMILIES, tiny_config

RECIPES = ROOT / "recipes"
PARALLEL = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")


def size(*often: int) -> st.SearchStrategy[int]:
    """Return mostly one of ``often``, which many layouts divide."""
    return st.sampled_from(often) | st.integers(1, max(often))


@st.composite
def configs(draw) -> dict:
    """Draw a config.json of a tiny model whose own numbers agree, of any family."""
    family = draw(st.sampled_from(FAMILIES))
    groups, keys = draw(size(2, 4, 6)), draw(size(2, 4, 6))
    sizes = {
        "num_key_value_heads": groups, "num_attention_heads": groups * draw(st.integers(1, 3)),
        "num_hidden_layers": draw(size(4, 8, 12)), "vocab_size": draw(size(48, 96)),
        "intermediate_size": draw(size(24, 48)), "head_dim": 8,
        "hidden_size": 32,  # vLLM has kernels for experts on CPUs at multiples of 32
    }  # fmt: skip
    if family in ("llama", "qwen2"):
        sizes["hidden_size"] = sizes["head_dim"] * sizes["num_attention_heads"]
    if FAMILY_TABLE[family].experts:
        experts = draw(st.sampled_from([2, 4, 6, 8]))
        sizes |= {"num_experts": experts, "moe_intermediate_size": draw(size(12))}
    if family == "qwen3_moe":
        sizes["mlp_only_layers"] = draw(st.sampled_from([[], [0]])) if sizes["num_hidden_layers"] > 1 else []
    if FAMILY_TABLE[family].hybrid:
        sizes |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * draw(st.integers(1, 2))}
    if FAMILY_TABLE[family].shared_expert:
        sizes |= {"shared_expert_intermediate_size": draw(size(12))}
    return tiny_config(family, **sizes).to_dict() | {"router_aux_loss_coef": 0.0}


parallels = st.fixed_dictionaries(
    {key: st.sampled_from([1, 1, 2, 3, 4]) for key in PARALLEL if key != "virtual_pipeline"}
    | {"virtual_pipeline": st.sampled_from([None, None, 2, 3])}
)


@contextmanager
def fake_world(size: int, rank: int):
    """Fake one of ``size`` processes: groups and models are made, nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def megatron_builds(parallel: ParallelRecipe, processes: int, rank: int, model: ModelConfig) -> bool:
    """Return True if Megatron-Core, with our rules switched off, makes its groups and this rank's model, and
    each parameter has the size that the weight map reads for it."""
    from megatron.core import parallel_state, tensor_parallel

    with fake_world(processes, rank), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(layout, "require", list)
        try:
            parallel_state.initialize_model_parallel(
                parallel.tensor, parallel.pipeline, parallel.virtual_pipeline,
                expert_model_parallel_size=parallel.expert,
                expert_tensor_parallel_size=parallel.expert_tensor, create_gloo_process_groups=False,
            )  # fmt: skip
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            with meta_device():
                chunks = build_model(model, parallel, torch.float32)
            if not sizes_match(chunks, parallel, model):
                return False
            assert_plan_counts(chunks, parallel, processes, model)
            return True
        except (RuntimeError, ValueError, AssertionError, ZeroDivisionError):
            return False
        finally:
            parallel_state.destroy_model_parallel()


def sizes_match(chunks: list, parallel: ParallelRecipe, model: ModelConfig) -> bool:
    """Return True if a rank's parts of the file, as Megatron arranges them, have the shapes of its
    parameters."""
    weights = {weight.megatron: weight for weight in weight_map(model)}
    if model.tie_word_embeddings:  # the last stage keeps a copy
        weights["output_layer.weight"] = weights["embedding.word_embeddings.weight"]
    for name, parameter in local_parameters(chunks).items():
        weight = weights[name]
        ranks = parallel.tensor if weight.expert is None else parallel.expert_tensor
        parts = []
        for shape in map(list, weight.shapes):
            if weight.dim is not None:
                ranges = weight.local_ranges(tuple(shape), 0, ranks)
                shape[weight.dim] = sum(stop - start for start, stop in ranges)
            parts.append(torch.empty(shape, device="meta"))
        if weight.arrangement.merge(parts).shape != parameter.shape:
            return False
    return True


class WrongPlan(Exception):
    """The plan counts other parameters than a rank has."""


def assert_plan_counts(chunks: list, parallel: ParallelRecipe, processes: int, model: ModelConfig) -> None:
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    real = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    planned = rank_buffers(model, parallel, processes, LoraRecipe())[stage].elements
    if planned != real:
        raise WrongPlan(f"stage {stage}: planned {planned} parameters, found {real}")


def uses_what_it_has(model: ModelConfig, parallel: ParallelRecipe) -> bool:
    """Return False for cases that Megatron-Core accepts and we refuse: stages without layers, expert
    parallelism of no experts, and sizes of no layer."""
    if parallel.pipeline * (parallel.virtual_pipeline or 1) > model.num_hidden_layers:
        return False
    if model.experts is None:
        return parallel.expert == parallel.expert_tensor == 1
    return not (model.delta_net and all(model.delta_net.layers))


@examples(60)
@given(raw=configs(), keys=parallels, data_parallel=st.sampled_from([1, 1, 2, 3]))
def test_a_layout_is_approved_if_and_only_if_megatron_can_build_it(raw, keys, data_parallel):
    parallel, model = ParallelRecipe(**keys), parse_config(raw, "tiny")
    assume(uses_what_it_has(model, parallel))
    processes = parallel.tensor * parallel.pipeline * data_parallel
    problems = [*layout.groups(parallel, processes), *layout.weights(parallel, model)]
    first_of_stages = range(0, processes, processes // parallel.pipeline)
    builds = all(megatron_builds(parallel, processes, rank, model) for rank in first_of_stages)
    assert builds == (not problems), problems


REFUSED = {
    "tensor against key-value heads": ("qwen3", {"parallel.tensor": 4},
     "parallel.tensor: 4 does not divide the model's num_key_value_heads 2"),
    "tensor against linear heads": ("qwen3_next", {"parallel.tensor": 2, "parallel.sequence": False},
     "parallel.sequence: false with parallel.tensor 2"),
    "rows of one rank": ("qwen3", {"parallel.sequence": True},
     "parallel.sequence: true divides rows over parallel.tensor ranks, at least 2, found 1"),
    "tensor and pipeline against processes": ("qwen3", {"parallel.pipeline": 3},
     "parallel: tensor 1 x pipeline 3 = 3 does not divide the 4 processes"),
    "experts against processes": ("qwen3_moe", {"parallel.expert": 8},
     "parallel: expert_tensor 1 x expert 8 x pipeline 1 = 8 does not divide the 4 processes"),
    "experts against the model": ("qwen3_moe", {"parallel.expert": 3, "cluster.processes_per_node": 3},
     "parallel.expert: 3 does not divide the model's num_experts 4"),
    "experts that are not there": ("qwen3", {"parallel.expert": 2}, "a qwen3 model has no experts"),
    "options of experts that are not there": ("qwen3", {"model.megatron": {"moe_permute_fusion": True}},
     "model.megatron.moe_permute_fusion: True, but a qwen3 model has no experts"),
    "options of shared experts that are not there":
    ("qwen3_moe", {"model.megatron": {"moe_shared_expert_overlap": True}},
     "model.megatron.moe_shared_expert_overlap: True, but a qwen3_moe model has no shared experts"),
    "no layers": ("qwen3", {"parallel.layers_per_stage": []}, "parallel.layers_per_stage: List should have"),
    "layers": ("qwen3", {"parallel.pipeline": 2, "parallel.virtual_pipeline": 4},
     "pipeline 2 x parallel.virtual_pipeline 4 = 8 is more than the model's num_hidden_layers 4"),
    "layers of other stages": ("qwen3", {"parallel.pipeline": 2, "parallel.layers_per_stage": [1, 1, 2]},
     "parallel.layers_per_stage: 3 numbers, but parallel.pipeline: 2"),
    "layers of another model": ("qwen3", {"parallel.pipeline": 2, "parallel.layers_per_stage": [2, 3]},
     "parallel.layers_per_stage: [2, 3] = 5, but the model's num_hidden_layers is 4"),
    "virtual stages without stages": ("qwen3", {"parallel.virtual_pipeline": 2},
     "parallel.virtual_pipeline: 2 stages a rank need parallel.pipeline of at least 2, found 1"),
    "an engine across machines": ("qwen3", {"rollout.tensor_parallel": 8, "cluster.nodes": 2},
     "rollout.tensor_parallel: 8 does not divide cluster.processes_per_node 4"),
    "an engine's heads": ("qwen3_next", {"rollout.tensor_parallel": 4},
     "rollout.tensor_parallel: 4 does not divide the model's linear_num_key_heads 2"),
    "an engine's kernels": ("qwen3_next", {"rollout.batch_invariant": True},
     "rollout.batch_invariant: true, but a qwen3_next model has Gated DeltaNet, for which vLLM has no"),
    "paths": ("qwen3", {"rollout.max_response_length": 500},
     "rollout.max_response_length 500 = 600 is more than the model's max_position_embeddings 512"),
}  # fmt: skip


def write_recipe(folder: Path, family: str) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/config.json").write_text(json.dumps(tiny_config(family).to_dict()))
    (folder / "data.jsonl").write_text("")
    recipe = {
        "name": "layout", "steps": 3, "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "data": {"sources": [{"name": "a", "path": str(folder / "data.jsonl")}], "max_prompt_length": 100},
        "rollout": {"max_response_length": 100}, "cluster": {"processes_per_node": 4},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def overrides(keys: dict) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def outcome(capsys, *arguments: str) -> str:
    """Return a command's message about the recipe; empty if it accepts it."""
    status, said = cli.main(list(arguments)), capsys.readouterr()
    assert status in (0, 2)
    assert bool(status) == (said.err != "")
    return said.err.partition(": ")[2]


@pytest.mark.parametrize("case", REFUSED)
def test_plan_and_start_refuse_with_the_same_words_before_any_process(case, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_eqlen.processes.launch.launch", lambda *_: pytest.fail("ranks started"))
    family, keys, message = REFUSED[case]
    words = [str(write_recipe(tmp_path, family)), *overrides(keys)]
    planned = outcome(capsys, "plan", *words)
    assert message in planned
    for command in (["train"], ["train", "--dry-run"], ["harvest", "--out", str(tmp_path / "out")]):
        assert outcome(capsys, *command[:1], *words, *command[1:]) == planned
    assert not (tmp_path / "run").exists()


def test_a_single_rank_is_a_process_of_its_own_where_a_program_may_call_the_command_again(
    tmp_path, monkeypatch
):
    """Its lock, engine and process groups last as long as its process."""
    words, done = ["train", str(write_recipe(tmp_path, "qwen3"))], []
    words += ["cluster.device=cpu", "cluster.processes_per_node=1"]
    monkeypatch.delenv("RANK", raising=False)
    # what a rank does to its process
    monkeypatch.setattr("megatron_eqlen.processes.lifeline.die_with_launcher", lambda: None)
    monkeypatch.setattr("megatron_eqlen.processes.lifeline.taking_along", nullcontext)
    monkeypatch.setattr(commands, "watch", lambda interrupts: None)
    monkeypatch.setattr("megatron_eqlen.processes.launch.launch", lambda *asked: done.append(asked[:2]) or 0)
    monkeypatch.setattr("megatron_eqlen.run.loop.train", lambda *_: done.append("here"))
    assert cli.main(words) == 0
    monkeypatch.setattr("sys.argv", ["/bin/eqlen", *words])
    assert cli.main() == 0
    assert done == [(1, words), "here"]


numbers = st.fixed_dictionaries({
    "rollout.tensor_parallel": st.integers(1, 5), "cluster.nodes": st.integers(1, 3),
    "cluster.processes_per_node": st.integers(1, 6),
})  # fmt: skip
FIVE = {"rollout.tensor_parallel": 1, "cluster.nodes": 1, "cluster.processes_per_node": 5}


@examples(40)
@given(family=st.sampled_from(FAMILIES), keys=parallels, others=numbers)
@example("qwen3_moe", dict.fromkeys(PARALLEL, 1) | {"virtual_pipeline": None, "pipeline": 5}, FIVE)
def test_recipes_that_plan_approves_are_launched_and_no_others(tmp_path_factory, family, keys, others):
    """The fact holds for any small numbers; and there is no message but one line."""
    recipe = str(write_recipe(tmp_path_factory.mktemp("any"), family))
    all_keys = {f"parallel.{key}": value for key, value in keys.items()} | others
    launched = []
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.setattr("megatron_eqlen.check.machine.refuse_unfit", lambda _: None)  # this machine has no GPU
        patch.setattr(commands, "_start", lambda *_: launched.append(1) or 0)
        planned = cli.main(["plan", recipe, *overrides(all_keys)])
        started = cli.main(["train", recipe, *overrides(all_keys)])
    assert planned == started
    assert bool(launched) == (planned == 0)


def test_layers_that_do_not_divide_are_fewer_at_the_ends():
    """Cases: 94 layers of Qwen3-235B, 12 layers, and one layer a stage."""
    model = parse_config(tiny_config("qwen3").to_dict(), "tiny")

    def split(layers: int, pipeline: int, virtual: int | None = None) -> list[int]:
        parallel = ParallelRecipe(pipeline=pipeline, virtual_pipeline=virtual)
        stages = layout.stages(parallel, replace(model, num_hidden_layers=layers))
        assert [layer for stage in stages for layer in stage] == list(range(layers))
        return [len(stage) for stage in stages]

    assert split(94, 4) == [23, 24, 24, 23]
    assert split(94, 8) == [11, 12, 12, 12, 12, 12, 12, 11]
    assert split(94, 2, 4) == split(94, 8)
    assert split(12, 5) == [2, 2, 3, 3, 2]
    assert split(12, 12) == [1] * 12


def test_yarn_lengthens_paths_and_says_how_far(tmp_path, capsys):
    recipe = str(write_recipe(tmp_path, "qwen3"))
    config = tmp_path / "model/config.json"
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.5, "original_max_position_embeddings": 512}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_parameters": yarn}))
    assert outcome(capsys, "plan", recipe, "rollout.max_response_length=668") == ""
    assert (
        "100 + rollout.max_response_length 669 = 769 is more than the model's yarn's factor x "
        "original_max_position_embeddings 768"
    ) in outcome(capsys, "plan", recipe, "rollout.max_response_length=669")


def test_the_engine_copies_key_value_heads_and_no_others():
    """By vLLM's rule, key-value heads are copied if they are fewer than ranks; Megatron's weights are not."""
    tiny = tiny_config("qwen3", num_attention_heads=12, num_key_value_heads=3, vocab_size=192)
    model = parse_config(tiny.to_dict(), "tiny")
    accepted = [n for n in range(1, 13) if not list(layout.engine(RolloutRecipe(tensor_parallel=n), model))]
    assert accepted == [1, 3, 6, 12]
    divided = [n for n in range(1, 13) if not list(layout.weights(ParallelRecipe(tensor=n), model))]
    assert divided == [1, 3]
