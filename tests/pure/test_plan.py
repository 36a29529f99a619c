"""The plan: every shipped recipe fits, and its lines are in the documentation; phases; the engine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_eqlen.cli.submit import load_with_servers
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.job import KNOWN_MODELS, Job, load
from megatron_eqlen.plan import engine
from megatron_eqlen.plan.activations import RankRow
from megatron_eqlen.plan.flops import forward_flops, training_flops
from megatron_eqlen.plan.host import export_bytes, host_parts, recorded_bytes, route_bytes
from megatron_eqlen.plan.memory import Memory, memory
from megatron_eqlen.plan.roofline import BANDWIDTH, DENSE, Roofline, rooflines
from megatron_eqlen.plan.text import describe
from megatron_eqlen.plan.trainer import total
from megatron_eqlen.plan.workload import Workload, workload
from megatron_eqlen.recipe import LoraRecipe, ParallelRecipe, Recipe
from tests.kit import ROOT
from tests.kit.demonstrations import supervised
from tests.kit.tiny_models import save_tiny

RECIPES = sorted(
    path
    for family in ("llama", "qwen", "reasoning_gym")
    for path in (ROOT / "recipes").glob(f"{family}*.yaml")
)
PUBLISHED = {
    "smollm2-135m-instruct": 0.135,
    "llama-3.2-1b-instruct": 1.236,
    "llama-3.1-8b-instruct": 8.030,
    "qwen2.5-0.5b-instruct": 0.494,
    "deepseek-r1-distill-qwen-1.5b": 1.777,
    "qwen3-0.6b": 0.596,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-30b-a3b": 30.532,
    "qwen3-32b": 32.762,
    "qwen3-next-80b-a3b-thinking": 79.674,
    "qwen3.5-35b-a3b": 34.661,
    "qwen3-235b-a22b": 235.094,
    "qwen3.8-27b": 26.896,
}
"""Published parameters in billions, without images."""
TABLE_HEAD = "| recipe | GPUs | GB a GPU | host GB a node |"


def table_row(file: str, recipe: Recipe) -> str:
    """Return the line of docs/recipes.md for the recipe in ``recipes/FILE``. ``GB a GPU``: the largest phase
    of the GPU's size."""
    job, cluster = Job(recipe), recipe.cluster
    need = memory(job)
    host = sum(host_parts(job, need.stages, workload(recipe)).values())
    gpus = f"{cluster.nodes} x {cluster.processes_per_node}"
    used = f"{need.peak / 1e9:.0f} of {need.total / 1e9:.0f}"
    return f"| `{file}` | {gpus} | {used} | {host / 1e9:.0f} |"


def planned(file: str, *overrides: str) -> Memory:
    return memory(Job(load(ROOT / "recipes" / file, overrides)))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_fits_and_its_line_in_the_table_is_what_the_plan_says(path: Path):
    recipe = load(path)
    need = memory(Job(recipe))
    assert need.problems() == []
    assert need.peak < 0.92 * need.total  # what nobody counted must not end a first run
    assert {TABLE_HEAD, table_row(path.name, recipe)} <= {
        *(ROOT / "docs/recipes.md").read_text().splitlines()
    }


def test_a_recipe_that_says_how_much_host_memory_it_needs_says_what_the_plan_says():
    said = {
        path.name: int(found[1])
        for path in RECIPES
        if (found := re.search(r"needs\sabout (\d+) GB", path.read_text().replace("\n# ", " ")))
    }
    assert said.keys() == {"qwen3_30b_a3b.yaml", "qwen3_32b.yaml", "qwen3_next_80b.yaml"}
    for file, gigabytes in said.items():
        needed = float(table_row(file, load(ROOT / "recipes" / file)).split("|")[4])
        assert gigabytes == pytest.approx(needed, rel=0.02)


def test_shipped_configurations_have_the_published_numbers_of_parameters():
    files = sorted(KNOWN_MODELS.glob("*.json"))
    assert {file.stem: round(total(read_config(file)) / 1e9, 3) for file in files} == PUBLISHED


