"""The plan: every shipped recipe fits, and its lines are in the documentation; phases; the engine."""

from __future__ import annotations

import re
from dataclasses import astuple, replace
from math import exp, prod
from pathlib import Path

import pytest

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.objectives.recipes import load
from megatron_eqlen.plan import engine, exchange
from megatron_eqlen.plan.host import host_parts, recorded_bytes
from megatron_eqlen.plan.memory import Memory, memory
from megatron_eqlen.plan.model import KNOWN_MODELS, model_config
from megatron_eqlen.plan.parameters import Buffer, total
from megatron_eqlen.plan.speed import GPUS, INTERVAL, REACHED, Speed, bubble, interval, speed, speeds
from megatron_eqlen.plan.text import describe
from megatron_eqlen.plan.workload import Workload, workload
from megatron_eqlen.recipe import Recipe, layout
from tests.kit import ROOT
from tests.kit.tiny_models import save_tiny
from tools.benchmarks import speed as public

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
}
"""Published parameters in billions."""
TABLE_HEAD = (
    "| recipe | GPUs | GB a GPU | host GB a node | estimate: tokens/s, hours for 100 steps [interval] |"
)
TABLE_STEPS = 100


def table_row(file: str, recipe: Recipe) -> str:
    """Return the table's line for the recipe in ``recipes/FILE``. ``GB a GPU``: the largest phase of the
    GPU's size."""
    model, cluster = model_config(recipe), recipe.cluster
    need, work = memory(recipe, model), workload(recipe)
    host = sum(host_parts(recipe, model, need.stages, work).values())
    estimates = "; ".join(map(_short_estimate, speeds(recipe, model, work)))
    gpus = f"{cluster.nodes} x {cluster.processes_per_node}"
    used = f"{need.peak / 1e9:.0f} of {need.total / 1e9:.0f}"
    return f"| `{file}` | {gpus} | {used} | {host / 1e9:.0f} | {estimates} |"


def _short_estimate(estimate: Speed) -> str:
    hours = TABLE_STEPS * estimate.seconds / 3600
    least, most = interval(hours)
    return f"{estimate.gpu.name} {estimate.tokens_per_second:,.0f}, {hours:.0f} [{least:.0f} to {most:.0f}]"


def planned(file: str, *overrides: str) -> Memory:
    recipe = load(ROOT / "recipes" / file, overrides)
    return memory(recipe, model_config(recipe))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_fits_and_its_lines_in_the_documentation_are_what_the_plan_says(path: Path):
    recipe = load(path)
    assert memory(recipe, model_config(recipe)).problems() == []
    guide, readme = ((ROOT / page).read_text().splitlines() for page in ("docs/recipes.md", "README.md"))
    line = table_row(path.name, recipe)
    assert {TABLE_HEAD, line} <= {*guide}
    assert {of[: of.rindex("|", 0, -1) + 1].strip() for of in (TABLE_HEAD, line)} <= {*readme}, "no estimates"


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


def test_rows_of_131072_of_the_32b_model_over_context_parallel_ranks():
    """The rows run on 8 GPUs, and on 16 of which two share a row's positions."""
    row = "packing.max_tokens_per_row=131072"
    alone, divided = (
        planned("qwen3_32b.yaml", row, *layout).activations.kept
        for layout in ((), ("parallel.context=2", "cluster.nodes=2"))
    )
    assert divided == pytest.approx(alone / 2)
    text = describe(load(ROOT / "recipes/qwen3_32b.yaml", [row, "parallel.context=2", "cluster.nodes=2"]))
    assert "TP 8 x CP 2 x PP 1 x DP 1" in text
    assert re.search(r"about \d+ MB of keys and values \(at most 34\) to a rank", text)
    assert "100% of it from other nodes" in text
    assert re.search(r"training [\d.]+; of it exchange: tensor \d+%, context \d+%", text)


@pytest.mark.parametrize(
    ("tensor", "context", "share"), [(8, 2, 1), (4, 2, 0), (4, 4, 2 / 3), (1, 8, 0), (2, 8, 4 / 7)]
)
def test_what_comes_from_other_nodes_is_what_ranks_beyond_the_nodes_eight_have(tensor, context, share):
    layout = [f"parallel.tensor={tensor}", f"parallel.context={context}", "cluster.nodes=2"]
    assert exchange.leaving_share(load(ROOT / "recipes/qwen3_32b.yaml", layout)) == pytest.approx(share)


