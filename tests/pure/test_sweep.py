"""``eqlen sweep``: the runs that start, their order and budgets, and the work left for a second call."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.cli import sweep as command
from megatron_eqlen.experiments import compare, runner
from megatron_eqlen.experiments.cells import Plan
from megatron_eqlen.experiments.schema import load_sweep
from megatron_eqlen.job import Job, load
from megatron_eqlen.recipe import Recipe, RecipeError
from tests.kit import ROOT
from tests.kit.sweeps import SWEEP, Scripted, ended, leave_a_run, write_sweep

SEEDS = ("seed0", "seed1", "seed2")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(runner, "INTERVAL", 0.0)
    monkeypatch.setattr(runner, "visible_gpus", list)
    monkeypatch.setattr(compare, "sheet", lambda *_: "")  # test_sweep_tables.py has the figures


@pytest.fixture
def sweep(tmp_path) -> Path:
    return write_sweep(tmp_path)


def run(sweep: Path, jobs: int = 1, overrides: Sequence[str] = (), **script) -> tuple[int, Scripted]:
    """Run a sweep whose processes are scripted."""
    scripted = Scripted(**script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "start_process", scripted)
        return command.run(command.read(sweep, overrides), jobs), scripted


def test_the_reference_runs_first_and_the_others_get_the_mean_of_what_its_seeds_spent(sweep):
    status, started = run(sweep)
    assert status == 0
    assert started.names == [f"{method}-{seed}" for method in ("eqlen", "grpo", "mean") for seed in SEEDS]
    assert {recipe.steps for recipe in started.recipes[:3]} == {4}, "as its recipe says"
    others = started.recipes[3:]
    assert {recipe.flops for recipe in others} == {4 * (500 + 520 + 540) / 3}
    assert {(recipe.steps, recipe.gpu_hours) for recipe in others} == {(None, None)}, "no other limit"


def test_each_run_is_the_one_that_its_command_alone_would_be(sweep):
    _, started = run(sweep)
    for arguments, recipe in zip(started.arguments, started.recipes, strict=True):
        assert load(recipe.run_folder / "recipe.yaml") == recipe == load(arguments[1], list(arguments[2:]))
    assert started.recipes[4].run_folder == sweep.parent / "runs/tiny/grpo-seed1"


def test_recipes_and_methods_may_have_fewer_seeds(sweep, capsys):
    fewer = SWEEP.replace("[tiny.yaml]", "[tiny.yaml, coin.yaml]")
    fewer = fewer.replace("match: flops", "match: flops\nfewer_seeds: {{coin: 2, mean: 1}}")
    file = write_sweep(sweep.parent, fewer)
    (file.parent / "coin.yaml").write_text((file.parent / "tiny.yaml").read_text())
    assert cli.main(["sweep", str(file), "--dry-run", "model.path=qwen3-0.6b"]) == 0
    assert "2 recipes x 3 methods x 3 seeds, some with fewer = 12 runs" in capsys.readouterr().out
    status, started = run(file)
    counts = [("eqlen", 3), ("grpo", 3), ("mean", 1), ("eqlen", 2), ("grpo", 2), ("mean", 1)]
    names = [f"{method}-seed{seed}" for method, count in counts for seed in range(count)]
    assert (status, started.names) == (0, names)
    assert started.recipes[-1].flops == 4 * (500 + 520) / 2, "the mean of the recipe's own seeds"
    assert "Seeds that have ended" not in capsys.readouterr().out


@pytest.mark.parametrize("how", [["--dry-run"], ["--tables"], []])
def test_a_table_of_a_benchmark_and_a_chart_that_no_recipe_has_are_refused(sweep, capsys, how):
    text = SWEEP.replace("kind: difference,", "kind: difference, benchmarks: [sums, summs],")
    assert cli.main(["sweep", str(write_sweep(sweep.parent, text)), *how]) == 2
    assert "tables.1.benchmarks: expected some of sums, found 'summs'" in capsys.readouterr().err
    text = SWEEP + 'charts: [Reward, "Accuracy on sums, %", Rewards]\n'
    assert cli.main(["sweep", str(write_sweep(sweep.parent, text)), *how]) == 2
    assert re.search(
        r"charts: expected some of Accuracy on sums, %; .*found 'Rewards'", capsys.readouterr().err
    )


def test_a_second_call_starts_only_what_has_not_ended(sweep):
    with pytest.raises(KeyboardInterrupt):
        run(sweep, fails=lambda recipe: _interrupt() if recipe.run_folder.name == "grpo-seed1" else False)
    status, started = run(sweep)
    assert (status, started.names) == (0, ["grpo-seed1", "grpo-seed2", *(f"mean-{seed}" for seed in SEEDS)])
    assert run(sweep)[1].names == []


def _interrupt() -> bool:
    raise KeyboardInterrupt


def test_a_reference_that_may_continue_lets_all_others_continue(sweep):
    run(sweep)
    file = sweep.parent / "tiny.yaml"
    file.write_text(file.read_text().replace("steps: 4", "steps: 5"))
    _, started = run(sweep)
    assert len(started.names) == 9
    assert started.recipes[-1].flops == 5 * 520


def test_a_sweeps_recipes_may_be_in_the_home_folder(sweep, monkeypatch):
    monkeypatch.setenv("HOME", str(sweep.parent))
    text = SWEEP.replace("[tiny.yaml]", "[~/tiny.yaml]")
    assert load_sweep(write_sweep(sweep.parent, text)).recipes == [str(sweep.parent / "tiny.yaml")]


@pytest.mark.parametrize("how", [["--dry-run"], ["--tables"], []])
def test_runs_of_a_method_that_has_changed_since_are_not_taken_for_its_own(sweep, capsys, how):
    run(sweep)
    text = SWEEP.replace("equal_length.suffix_reward: mean", "loss.kl_coef: 0.5")
    assert cli.main(["sweep", str(write_sweep(sweep.parent, text)), *how]) == 2
    said = r"runs/tiny/mean-seed0 holds a run with another recipe \(.*loss.kl_coef: .* -> 0.5"
    assert re.search(said, capsys.readouterr().err)


def test_a_run_that_fails_is_named_with_its_last_words_and_stops_no_other(sweep, capsys):
    status, started = run(sweep, fails=lambda recipe: recipe.run_folder.name == "grpo-seed0")
    said = capsys.readouterr().out
    assert (status, len(started.names)) == (1, 9)
    assert f"tiny/grpo-seed0 FAILED, status 7; see {sweep.parent}/runs/tiny/grpo-seed0/train.log" in said
    assert "    the last words" in said
    assert "Seeds that have ended on tiny, 2 of 3: GRPO" in said, "the tables are of those that have"
    assert run(sweep)[1].names == ["grpo-seed0"]


def test_what_waits_for_a_failed_run_is_not_started(sweep, capsys):
    status, started = run(sweep, fails=lambda recipe: recipe.run_folder.name == "eqlen-seed1")
    assert (status, started.names) == (1, [f"eqlen-{seed}" for seed in SEEDS])
    assert "tiny/mean-seed2 was not started: it may spend what runs of eqlen did" in capsys.readouterr().out


def test_several_runs_at_a_time_never_pass_the_reference(sweep):
    status, started = run(sweep, jobs=2)
    assert (status, started.most_at_once) == (0, 2)
    assert [name.partition("-")[0] for name in started.names[:3]] == ["eqlen"] * 3


def test_each_run_has_its_own_gpus(sweep, monkeypatch):
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["2", "3"])
    _, started = run(sweep, jobs=2)
    assert {environ["CUDA_VISIBLE_DEVICES"] for environ in started.environs} == {"2", "3"}
    with pytest.raises(ValueError, match="--jobs 3 x 1 GPUs a run: expected at most 2 GPUs"):
        run(sweep, jobs=3)


def test_runs_of_two_processes_share_no_gpu(sweep, monkeypatch):
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["0", "1", "2", "3"])
    _, started = run(sweep, jobs=2, overrides=["cluster.processes_per_node=2"])
    assert {environ["CUDA_VISIBLE_DEVICES"] for environ in started.environs} == {"0,1", "2,3"}


def test_a_run_that_was_asked_to_stop_has_not_ended(sweep, capsys):
    """Its status is 0, as that of a run that did all it should."""
    status, started = run(sweep, fails=lambda recipe: recipe.run_folder.name == "grpo-seed0", status=0)
    assert (status, len(started.names)) == (1, 9)
    assert "tiny/grpo-seed0 FAILED, status 0" in capsys.readouterr().out
    assert run(sweep)[1].names == ["grpo-seed0"]


def test_what_the_recipe_itself_limits_does_not_limit_the_others_beside_the_reference(tmp_path):
    file = write_sweep(tmp_path, SWEEP + "set: {{gpu_hours: 1.0}}\n")
    plan = ended(file)
    limits = {cell.method: cell.recipe(plan.limits(cell)).budget.limits() for cell in plan.cells}
    assert {key for key, _ in limits["eqlen"]} == {"steps", "gpu_hours"}
    assert {key for key, _ in limits["grpo"]} == {"flops"}


def test_a_recipe_of_several_nodes_is_for_slurm(sweep):
    with pytest.raises(ValueError, match=r"cluster\.nodes is 2: expected 1 .*`eqlen submit`"):
        run(sweep, overrides=["cluster.nodes=2"])


def test_a_process_that_cannot_start_is_reported(sweep, capsys):
    """The real ``eqlen train`` fails: the model's folder is empty."""
    only = SWEEP.replace("seeds: [0, 1, 2]", "seeds: [0]")
    assert cli.main(["sweep", str(write_sweep(sweep.parent, only))]) == 2
    said = capsys.readouterr()
    assert "tiny/eqlen-seed0 FAILED, status 2" in said.out
    assert "Tiny-1B" in said.out, "its last words"
    assert "expected runs that have ended, found none" in said.err