def test_the_papers_recipes_are_planned_on_the_papers_machines():
    for file, gpus in (("qwen3_32b.yaml", 8), ("qwen3_next_80b.yaml", 16)):
        recipe = load(ROOT / "recipes" / file)
        assert recipe.world_size == gpus
        need = planned(file)
        assert need.total == 80 * 2**30
        without = planned(file, "optimizer.offload=false")
        assert without.problems(), "full Adam state does not fit there"


@pytest.mark.parametrize(("file", "gigabytes"), [
    ("qwen3_32b.yaml", {"weights": 8.2, "gradients": 16.4, "optimizer": 49.2}),
    ("qwen3_next_80b.yaml", {"weights": 10.9, "gradients": 21.7, "optimizer": 59.8}),
])  # fmt: skip
def test_the_trainers_parts_are_those_of_a_count_by_hand(file, gigabytes):
    parts = planned(file).parts
    assert {name: round(parts[name] / 1e9, 1) for name in gigabytes} == gigabytes


def test_a_teacher_is_on_the_gpu_only_to_teach_and_its_pass_is_counted():
    plain, taught = (planned("qwen3_8b.yaml", *teacher) for teacher in ([], ["teacher.path=Qwen3-32B"]))
    assert taught.phases.items() >= plain.phases.items()
    assert taught.phases.keys() - plain.phases.keys() == {"teach"}
    ranks = taught.job.recipe.parallel.tensor * taught.job.recipe.parallel.pipeline
    assert taught.parts["teacher"] > 32.76e9 * 2 / ranks
    host = [host_parts(of.job, of.stages, workload(of.job.recipe))["teacher"] for of in (plain, taught)]
    assert (host[0], host[1] > 32.76e9 * 2) == (0, True), "all of a node"
    passes = [
        training_flops(need.job, 1.0, 0.0) / forward_flops(need.job.model, 0.0) for need in (plain, taught)
    ]
    assert passes[1] - passes[0] == pytest.approx((32.76 - 0.78) / (8.19 - 0.62), rel=1e-3)  # less embeddings


def test_only_what_is_parked_leaves_the_gpu_while_the_engine_generates():
    by_parking = {
        park: planned("qwen3_32b_h100x32.yaml", f"rollout.park_trainer={park}")
        for park in ("none", "state", "all")
    }
    none, state, everything = (need.phases["generate"] for need in by_parking.values())
    parts = by_parking["none"].parts
    assert none - state == pytest.approx(parts["gradients"] + parts["optimizer"])
    assert state - everything == pytest.approx(parts["weights"])
    assert len({need.phases["train"] for need in by_parking.values()}) == 1


def test_a_stage_of_fewer_layers_with_more_rows_in_flight_decides_whether_the_recipe_fits():
    """The other stage has more weights, and more of the optimizer's state, which is on the host."""
    split = ["parallel.tensor=4", "parallel.pipeline=2", "parallel.layers_per_stage=[30,34]"]
    need = planned("qwen3_32b.yaml", *split, "packing.max_tokens_per_row=120000", "cluster.gpu_memory_gib=64")
    of_stages = [
        sum(need.parts[part] for part in ("runtime", "communicators", "sleeping_engine"))
        + stage.weights + stage.gradients + stage.activations.peak
        for stage in need.stages
    ]  # fmt: skip
    assert of_stages[0] > need.usable > of_stages[1]
    assert need.phases["train"] == pytest.approx(of_stages[0])
    assert [problem.partition(":")[0] for problem in need.problems()] == ["train"]