def test_a_step_over_context_parallel_ranks_costs_what_it_did_and_the_exchange():
    """Links that are twice as fast take half of that. Recomputation exchanges again, and so do the passes of
    the reference model and the old policy."""
    keys = ["parallel.tensor=4", "parallel.context=2"]
    recipe, without = (load(ROOT / "recipes/qwen3_32b.yaml", more) for more in (keys, keys[:1]))
    model, work, gpu = model_config(recipe), workload(recipe), GPUS[2]
    alone, divided = speed(without, model, work, gpu), speed(recipe, model, work, gpu)
    context = divided.exchange["context"]
    assert "context" not in alone.exchange
    assert divided.training == pytest.approx(alone.training + context)
    fast = speed(recipe, model, work, replace(gpu, near=2 * gpu.near))
    assert fast.exchange["context"] == pytest.approx(context / 2)

    def sent(*more: str) -> float:
        return exchange.step_bytes(load(ROOT / "recipes/qwen3_32b.yaml", [*keys, *more]), model, work)

    pass_bytes = sent("loss.kl_coef=0", "parallel.recompute=none") / 2
    assert sent("loss.kl_coef=0") == pytest.approx(3 * pass_bytes)
    assert sent("loss.kl_coef=0.1", "loss.minibatches=2") == pytest.approx(5 * pass_bytes)


def test_shipped_configurations_have_the_published_numbers_of_parameters():
    files = sorted(KNOWN_MODELS.glob("*.json"))
    assert {file.stem: round(total(read_config(file)) / 1e9, 3) for file in files} == PUBLISHED


def test_every_parameter_of_the_weight_map_is_counted_once():
    for file in KNOWN_MODELS.glob("*.json"):
        model = read_config(file)
        assert total(model) == sum(prod(shape) for weight in weight_map(model) for shape in weight.shapes)


def test_the_papers_recipes_are_planned_on_the_papers_machines():
    for file, gpus in (("qwen3_32b.yaml", 8), ("qwen3_next_80b.yaml", 16)):
        recipe = load(ROOT / "recipes" / file)
        assert recipe.world_size == gpus
        need = planned(file)
        assert need.total == 80 * 2**30
        without = planned(file, "optimizer.offload=false")
        assert without.problems(), "full Adam state does not fit there"


@pytest.mark.parametrize(
    ("file", "gigabytes"),
    [
        ("qwen3_32b.yaml", {"weights": 8.2, "gradients": 16.4, "optimizer": 49.2}),
        ("qwen3_next_80b.yaml", {"weights": 10.9, "gradients": 21.7, "optimizer": 59.8}),
    ],
)
def test_the_trainers_parts_are_those_of_a_count_by_hand(file, gigabytes):
    parts = planned(file).parts
    assert {name: round(parts[name] / 1e9, 1) for name in gigabytes} == gigabytes


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


def test_a_trainer_that_is_not_parked_leaves_vllm_too_little_to_start():
    """``request_memory`` requires its share of the GPU to be free, whatever size the KV cache is given."""
    for overrides in ((), ("rollout.kv_cache_gib=20",)):
        need = planned("qwen3_32b.yaml", "rollout.park_trainer=none", *overrides)
        assert any(problem.startswith("start: vLLM wants 68.7 GB free") for problem in need.problems())


@pytest.mark.parametrize(
    ("heads", "ranks", "bytes_per_token"), [(8, 1, 262144), (8, 8, 32768), (2, 8, 32768), (2, 1, 65536)]
)
def test_the_kv_cache_of_a_token_is_that_of_its_heads_and_fewer_heads_than_ranks_are_copied(
    heads, ranks, bytes_per_token
):
    recipe = load(ROOT / "recipes/qwen3_32b.yaml", [f"rollout.tensor_parallel={ranks}"])
    model = replace(model_config(recipe), num_key_value_heads=heads)
    assert engine.kv_bytes_per_token(recipe, model) == bytes_per_token


def test_sampling_from_the_whole_vocabulary_takes_memory_beside_vllms_share():
    with_top_k, without = (planned("qwen3_32b.yaml", f"rollout.top_k={k}") for k in (20, 0))
    added = without.phases["generate"] - with_top_k.phases["generate"]
    assert added == pytest.approx(28 * without.recipe.rollout.max_num_seqs * 151936)


