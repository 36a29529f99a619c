"""Tables and figures of a sweep: the numbers are those of the raw evaluation files."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.evaluation.statistics import detectable_difference, seed_difference
from megatron_eqlen.experiments.cells import Plan
from megatron_eqlen.experiments.figures import MEASURES, MethodCurve, curves, over_seeds, read_curves, sheet
from megatron_eqlen.experiments.results import write_results
from megatron_eqlen.experiments.schema import load_sweep
from megatron_eqlen.report.format import REWARD
from tests.kit.sweeps import SWEEP, cell_of, ended, leave_a_run, rewards, write_sweep

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    plan = ended(write_sweep(tmp_path_factory.mktemp("sweep")))
    write_results(plan)
    return plan


@pytest.fixture(scope="module")
def tables(plan) -> dict[str, list[dict]]:
    record = json.loads((plan.sweep.path / "tables.json").read_text())
    return {table["title"]: table["rows"] for table in record["tables"]}


def percentile(values: list[float], share: float) -> float:
    """Return the smallest of ``values`` that at least this share of them does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


@pytest.mark.parametrize(("label", "method"), [("GRPO", "grpo"), ("EqLen", "eqlen")])
def test_intervals_are_those_of_other_code_on_the_raw_evaluation_files(plan, tables, label, method):
    (row,) = (row for row in tables["Main results"] if row["Method"] == label)
    ours = row["sums"]
    seeds = [rewards(cell_of(plan, f"tiny/{method}-seed{seed}").folder, "after") for seed in (0, 1, 2)]
    means = [sum(map(sum, problems)) / sum(map(len, problems)) for problems in seeds]
    assert ours["paper"]["mean"] == pytest.approx(sum(means) / 3)
    every_draw = [sum(draw) / 3 for draw in itertools.product(means, repeat=3)]  # all 27, exactly
    for end, share in (("low", 0.025), ("high", 0.975)):
        assert ours["paper"][end] == pytest.approx(percentile(every_draw, share))
    dice = random.Random(5)
    draws = []
    for _ in range(6000):  # seeds and problems, each drawn with replacement
        problems = dice.choices(range(12), k=12)
        chosen = dice.choices(seeds, k=3)
        draws.append(sum(sum(seed[problem]) / 4 for seed in chosen for problem in problems) / 36)
    for end, share in (("low", 0.025), ("high", 0.975)):
        assert ours["headline"][end] == pytest.approx(percentile(draws, share), abs=0.012)


def test_the_base_is_every_runs_first_evaluation(plan, tables):
    base = tables["Main results"][0]
    before = [rewards(cell_of(plan, f"tiny/grpo-seed{seed}").folder, "before") for seed in (0, 1, 2)]
    assert base["Method"] == "base"
    assert base["sums"]["paper"]["mean"] == pytest.approx(np.mean(before))


def test_a_sweep_that_names_no_tables_shows_the_base_and_all_methods(tmp_path):
    plan = ended(write_sweep(tmp_path, SWEEP.partition("tables:")[0]))
    write_results(plan)
    made = json.loads((plan.sweep.path / "tables.json").read_text())["tables"]
    labels = {table["title"]: [row["Method"] for row in table["rows"]] for table in made}
    methods = ["GRPO", "EqLen", "Mean reward"]
    assert labels == {"Accuracy": ["base", *methods], "Efficiency": methods}


def test_efficiency_counts_effective_samples_of_what_was_spent(tables):
    grpo, eqlen = tables["Efficiency"]
    assert (grpo["Method"], eqlen["Method"]) == ("GRPO", "EqLen")
    assert (grpo["Parallel Tracks"], grpo["Equal-Len."], eqlen["Equal-Len."]) == (4, False, True)
    assert eqlen["Eff. Samples"] == 4 * 30
    steps = [11, 10, 9]  # 2080 FLOPs, of 200, 220 and 240 a step
    assert grpo["Eff. Samples"] == pytest.approx(30 * sum(steps) / 3)
    assert (grpo["Samples/GPU-h"], grpo["Samples/1k tokens"]) == (60, 30)
    assert (eqlen["x first, GPU-h"], eqlen["x first, tokens"]) == (1, 1)