def test_a_stage_beside_which_vllm_does_not_start_decides_though_another_needs_more_to_train():
    split = ["parallel.tensor=4", "parallel.pipeline=2", "parallel.layers_per_stage=[30,34]"]
    engine = ["rollout.park_trainer=none", "rollout.kv_cache_gib=20", "rollout.gpu_memory_utilization=0.66"]
    need = planned("qwen3_32b.yaml", *split, *engine, "packing.max_tokens_per_row=140000")
    assert len(need.problems()) == 1
    assert need.problems()[0].startswith("start: vLLM wants 56.7 GB free")
    assert need.activations is need.stages[1].activations
    assert need.stages[0].activations.peak - need.stages[1].activations.peak > 6e9


@pytest.mark.parametrize(("target", "adapters"), [("attention", 2), ("mlp", 2), ("experts", 2 * 10)])
def test_between_the_matrices_of_adapters_a_row_keeps_a_number_of_each_rank_for_each_token(target, adapters):
    """Qwen3-Next: a token passes two linear layers of attention, of the shared expert and of 10 experts."""
    model = read_config(KNOWN_MODELS / "qwen3-next-80b-a3b-thinking.json")
    with_attention, kept = 3, []
    for rank in (0, 16):
        lora = LoraRecipe(rank=rank, alpha=16, targets=[target])
        row = RankRow(model, ParallelRecipe(), 100, 2, sequence=False, gpu=True, lora=lora, imbalance=1.0)
        kept.append(row.layer(with_attention))
    assert kept[1] - kept[0] == adapters * 100 * 16 * 2


def test_a_trainer_that_is_not_parked_leaves_vllm_too_little_to_start():
    """``request_memory`` requires its share of the GPU to be free, whatever size the KV cache is given."""
    for overrides in ((), ("rollout.kv_cache_gib=20",)):
        need = planned("qwen3_32b.yaml", "rollout.park_trainer=none", *overrides)
        assert any(problem.startswith("start: vLLM wants 64.4 GB free") for problem in need.problems())


@pytest.mark.parametrize(
    ("heads", "ranks", "bytes_per_token"), [(8, 1, 262144), (8, 8, 32768), (2, 8, 32768), (2, 1, 65536)]
)
def test_the_kv_cache_of_a_token_is_that_of_its_heads_and_fewer_heads_than_ranks_are_copied(
    heads, ranks, bytes_per_token
):
    job = Job(load(ROOT / "recipes/qwen3_32b.yaml", [f"rollout.tensor_parallel={ranks}"]))
    vars(job)["model"] = replace(job.model, num_key_value_heads=heads)
    assert engine.kv_bytes_per_token(job) == bytes_per_token
    in_fp8 = Job(job.recipe.model_copy(update={"rollout": job.recipe.rollout.model_copy(
        update={"vllm": {"kv_cache_dtype": "fp8_e4m3"}})}))  # fmt: skip
    vars(in_fp8)["model"] = job.model
    assert engine.kv_bytes_per_token(in_fp8) == bytes_per_token / 2


def test_a_sequence_of_a_hybrid_model_keeps_a_state_for_each_layer_of_gated_deltanet():
    """Qwen3-Next: 36 such layers of 32 heads, states of 128 x 128 in float32, over 4 ranks."""
    job = Job(load(ROOT / "recipes/qwen3_next_80b.yaml", ["rollout.tensor_parallel=4"]))
    assert engine.sequence_bytes(job, 0) == 36 * 32 * 128 * 128 * 4 / 4


def test_fp8_halves_the_engines_matrices_and_leaves_embeddings_and_norms():
    """Qwen3-8B: 36 layers, hidden size 4096, 32 and 8 heads of 128, MLP of 12288, vocabulary 151936."""
    recipe = load(ROOT / "recipes/qwen3_8b.yaml", ["rollout.tensor_parallel=1"])
    quantized = recipe.model_copy(
        update={"rollout": recipe.rollout.model_copy(update={"quantization": "fp8"})}
    )
    plain, fp8 = Job(recipe), Job(quantized)
    matrices = 36 * 4096 * ((2 * 32 + 2 * 8) * 128 + 3 * 12288)
    saved = engine.weights(plain) - engine.weights(fp8)
    assert saved == pytest.approx(matrices * (2 - 1 - 4 / 128**2))
    assert engine.kv_cache(fp8) - engine.kv_cache(plain) == pytest.approx(saved)