def test_fp8_halves_the_engines_matrices_and_leaves_embeddings_and_norms():
    """Qwen3-8B: 36 layers, hidden size 4096, 32 and 8 heads of 128, MLP of 12288, vocabulary 151936."""
    recipe = load(ROOT / "recipes/qwen3_8b.yaml", ["rollout.tensor_parallel=1"])
    quantized = recipe.model_copy(
        update={"rollout": recipe.rollout.model_copy(update={"quantization": "fp8"})}
    )
    model = model_config(recipe)
    matrices = 36 * 4096 * ((2 * 32 + 2 * 8) * 128 + 3 * 12288)
    saved = engine.weights(recipe, model) - engine.weights(quantized, model)
    assert saved == pytest.approx(matrices * (2 - 1 - 4 / 128**2))
    assert engine.kv_cache(quantized, model) - engine.kv_cache(recipe, model) == pytest.approx(saved)


def test_buckets_begin_and_end_where_megatron_aligns_them():
    buffer = Buffer(sizes=(100, 10, 70), ranks=3)
    assert buffer.buckets == [384], "70, from 128: 10, from 192: 100, to a multiple of 384"
    split = Buffer(sizes=(100, 10, 70), ranks=3, bucket_elements=60)
    assert split.buckets == [384, 384], "70 fills one; 10 and, from 64, 100 the other"
    tied = Buffer(sizes=(100,), ranks=2, shared_embedding=30)
    assert tied.buckets == [128, 128]


def test_the_plan_says_what_is_estimated_and_what_it_assumes():
    text = describe(load(ROOT / "recipes/qwen3_30b_a3b.yaml"))
    for line in (
        "memory      ",
        "activations ",
        "host        ",
        "disk        ",
        "estimate    H100: ",
        "[in brackets]: nine of ten public measurements",
    ):
        assert line in text
    low, rate, high = (
        float(number.replace(",", ""))
        for number in re.search(r"H100: ([\d,]+) tokens/s \[([\d,]+) to ([\d,]+)\]", text).group(2, 1, 3)
    )
    assert rate / low == pytest.approx(exp(INTERVAL), rel=0.01) == pytest.approx(high / rate, rel=0.01)


def test_the_shares_of_the_data_sheet_are_those_fitted_to_half_of_the_public_measurements():
    rows = public.measurements()
    assert len(rows) == 47
    assert len({(*map(str, astuple(row)[:5]), str(row.need)) for _, row in rows}) == 47, "no setting twice"
    assert public.fit([row for number, row in rows if not number % 2]) == REACHED


def test_the_errors_on_measurements_that_were_not_fitted_are_the_documented_ones():
    rows, guide = public.measurements(), (ROOT / "docs/recipes.md").read_text()

    def line(name: str, chosen: list[public.Measurement]) -> str:
        half, most = map(exp, public.errors(chosen, REACHED))
        return f"| {name} | {len(chosen)} | x {half:.2f} | x {most:.2f} |"

    held_out = [row for number, row in rows if number % 2]
    assert line("fitted", [row for number, row in rows if not number % 2]) in guide
    assert line("held out", held_out) in guide
    assert line("held out, training", [row for row in held_out if row.kind == "training"]) in guide
    assert line("held out, whole steps", [row for row in held_out if row.kind == "step"]) in guide


@pytest.mark.slow
def test_the_interval_is_the_error_on_sources_that_were_not_fitted():
    rows, guide = [row for _, row in public.measurements()], (ROOT / "docs/recipes.md").read_text()
    half, most = public.unseen(rows)
    assert round(most, 2) == INTERVAL
    assert f"| {len(rows)} | x {exp(half):.2f} | x {exp(most):.2f} |" in guide


def test_generation_of_later_steps_overlaps_training_only_with_staleness():
    servers = ["rollout.engine=server", "rollout.servers=[http://a, http://b]", "loss.rollout_is=token"]
    sync, ahead = (
        load(ROOT / "recipes/qwen3_8b.yaml", [*servers, f"rollout.staleness={steps}"]) for steps in (0, 1)
    )
    found = [speed(recipe, model_config(recipe), workload(recipe), GPUS[2]) for recipe in (sync, ahead)]
    assert found[0].seconds == found[0].generation + found[0].training
    assert found[1].seconds == max(found[1].generation, found[1].training)


def test_a_pipeline_waits_for_its_stages_once_an_update():
    """Four stages and R rows a replica take (R + 3) / R; two updates of R / 2 rows, (R / 2 + 3) / (R / 2)."""
    keys = ["parallel.tensor=2", "parallel.pipeline=4", "packing.max_tokens_per_row=40000"]
    work = Workload(1, 1.0, 12 * 40000, 1.0, 1.0)
    assert bubble(load(ROOT / "recipes/qwen3_32b.yaml", keys), work) == pytest.approx(15 / 12)
    two = load(ROOT / "recipes/qwen3_32b.yaml", [*keys, "loss.minibatches=2"])
    assert bubble(two, work) == pytest.approx(9 / 6)