def test_a_detectable_difference_is_shown_in_80_percent_of_experiments():
    """Five seeds, differences with deviation 1: the true one is a typical experiment's detectable one."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(4000, 5))
    true = (2.776445 + 0.940965) / math.sqrt(5)
    shown = fmean(seed_difference(np.zeros(5), differences + true).low > 0 for differences in noise[:500])
    assert 0.74 < shown < 0.86
    squares = fmean(detectable_difference(np.zeros(5), sample) ** 2 for sample in noise)
    assert math.sqrt(squares) == pytest.approx(true, rel=0.03)
    assert math.isnan(detectable_difference(np.zeros(1), np.ones(1)))


def test_a_difference_is_paired_by_seed(plan, tables):
    (row,) = tables["Differences"]
    names = [[f"tiny/{method}-seed{seed}" for seed in range(3)] for method in ("grpo", "eqlen")]
    folders = [[cell_of(plan, name).folder for name in each] for each in names]
    grpo, eqlen = np.array([[np.mean(rewards(one, "after")) for one in each] for each in folders])
    apart = eqlen - grpo
    half = 4.302653 * apart.std(ddof=1) / math.sqrt(3)
    interval = row["sums"]["interval"]
    assert (row["Method"], row["sums"]["seeds"]) == ("EqLen", 3)
    expected = [apart.mean(), apart.mean() - half, apart.mean() + half]
    assert [interval[end] for end in ("mean", "low", "high")] == pytest.approx(expected)


def test_markdown_has_the_numbers_of_the_json(plan, tables, capsys):
    assert cli.main(["sweep", str(plan.sweep.path.parent / "sweep.yaml"), "--tables"]) == 0
    made = (plan.sweep.path / "tables.md").read_text()
    assert made in capsys.readouterr().out
    for cell in (row["sums"] for row in tables["Main results"]):
        paper, headline = cell["paper"], cell["headline"]
        number = f"{100 * paper['mean']:.1f}±{50 * (paper['high'] - paper['low']):.1f}"
        assert f"{number} [{100 * headline['low']:.1f}, {100 * headline['high']:.1f}]" in made


def test_columns_of_several_recipes_are_told_apart_and_unequal_budgets_are_said_once(tmp_path):
    file = write_sweep(tmp_path, SWEEP.replace("[tiny.yaml]", "[tiny.yaml, coins.yaml]"))
    (tmp_path / "coins.yaml").write_text("extends: tiny.yaml\nname: coins\n")
    plan = ended(file)
    for cell in (cell for cell in plan.cells if cell.group == "coins/mean"):
        metrics = cell.folder / "metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        dearer = [record | {"total/flops": 2 * record["total/flops"]} for record in records]
        metrics.write_text("".join(json.dumps(record) + "\n" for record in dearer))
    text, paths = write_results(plan)
    assert "| Method | Seeds | tiny sums" in text
    (note,) = re.findall("Unequal budgets.*", text)
    assert "coins Mean reward" in note
    assert "tiny" not in note, "the budgets of that recipe are alike"
    assert {path.name for path in paths} >= {"figures-tiny.svg", "figures-coins.svg"}


def texts(drawn: Path) -> set[str | None]:
    return {element.text for element in ElementTree.parse(drawn).iter(f"{SVG}text")}


def test_figures_show_the_methods_and_charts_that_are_named_and_are_the_same_text_again(plan, tmp_path):
    assert texts(plan.sweep.path / "figures-tiny.svg") >= {"GRPO", "EqLen", "Mean reward", *MEASURES} - {
        "Entropy, nats", "KL to the reference model", "Length of responses, tokens",
    }  # fmt: skip
    chosen = 'figures: [mean, grpo]\ncharts: [Reward, "Accuracy on sums, %"]\n'
    fewer = ended(write_sweep(tmp_path, SWEEP + chosen))
    drawn = write_results(fewer)[1][-1]
    assert texts(drawn) >= {"GRPO", "Mean reward", "Reward", "Accuracy on sums, %"}
    assert not texts(drawn) & {"EqLen", "Gradient norm"}
    text = drawn.read_text()
    write_results(fewer)
    assert drawn.read_text() == text
    unknown = write_sweep(tmp_path, SWEEP + "charts: [Rewards]\n")
    with pytest.raises(ValueError, match=r"charts: expected some of .*Reward; .*found 'Rewards'"):
        write_results(Plan(load_sweep(unknown)))


@pytest.mark.parametrize(
    "names",
    [
        [f"eqlen-grpo (loss.kl_coef={kl}, optimizer.lr={lr})" for kl in (0.0, 0.001) for lr in (1e-6, 3e-6)],
        ["grpo (data.instruction=Put it in $\\boxed{}$.)", "grpo (data.instruction=" + 40 * "Think. " + ")"],
    ],
)
def test_names_of_methods_are_text_and_lie_whole_on_the_sheet(names):
    line = MethodCurve(*(np.array([1.0, 2.0]) for _ in range(4)))
    drawn = ElementTree.fromstring(sheet("Tiny", "steps", {"Reward": dict.fromkeys(names, line)}))
    legend = next(element for element in drawn.iter() if element.get("id") == "legend_1")
    said = " ".join("".join(text.itertext()) for text in legend.iter(f"{SVG}text"))
    assert " ".join(said.split()) == " ".join(" ".join(names).split())
    frame = next(legend.iter(f"{SVG}path")).get("d", "")
    across = [float(x) for x in re.findall(r"[\d.]+(?= [\d.]+)", frame)]
    assert 0 <= min(across) < max(across) <= float(drawn.get("viewBox", "").split()[2])


def test_the_base_has_the_seeds_that_were_measured_before_training(tmp_path):
    plan = ended(write_sweep(tmp_path))
    for before in plan.sweep.path.glob("*/*-seed2/evaluation/before.json"):
        before.unlink()
    write_results(plan)
    (main, *_) = json.loads((plan.sweep.path / "tables.json").read_text())["tables"]
    seeds = {row["Method"]: row["Seeds"] for row in main["rows"]}
    assert seeds.pop("base") == 2
    assert {*seeds.values()} == {3}


def test_what_is_missing_is_said_below_the_tables(tmp_path, capsys):
    file = write_sweep(tmp_path)
    plan = Plan(load_sweep(file))
    assert cli.main(["sweep", str(file), "--tables"]) == 2
    assert "expected runs that have ended, found none" in capsys.readouterr().err
    for seed in range(3):
        leave_a_run(cell_of(plan, f"tiny/eqlen-seed{seed}").recipe([]))
        leave_a_run(cell_of(plan, f"tiny/grpo-seed{seed}").recipe(["steps=4"]))  # as if trained alone
    assert cli.main(["sweep", str(file), "--tables"]) == 0
    assert "Seeds that have ended on tiny, 0 of 3: GRPO" in capsys.readouterr().out, "it may spend more"


def test_runs_that_are_to_be_measured_in_another_way_keep_their_results_and_are_not_ended(tmp_path, capsys):
    file = write_sweep(tmp_path)
    plan = ended(file)
    for cell in plan.cells:
        assert cell.ended(plan.limits(cell))
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(recipe.read_text().replace("benchmarks: [{", "benchmarks: [{name: more, path: x}, {"))
    assert cli.main(["sweep", str(file), "--tables"]) == 0
    said = capsys.readouterr().out
    assert "Seeds that have ended" not in said
    assert cli.main(["sweep", str(file), "--dry-run"]) == 0
    assert capsys.readouterr().out.count("eqlen submit") == len(plan.cells), (
        "also those that a reference limits"
    )


# ---- curves ---------------------------------------------------------------------------------------------


def curve(*points: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.array(points).T
    return x, y


def test_seeds_with_the_same_steps_are_averaged_where_they_are():
    line = over_seeds([curve((1, 2.0), (2, 4.0)), curve((1, 4.0), (2, 10.0))])
    assert line is not None
    assert [line.x.tolist(), line.mean.tolist()] == [[1, 2], [3, 7]]
    assert [line.low.tolist(), line.high.tolist()] == [[2, 4], [4, 10]]


def test_seeds_with_other_costs_are_compared_at_the_same_cost():
    """Both curves are straight lines, so interpolation is exact: y = x, and y = 2 x from x = 1 on."""
    line = over_seeds([curve((0, 0), (3, 3), (8, 8)), curve((1, 2), (5, 10))])
    assert line is not None
    assert (line.x[0], line.x[-1]) == (1.0, 5.0)
    np.testing.assert_allclose([line.mean, line.low, line.high], [1.5 * line.x, line.x, 2 * line.x])


def test_seeds_without_a_common_place_have_no_curve_and_it_is_said(tmp_path, capsys):
    assert over_seeds([]) is over_seeds([curve((1, 2.0), (2, 4.0)), curve((3, 4.0), (5, 10.0))]) is None
    for seed, first in enumerate((1, 3)):
        (tmp_path / f"{seed}").mkdir()
        rows = [{"step": step, "time": 0.0, REWARD[0]: 0.5} for step in (first, first + 1)]
        (tmp_path / f"{seed}/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name, charts = curves({"grpo": [tmp_path / "0", tmp_path / "1"]}, "steps")
    assert charts == {}
    assert capsys.readouterr().out == "Reward, grpo: no curve: its seeds share no part of the axis (step)\n\n"
    assert "<svg" in sheet("tiny", name, charts)


def measured(title: str, folder: Path, name: str, values: list[float]) -> list[tuple[int, float]]:
    records = ({"step": step, "time": 0.0, name: value} for step, value in enumerate(values, 1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    x, y = read_curves(folder, "steps")[title]
    return list(zip(x.tolist(), y.tolist(), strict=True))


def test_an_oscillation_is_the_relative_change_from_step_to_step(tmp_path):
    def of(values: list[float]) -> float:
        return measured("Oscillation of the gradient norm", tmp_path, "train/grad_norm", values)[-1][1]

    assert of([3.0] * 5) == 0
    assert of([1.0, 3.0] * 20) == pytest.approx(1.0)
    assert of([0.0, 5.0]) == 2
    assert of([9.0, 1.0, *[2.0] * 11]) == 0, "the newest ten"


def test_the_accuracy_before_training_has_cost_nothing(plan):
    folder = cell_of(plan, "tiny/eqlen-seed1").folder
    x, y = read_curves(folder, "flops")["Accuracy on sums, %"]
    assert x.tolist() == [0, 4 * (500 + 20)]
    assert y == pytest.approx([100 * np.mean(rewards(folder, label)) for label in ("before", "after")])


def test_effective_samples_add_up(tmp_path):
    samples = measured("Effective samples so far", tmp_path, "objective/effective_samples", [3.0, 4.0])
    assert samples == [(1, 3.0), (2, 7.0)]