def h100(file: str, *overrides: str) -> Roofline:
    recipe = load(ROOT / "recipes" / file, overrides)
    return rooflines(Job(recipe), workload(recipe))[-1]


def test_a_step_generates_what_its_sampling_can_grow_to():
    """Prompts are half of 512 tokens. The tree has 2 steps of 100 tokens, and 4 after them of 900."""
    keys = ["data.prompts_per_step=3", "data.max_prompt_length=512", "rollout.max_response_length=1000"]

    def work(*more: str) -> Workload:
        return workload(load(ROOT / "recipes/qwen3_0.6b.yaml", [*keys, *more]))

    pairs = work("sampling=equal_length", "group_size=4")
    assert pairs == Workload(3 * 4, 3 * 4000, 3 * (4000 + 2 * 256), 256 + 500)
    assert work("sampling=independent", "group_size=4") == replace(pairs, trained=3 * (4000 + 256))
    talks = (
        "sampling=independent",
        "group_size=4",
        "environment.name=python",
        "environment.max_given_tokens=500",
    )
    assert work(*talks) == Workload(3 * 4, 3 * 4000, 3 * (6000 + 256), 256 + 750, 3 * 2000)
    told = describe(Job(load(ROOT / "recipes/qwen3_0.6b.yaml", [*keys, *talks])))
    assert "python: 500 given tokens a response are assumed (environment.max_given_tokens)" in told
    shape = ["branching=2", "forks=1", "step_tokens=100"]
    tree = work(
        "sampling=tree", "objective=treerpo", "group_size=2", *(f"tree_sampling.{key}" for key in shape)
    )
    assert (tree.tracks, tree.generated, tree.trained) == (3 * 4, 3 * 3800, 3 * (3800 + 256))
    assert tree.context == pytest.approx(256 + (200 * 50 + 3600 * 550) / 3800)
    deaths = ("fork=death", "branching=3", "forks=2")
    tree = work(
        "sampling=tree", "objective=treerpo", "group_size=2", *(f"tree_sampling.{key}" for key in deaths)
    )
    assert (tree.tracks, tree.generated) == (3 * 4, 3 * 4000), "each of two deaths leaves a line more"
    half = work(*talks, "rollout.tokens_per_step=6000")
    assert half == replace(work(*talks), generated=6000, trained=3 * (6000 + 256) / 2, given=3000, share=0.5)


def test_a_step_of_at_most_so_many_tokens_generates_and_trains_no_more():
    """``qwen3_32b_carry_over.yaml`` takes a quarter of what the recipe that it extends can generate."""
    whole, part = (load(ROOT / f"recipes/qwen3_32b_{name}.yaml") for name in ("h100x32", "carry_over"))
    works = [workload(recipe) for recipe in (whole, part)]
    assert (works[0].generated, works[1].generated) == (64 * 16 * 32768, part.rollout.tokens_per_step)
    assert works[1].trained == works[0].trained / 4
    times = [rooflines(Job(recipe), work)[-1] for recipe, work in zip((whole, part), works, strict=True)]
    assert times[1].decode_steps == pytest.approx(times[0].decode_steps / 4)
    assert times[1].seconds == pytest.approx(times[0].seconds / 4, rel=0.01)
    enough = h100("qwen3_32b_h100x32.yaml", "rollout.tokens_per_step=100000000", "cluster.nodes=512")
    assert enough == h100("qwen3_32b_h100x32.yaml", "cluster.nodes=512")