def test_a_dry_run_says_what_each_may_spend(capsys):
    file = ROOT / "recipes/paper_affordable.yaml"
    assert cli.main(["sweep", str(file), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "2 recipes x 6 methods x 3 seeds = 36 runs" in said
    assert re.search(r"  eqlen-grpo +100 steps\n", said)
    assert "GPU hours as eqlen-grpo\n" in said
    assert sum(name.endswith("-coin") for name in load_sweep(file).methods) == 2, "controls"


@functools.cache
def recipes_of(file: str) -> dict[tuple[str, str], Recipe]:
    """Return a recipe of each model and method of a sweep in ``recipes/``; its runs differ in their seed."""
    plan = Plan(load_sweep(ROOT / "recipes" / file))
    names = dict.fromkeys((cell.model, cell.method) for cell in plan.cells)
    return dict(zip(names, plan.recipes(), strict=True))


def test_every_run_of_the_small_sweeps_is_a_recipe_with_its_control():
    sources = {model: recipe.data.sources[0] for (model, _), recipe in recipes_of("tables_tiny.yaml").items()}
    graders = {model: source.grader for model, source in sources.items()}
    assert graders == {"pauses_cpu": None, "null_coin": "tools.research.coin:Coin"}
    assert {source.path for source in sources.values()} == {"runs/pauses/data/train.parquet"}
    drift = [recipe.data.sources[0].grader or "" for recipe in recipes_of("null_tiny.yaml").values()]
    assert len(drift) == 44
    names = dict.fromkeys(grader.partition(":")[2] for grader in drift)
    assert [*names] == ["Coin", "LongerPays", "ShorterPays"]


@pytest.mark.parametrize(("file", "parts"), [
    ("paper_tables.yaml", {"dapo-no-overlong": {"overlong_buffer": 0}}),
    ("tables_tiny.yaml", {"dapo-token-mean": {"dynamic_sampling": False, "overlong_buffer": 0}}),
])  # fmt: skip
def test_a_method_that_is_named_after_a_part_differs_from_the_whole_by_that_part_alone(file, parts):
    methods = {method: recipe for (_, method), recipe in recipes_of(file).items()}
    found = {name: Job(recipe).objective for name, recipe in methods.items()}
    whole = found["dapo"]
    assert (whole.dynamic_sampling, whole.overlong_buffer > 0) == (True, True)
    for name, changes in {"dapo-no-dynamic-sampling": {"dynamic_sampling": False}, **parts}.items():
        assert found[name] == dataclasses.replace(whole, **changes)
    for name, recipe in methods.items():
        assert recipe.loss.minibatches == (4 if name.endswith("-4-updates") else 1), name
    assert methods["unfinished-drop"].equal_length.unfinished == "drop"


def test_the_papers_sweep_has_the_papers_methods():
    """Every run's recipe passes the checks and agrees with its label."""
    methods = {method: recipe for (_, method), recipe in recipes_of("paper_tables.yaml").items()}
    assert load_sweep(ROOT / "recipes/paper_tables.yaml").seeds == [0, 1, 2, 3, 4]
    benchmarks = [benchmark.name for benchmark in methods["grpo"].evaluation.benchmarks]
    assert benchmarks == ["aime25", "hmmt25", "livecodebench_v6"]
    independent = {name for name, recipe in methods.items() if recipe.sampling == "independent"}
    updates = {"grpo-4-updates", "gspo-4-updates"}
    parts = {"dapo", "dapo-no-dynamic-sampling", "dapo-no-overlong"}
    assert independent == {"grpo", "dr_grpo", "luspo", "2-grpo"} | updates | parts
    assert [methods[name].group_size for name in ("grpo", "2-grpo")] == [16, 2]
    assert [methods[f"eqlen-grpo-{n}"].streams_per_prompt for n in ("8-streams", "1-stream")] == [8, 1]
    for name in ("dr_grpo", "dapo", "luspo", "gspo-4-updates", "grpo-4-updates"):
        assert methods[f"eqlen-{name}"].objective == name.removesuffix("-4-updates")
    for name in ("single-pair", "prefix-in-gradient", "mean-reward"):
        assert methods[name].method == f"eqlen-grpo-{name}"


@pytest.mark.parametrize(("old", "new", "message"), [
    ("reference: eqlen", "reference: dapo", "reference: expected one of grpo, eqlen, mean, found 'dapo'"),
    ("seeds: [0, 1, 2]", "seed: [0]", r"unknown key 'seed' \(nearest: 'seeds'\)"),
    ("seeds: [0, 1, 2]", "seeds: [1, 1]", r"seeds: expected each once, found \[1, 1\]"),
    ("seeds: [0, 1, 2]", "seeds: [0]\nset: {{seed: 3}}", r"set.seed: has no effect"),
    ("methods: [grpo, eqlen]", "methods: [ppo]", "expected some of base, eqlen, grpo, mean, found 'ppo'"),
    ("methods: [grpo, eqlen]", "methods: [grpo]", r"methods: expected two or more, found \['grpo'\]"),
    ("  mean: ", "  mean: {{label: EqLen}}\n  other: ", r"methods.\*.label: expected each once, .*'EqLen'"),
    ("  mean: ", "  mean: {{label: base}}\n  other: ", r"methods.\*.label: expected each once, .*'base'"),
    ("  mean: ", "  a/b: ", "as the name of a sweep or method .*, found 'a/b'"),
    ("match: flops", "figures: [base]", "figures: expected some of eqlen, grpo, mean, found 'base'"),
    ("match: flops", "fewer_seeds: {{ppo: 1}}", "fewer_seeds: expected some of eqlen, .*, found 'ppo'"),
    ("kind: difference", "kind: drift", "kind: Input should be 'accuracy', 'difference' or 'efficiency'"),
    ("equal_length.suffix_reward: mean", "steps: 7", "mean.set.steps: no effect beside reference: eqlen"),
    ("reference: eqlen", "", "match: no effect without reference, the method that the others match"),
    ("match: flops", "fewer_seeds: {{eqlen: 3}}", "fewer_seeds.eqlen: expected fewer than the 3 seeds"),
    ("match: flops", "match: hours", "match: Input should be 'gpu_hours', 'generated_tokens' or 'flops'"),
])  # fmt: skip
def test_a_file_that_is_no_sweep_is_refused(tmp_path, old, new, message):
    assert old in SWEEP
    with pytest.raises(RecipeError, match=message):
        load_sweep(write_sweep(tmp_path, SWEEP.replace(old, new)))


def test_a_method_that_is_no_recipe_is_refused_before_anything_starts(tmp_path, monkeypatch):
    odd = SWEEP.replace("equal_length.suffix_reward: mean", "group_size: 3")
    monkeypatch.setattr(runner, "start_process", scripted := Scripted())
    with pytest.raises(RecipeError, match="seed=7: has no effect"):
        command.read(write_sweep(tmp_path, SWEEP), ["steps=2", "seed=7"])
    with pytest.raises(RecipeError, match=r"tiny/mean-seed0: .*group_size: 3 is odd"):
        command.run(command.read(write_sweep(tmp_path, odd), []), 1)
    same = odd.replace("group_size: 3", "equal_length.suffix_reward: max")
    with pytest.raises(RecipeError, match=r"tiny/eqlen and tiny/mean: .* found the same recipe"):
        command.run(command.read(write_sweep(tmp_path, same), []), 1)
    assert scripted.names == []


def test_methods_of_other_lengths_are_named_unless_a_reference_makes_them_equal(tmp_path, caplog):
    command.read(write_sweep(tmp_path, SWEEP), [])
    assert not caplog.messages
    alone = SWEEP.replace("reference: eqlen\nmatch: flops\n", "")
    longer = alone.replace("equal_length.suffix_reward: mean", "steps: 7")
    command.read(write_sweep(tmp_path, longer), [])
    assert caplog.messages == ["methods.eqlen and methods.mean are not equally long (see reference)"]


def submit_lines(sweep: Path, capsys) -> tuple[list[str], str]:
    """Return the commands that a dry run prints, and the line after them."""
    assert cli.main(["sweep", str(sweep), "--dry-run", "cluster.time=9:00", "model.path=qwen3-0.6b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("eqlen submit ")], lines[-1]


def test_a_dry_run_prints_what_submits_the_runs_that_may_start(sweep, capsys):
    lines, last = submit_lines(sweep, capsys)
    folder = sweep.parent
    assert lines[2] == (
        f"eqlen submit {folder}/tiny.yaml cluster.time=9:00 model.path=qwen3-0.6b seed=2 "
        f"run_dir={folder}/runs/tiny/eqlen-seed2"
    )
    assert (len(lines), last) == (3, "# 6 runs wait for those of eqlen: ask again when these have ended")
    plan = command.read(sweep, ["model.path=qwen3-0.6b"])
    for cell in plan.cells:
        if cell.name in ("tiny/eqlen-seed0", "tiny/eqlen-seed1", "tiny/eqlen-seed2", "tiny/grpo-seed1"):
            leave_a_run(cell.recipe(plan.limits(cell) or []))
    lines, _ = submit_lines(sweep, capsys)
    assert [line.rpartition("run_dir=")[2].split()[0].rpartition("/")[2] for line in lines] == [
        "grpo-seed0", "grpo-seed2", "mean-seed0", "mean-seed1", "mean-seed2",
    ]  # fmt: skip
    assert "flops=2080.0" in lines[0]