def test_the_plan_of_a_run_without_gpus_says_nothing_of_them(tmp_path):
    save_tiny(tmp_path, "qwen3")
    paths = [f"model.path={tmp_path}", "cluster.gpu_memory_gib=1"]
    recipe = load(ROOT / "recipes/tiny_cpu.yaml", paths)
    text = describe(recipe)
    assert "no GPU is used" in text
    assert "estimate" not in text
    assert "GB a GPU" not in text
    assert not memory(recipe, model_config(recipe)).problems()


def test_a_gpu_too_small_is_refused_in_the_phase_that_does_not_fit():
    need = planned("qwen3_0.6b.yaml", "cluster.gpu_memory_gib=16")
    assert [problem.split(":")[0] for problem in need.problems()] == ["train"]


@pytest.mark.parametrize(("file", "each"), [("qwen3_next_80b", 48 * 10 * 2), ("qwen3_30b_a3b", 48 * 8)])
def test_routes_take_host_memory_once_where_they_were_graded_and_once_a_tensor_parallel_rank(file, each):
    recipe = load(ROOT / "recipes" / f"{file}.yaml", ["rollout.keep_routes=true"])
    model, plain = model_config(recipe), load(ROOT / "recipes" / f"{file}.yaml")
    stages, work = memory(recipe, model).stages, Workload(1, 1000, 1000, 1, 1)
    parts = host_parts(recipe, model, stages, work)
    assert parts["routes"] == (1 + recipe.parallel.tensor) * 1000 * each / recipe.cluster.nodes
    more = recorded_bytes(recipe, model, work) - recorded_bytes(plain, model, work)
    assert more == pytest.approx(1000 * each)
    assert "routes" not in host_parts(plain, model, stages, work)


def test_a_search_proposes_layouts_that_the_plan_approves_the_fastest_first(tmp_path, capsys):
    recipe, mine = ROOT / "recipes/qwen3_32b_h100x32.yaml", tmp_path / "mine.yaml"
    assert cli.main(["plan", str(recipe), "seed=3", "--search", "--gpus", "8", "--out", str(mine)]) == 0
    text = capsys.readouterr().out
    proposed = [line.split() for line in text.splitlines() if line.strip().startswith("cluster.nodes=1 ")]
    assert len(proposed) == 5
    copied = next(line for line in text.splitlines() if line.startswith("copy"))
    assert copied.split()[3:] == [str(recipe), "seed=3", *proposed[0]]
    seconds = []
    for overrides in proposed:
        changed = load(recipe, overrides)
        model = model_config(changed)
        assert memory(changed, model).problems() == []
        layout.check(changed, model)
        seconds.append(speed(changed, model, workload(changed), GPUS[2]).seconds)
    assert seconds == sorted(seconds)
    written, wanted = load(mine), load(recipe, ["seed=3", *proposed[0], "name=mine"])
    assert written.model_copy(update={"variant": {}}) == wanted.model_copy(update={"variant": {}})


def test_a_search_over_too_little_memory_names_the_least_that_is_lacking(capsys):
    recipe = str(ROOT / "recipes/qwen3_32b.yaml")
    assert cli.main(["plan", recipe, "--search", "--gpus", "2", "--gpu-type", "RTX4090"]) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"nothing fits 2 x RTX 4090 \(24 GiB\); the nearest layout lacks [\d.]+ GB a GPU \(", said
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "8"], "--gpus: expected with --search"),
        (["--search", "--gpus", "12"], "--gpus: expected at most 8, or nodes of 8, found 12"),
        (
            ["--search", "--gpu-type", "H800"],
            "--gpu-type: expected one of RTX 4090, A100, H100, H200, found 'H800'",
        ),
    ],
)
def test_an_option_of_the_search_that_makes_no_sense_is_refused(options, said, capsys):
    assert cli.main(["plan", str(ROOT / "recipes/qwen3_32b.yaml"), *options]) == 2
    assert said in capsys.readouterr().err


def test_an_engine_whose_cache_cannot_hold_the_longest_path_does_not_fit():
    need = planned("qwen3_32b.yaml", "rollout.kv_cache_gib=1")
    assert [problem.split(" are left")[0] for problem in need.problems()] == ["start: 1.1 GB"]
    assert need.shortfall > 0 == planned("qwen3_32b.yaml").shortfall