def test_a_step_of_the_roofline_is_a_count_by_hand():
    """Qwen3-8B, 8 engines: 1,024 tracks of 32,768 tokens; KV cache of 147,456 bytes a token."""
    time = h100("qwen3_8b.yaml", "rollout.tensor_parallel=1", "data.max_prompt_length=2048")
    recipe = load(ROOT / "recipes/qwen3_8b.yaml", ["rollout.tensor_parallel=1"])
    assert recipe.data.prompts_per_step * recipe.group_size == 1024
    tokens = 1024 * 32768
    assert time.decode_steps * time.batch * 8 == pytest.approx(tokens)
    read = 2 * 8.191e9 + time.batch * (1024 + 16384) * 147456
    assert time.generation == pytest.approx(time.decode_steps * read / (BANDWIDTH * 3.35e12), rel=0.01)
    passes = 3 + (recipe.loss.kl_coef > 0) + (recipe.parallel.recompute == "full")
    assert passes == 5
    flops = passes * (tokens + 512 * 1024) * (2 * 7.57e9 + 4 * 36 * 4096 * (1024 + 16384))
    assert time.training == pytest.approx(flops / (8 * DENSE * 989e12 * (1 - time.idle)), rel=0.01)
    assert time.seconds == time.generation + time.training
    assert time.gradients == 0, "they stay in the node"


@pytest.mark.parametrize(("file", "nodes", "engine", "training", "prompts", "length", "seconds", "ratio"), [
    ("qwen3_32b_h100x32.yaml", 4, 4, (4, 4), 64, 3206, 393, (0.9, 1.1)),
    ("qwen3_32b_h100x32.yaml", 4, 4, (4, 4), 64, 3206, 376, (0.9, 1.1)),  # of v0.6
    ("qwen3_30b_a3b.yaml", 4, 4, (2, 1), 64, 3154, 225, (1.2, 1.4)),
    ("qwen3_30b_a3b.yaml", 4, 4, (2, 1), 64, 3154, 192, (1.0, 1.2)),  # of v0.6
    ("qwen3_235b_a22b.yaml", 16, 8, (4, 4), 16, 5671, 506, (1.4, 1.6)),  # theirs: engines of 16, TP2 PP8
])  # fmt: skip
def test_published_steps_of_nemo_rl_take_about_as_long_as_the_roofline(
    file, nodes, engine, training, prompts, length, seconds, ratio
):
    """Rows of its docs/about/performance-summary.md, v0.4: 32 responses a prompt, 512 a minibatch, H100."""
    shape = ["sampling=independent", "group_size=32", f"cluster.nodes={nodes}", "optimizer.offload=false"]
    layout = [
        f"rollout.tensor_parallel={engine}",
        *(f"parallel.{key}={size}" for key, size in zip(("tensor", "pipeline"), training, strict=True)),
    ]
    work = ["data.max_prompt_length=200", f"rollout.max_response_length={length - 100}"]
    work += [f"data.prompts_per_step={prompts}", f"loss.minibatches={prompts // 16}"]
    low, high = ratio
    assert low < seconds / h100(file, *shape, *layout, *work).seconds < high


@pytest.mark.parametrize(("virtual", "waiting"), [(None, 3), (2, 3 / 2), (4, 3 / 4)])
def test_stages_wait_for_the_pipeline_to_fill_and_less_with_virtual_ones(virtual, waiting):
    """The bubble of a schedule of 4 stages: the time of 3 rows, divided by a stage's chunks."""
    layout = ["parallel.tensor=4", "parallel.pipeline=4"]
    layout += [f"parallel.virtual_pipeline={virtual}"] if virtual else []
    time = h100("qwen3_32b_h100x32.yaml", *layout)
    assert time.rows > 1
    assert time.idle == pytest.approx(waiting / (time.rows + waiting))


def test_the_roofline_counts_what_the_backward_pass_repeats():
    none, mlp, full = (
        h100("qwen3_8b.yaml", f"parallel.recompute={part}").training for part in ("none", "mlp", "full")
    )
    assert full == pytest.approx(none * 5 / 4)
    assert mlp == pytest.approx(
        none + (full - none) * 2 * 5.436e9 / (2 * 7.568e9 + 4 * 36 * 4096 * 17408), rel=0.01
    )


def test_the_roofline_shows_what_more_gpus_cannot_speed_up():
    """On 4,096 GPUs the longest response still takes its decode steps, half of the replicas have no row, and
    gradients cross the network."""
    few, many = (h100("qwen3_32b_h100x32.yaml", f"cluster.nodes={nodes}") for nodes in (4, 512))
    assert many.decode_steps == 32768 < few.decode_steps
    assert many.rows < 1 < few.rows
    assert many.idle == pytest.approx(1 - many.rows)
    assert many.seconds > few.seconds * 4 / 512
    assert many.gradients > 0


def test_generation_of_later_steps_overlaps_training_only_with_staleness():
    servers = ["rollout.engine=server", "rollout.servers=[http://a, http://b]", "loss.rollout_is=token"]
    in_turns, ahead = (h100("qwen3_8b.yaml", *servers, f"rollout.staleness={steps}") for steps in (0, 1))
    assert in_turns.seconds == in_turns.generation + in_turns.training
    assert ahead.seconds == max(ahead.generation, ahead.training)


def test_the_servers_that_keep_up_with_training_are_as_fast_as_as_many_gpus_in_turns():
    """A node holds a server of TP 8. With one server less, training waits."""
    file = ROOT / "recipes/qwen3_32b_servers.yaml"

    def time(nodes: int) -> Roofline:
        recipe = load_with_servers(file, [], nodes)
        assert len(recipe.rollout.servers) == nodes
        told = describe(Job(recipe), nodes)
        assert told.endswith(f"eqlen submit RECIPE [KEY=VALUE ...] --servers {nodes}")
        return rooflines(Job(recipe), workload(recipe))[-1]

    nodes = time(1).balanced
    assert nodes is not None
    assert nodes == time(nodes).balanced
    assert time(nodes).generation <= time(nodes).training < time(nodes - 1).generation
    colocated = h100("qwen3_32b_h100x32.yaml", f"cluster.nodes={2 + nodes}")
    assert time(nodes).seconds == pytest.approx(colocated.seconds, rel=0.05)


def test_the_plan_says_what_it_assumes():
    text = describe(Job(load(ROOT / "recipes/qwen3_30b_a3b.yaml")))
    for start in ("memory", "activations", "host", "disk", "roofline"):
        assert f"\n{start} " in text
    assert "assumed: 40% of the peak FLOPs (10% with experts), 30% of memory bandwidth" in text


def test_the_plan_says_what_a_token_is_compared_with():
    keys = ["sampling=independent", "objective=dr_grpo", "loss.baseline=alive"]
    assert "baseline alive" in describe(Job(load(ROOT / "recipes/qwen3_0.6b.yaml", keys)))


def test_the_plan_of_a_run_without_gpus_says_nothing_of_them(tmp_path):
    save_tiny(tmp_path, "qwen3")
    paths = [f"model.path={tmp_path}", "cluster.gpu_memory_gib=1"]
    recipe = load(ROOT / "recipes/tiny_cpu.yaml", paths)
    text = describe(Job(recipe))
    assert "no GPU is used" in text
    assert "roofline" not in text
    assert "GB a GPU" not in text
    assert not memory(Job(recipe)).problems()


def test_on_a_cpu_the_trainer_and_its_engine_each_have_the_model_in_host_memory():
    job = Job(
        load(ROOT / "recipes/tiny_cpu.yaml", ["model.path=Qwen/Qwen3-0.6B", "cluster.processes_per_node=1"])
    )
    parts = host_parts(job, memory(job).stages, workload(job.recipe))
    model = 4 * total(job.model)
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (model, model, 2 * model)
    assert parts["engine"] == pytest.approx(model, rel=1e-3)
    gpu = planned("qwen3_0.6b.yaml")
    assert "engine" not in host_parts(gpu.job, gpu.stages, workload(gpu.job.recipe))


@pytest.mark.parametrize(("base", "trained", "each"), [
    ("bfloat16", "bfloat16", 2), ("bfloat16", "float32", 4), ("float32", "bfloat16", 4),
    ("float16", "bfloat16", 4), (None, "bfloat16", 2),
])  # fmt: skip
def test_an_export_is_in_the_wider_dtype(tmp_path, base, trained, each):
    file = KNOWN_MODELS / "qwen3-0.6b.json"
    raw = json.loads(file.read_text()) | {"torch_dtype": base}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    keys = [f"model.path={tmp_path}", f"model.dtype={trained}"]
    job = Job(load(ROOT / "recipes/tiny_cpu.yaml", keys))
    assert export_bytes(job) == each * total(job.model)
    assert job.model == read_config(file)


def test_a_gpu_too_small_is_refused_in_the_phase_that_does_not_fit():
    need = planned("qwen3_0.6b.yaml", "cluster.gpu_memory_gib=16")
    assert [problem.split(":")[0] for problem in need.problems()] == ["train"]


@pytest.mark.parametrize(("optimizer", "copied"), [
    (["grad_dtype=bfloat16"], 4), (["grad_dtype=float32"], 0),
    (["grad_dtype=bfloat16", "precision=bfloat16"], 0), (["grad_dtype=bfloat16", "offload=true"], 0),
])  # fmt: skip
def test_an_update_copies_bfloat16_gradients_for_an_optimizer_that_reads_float32_alone(optimizer, copied):
    keys = ["optimizer.offload=false", *(f"optimizer.{key}" for key in optimizer)]
    (stage, *_) = planned("qwen3_8b.yaml", *keys).stages
    assert stage.copied_gradients == copied * stage.parameters.shard


@pytest.mark.parametrize(("file", "again"), [("qwen3_0.6b", 151936 * 1024), ("qwen3_8b", 0)])
def test_the_last_stage_has_a_copy_of_an_embedding_that_is_also_the_head(file, again):
    need = planned(f"{file}.yaml", "parallel.pipeline=2", "parallel.tensor=1", "cluster.processes_per_node=8")
    assert sum(stage.parameters.elements for stage in need.stages) == total(need.job.model) + again


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_a_rank_of_an_engine_has_a_key_value_head_at_least(ranks):
    """Qwen3-32B: 64 layers of 64 and 8 heads of 128, hidden size 5120."""
    found = engine.parameters(read_config(f"{KNOWN_MODELS}/qwen3-32b.json"), ranks, ("linear_qkv",))
    assert found == 64 * 5120 * 128 * (64 / ranks + 2 * max(8 / ranks, 1))


def test_256_experts_have_numbers_of_one_byte_and_512_of_two():
    """vLLM chooses the type likewise (tests/engine/test_routes.py): 40 layers of 8 a token, and 48 of 10."""
    models = (f"{KNOWN_MODELS}/{name}.json" for name in ("qwen3.5-35b-a3b", "qwen3-next-80b-a3b-thinking"))
    assert [route_bytes(read_config(model)) for model in models] == [40 * 8, 48 * 10 * 2]


@pytest.mark.parametrize(("file", "each"), [("qwen3_next_80b", 48 * 10 * 2), ("qwen3_30b_a3b", 48 * 8)])
def test_routes_take_host_memory_once_where_they_were_graded_and_once_a_tensor_parallel_rank(file, each):
    recipe = load(
        ROOT / "recipes" / f"{file}.yaml", ["rollout.keep_routes=true", "rollout.tensor_parallel=1"]
    )
    job, plain = Job(recipe), Job(load(ROOT / "recipes" / f"{file}.yaml"))
    stages, work = memory(job).stages, Workload(1, 1000, 1000, 1)
    parts = host_parts(job, stages, work)
    assert parts["routes"] == (1 + recipe.parallel.tensor) * 1000 * each / recipe.cluster.nodes
    more = recorded_bytes(job, work) - recorded_bytes(plain, work)
    assert more == pytest.approx(1000 * each)
    assert "routes" not in host_parts(plain, stages, work)


def test_an_engine_whose_cache_cannot_hold_the_longest_path_does_not_fit():
    need = planned("qwen3_32b.yaml", "rollout.kv_cache_gib=1")
    assert [problem.split(" are left")[0] for problem in need.problems()] == ["start: 1.1 GB"]
    less_than_none = planned("qwen3_32b.yaml", "rollout.gpu_memory_utilization=0.1")
    assert less_than_none.parts["engine"] > 0.1 * less_than_none.total
    assert less_than_none.parts["kv_cache"] == 0
    assert planned("qwen3_32b.yaml").problems() == []


def test_weights_and_cache_of_a_server_must_fit_on_gpus_like_the_trainers():
    """Qwen3-Next has 160 GB of weights."""
    parts = [
        planned("qwen3_next_80b_servers.yaml", f"rollout.tensor_parallel={ranks}") for ranks in (1, 2, 4)
    ]
    assert [len(need.problems()) for need in parts] == [1, 1, 0]
    where = "servers on GPUs of this size"
    assert parts[0].problems()[0].startswith(f"{where}: -85.0 GB are left for the KV cache, and the longest")
    full = planned("qwen3_next_80b_servers.yaml", "rollout.gpu_memory_utilization=0.99")
    assert full.problems() == [
        f"{where}: vLLM wants 85.0 GB free (rollout.gpu_memory_utilization 0.99), found 84.4 GB"
    ]


def test_weights_are_sent_without_a_kv_cache_which_would_not_fit_beside_the_trainers_weights():
    """``test_phases.py`` holds the loop to the same table."""
    need = planned("qwen3_4b_lora.yaml")
    model, adapters, workspace, runtime = 2 * 4.022e9, 2 * 57.2e6, 3e9, 1.5e9
    synced = 2 * model + adapters + workspace + runtime + need.parts["sent_tensors"]
    assert need.phases["sync"] == pytest.approx(synced, rel=1e-3)
    assert need.phases["sync"] == need.peak < need.usable
    assert need.phases["sync"] + need.parts["kv_cache"] > need.total
    assert need.phases["export"] < need.phases["sync"]


def test_the_plan_of_supervised_training_counts_its_rows_and_an_engine_only_for_benchmarks(tmp_path):
    save_tiny(tmp_path, "qwen3")
    recipe = supervised(tmp_path, "rows.jsonl", cluster={"device": "gpu"})
    job, work = Job(recipe), workload(recipe)
    rows = recipe.data.prompts_per_step
    assert (work.tracks, work.generated, work.trained, work.context) == (0, 0, rows * 120, 60)
    assert [*memory(job).phases] == ["load", "train", "checkpoint", "export"]
    small = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"gpu_memory_gib": 4})})
    assert memory(Job(small)).problems() == [], "an engine has 3 GB of workspace alone"
    text = describe(job)
    assert "no engine\n" in text
    assert f"step        {rows} demonstrations; rows of 120\n" in text
    for absent in ("tracks", "decode", "generation", "graders  ", "vLLM", "rollout_is", "KV"):
        assert absent not in text
    assert rooflines(job, work)[-1].seconds == rooflines(job, work)[-1].training > 0

    evaluated = supervised(
        tmp_path, "rows.jsonl", cluster={"device": "gpu"}, rollout={"max_response_length": 8},
        data=recipe.data.model_dump(include={"sources"}) | {"max_prompt_length": 8},
        evaluation={"benchmarks": [{"name": "b", "reader": "jsonl", "path": "b.jsonl"}]},
    )  # fmt: skip
    assert "kv_cache" in memory(Job(evaluated)).table["evaluate"]
    assert "generate" not in memory(Job(evaluated)).table
    assert "1 engines of TP 1" in describe(Job(evaluated))
