"""Tables and figures of a sweep: the numbers are those of the raw evaluation files, in every format."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from copy import copy
from pathlib import Path
from statistics import fmean, stdev
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.evaluation.result import write_results
from megatron_eqlen.evaluation.statistics import detectable_difference, seed_difference
from megatron_eqlen.paper import drift
from megatron_eqlen.paper.figures import MEASURES, Curves, oscillation, over_seeds
from megatron_eqlen.paper.tables import learning_taxes
from megatron_eqlen.recipe import RecipeError
from megatron_eqlen.report.run_groups import Group, read_run
from megatron_eqlen.report.tables import Table, latex
from megatron_eqlen.sweep import command
from megatron_eqlen.sweep.cells import Plan
from megatron_eqlen.sweep.results import ABOUT_BANDS, ABOUT_DRIFT, END, START, groups, write, write_into
from megatron_eqlen.sweep.schema import SummaryRecipe
from tests.kit.sweeps import SWEEP, leave_a_run, result, write_sweep

METHODS = ("eqlen", "grpo", "mean")
LEARNED = "  - {{title: Learned, kind: learned, methods: [base, grpo, eqlen]}}\n"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    """Return a sweep whose runs have all ended, and its tables."""
    file = write_sweep(tmp_path_factory.mktemp("sweep"))
    plan = command.read(file, [])
    for cell in plan.cells:
        leave_a_run(cell.recipe(plan.limits(cell) or []))
    assert cli.main(["sweep", str(file), "--tables"]) == 0
    return plan


@pytest.fixture(scope="module")
def tables(plan) -> dict[str, list[dict]]:
    return {
        table["title"]: table["rows"] for table in json.loads((plan.sweep.path / "tables.json").read_text())
    }


def rewards(folder: Path, label: str) -> list[list[float]]:
    """Return [problem][sample], read from the file itself."""
    (record,) = json.loads((folder / f"evaluation/{label}.json").read_text())
    return [answers["rewards"] for answers in record["answers"]]


def percentile(values: list[float], share: float) -> float:
    """Return the smallest of ``values`` that at least this share of them does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


@pytest.mark.parametrize(("label", "method"), [("GRPO", "grpo"), ("EqLen", "eqlen")])
def test_intervals_are_those_of_other_code_on_the_raw_evaluation_files(plan, tables, label, method):
    (row,) = (row for row in tables["Main results"] if row["Method"] == label)
    ours = row["tiny Sums"]
    seeds = [rewards(plan.cell(f"tiny/{method}-seed{seed}").folder, "after") for seed in (0, 1, 2)]
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
    before = [rewards(plan.cell(f"tiny/grpo-seed{seed}").folder, "before") for seed in (0, 1, 2)]
    assert base["Method"] == "Base"
    assert base["tiny Sums"]["paper"]["mean"] == pytest.approx(np.mean(before))


def test_efficiency_counts_effective_samples_of_what_was_spent(tables):
    grpo, eqlen = tables["Efficiency"]
    assert (grpo["Method"], eqlen["Method"]) == ("GRPO", "EqLen")
    assert (grpo["Parallel Tracks"], grpo["Equal-Len."], eqlen["Equal-Len."]) == (4, False, True)
    assert eqlen["Eff. Samples"] == 4 * 30
    steps = [11, 10, 9]  # 2080 FLOPs, of 200, 220 and 240 a step
    assert grpo["Eff. Samples"] == pytest.approx(30 * sum(steps) / 3)
    assert (grpo["Samples/GPU-h"], grpo["Samples/1k tokens"]) == (60, 30)
    assert (eqlen["x first, GPU-h"], eqlen["x first, tokens"]) == (1, 1)


def test_pairs_are_averaged_over_the_first_and_the_last_third_of_every_run(tables):
    """EqLen's runs have 4 steps, those of its ablation as many: a third of them is one step."""
    rows = tables["Pairs"]
    assert [row["Method"] for row in rows] == ["EqLen", "EqLen", "Mean reward", "Mean reward"]
    first, last, *_ = rows
    assert (first["pairs a stream"], last["pairs a stream"]) == (4, 1)
    assert first["pairs with equal rewards, %"] == pytest.approx(100 * (0.1 + 0.01))
    assert last["pairs with equal rewards, %"] == pytest.approx(100 * (0.4 + 0.01))
    assert first["reward of B: max less mean"] is None, "these runs have not measured it"


def test_drift_is_the_mean_change_from_before_to_after_with_students_interval(plan, tables):
    """Student's 0.975 quantile for 2 degrees of freedom is from a table."""
    (row, grpo) = tables["Drift"]
    assert (row["Method"], row["Seeds"], grpo["Method"]) == ("EqLen", 3, "GRPO")
    change = row["Length, tokens"]["interval"]
    assert change["mean"] == pytest.approx(fmean([4, 3, 2]))
    half = 4.302653 * stdev([4, 3, 2]) / math.sqrt(3)
    assert (change["low"], change["high"]) == pytest.approx((3 - half, 3 + half))
    gains = [
        100 * float(np.mean(rewards(folder, "after")) - np.mean(rewards(folder, "before")))
        for folder in (plan.cell(f"tiny/eqlen-seed{seed}").folder for seed in (0, 1, 2))
    ]
    assert row["Accuracy, points"]["interval"]["mean"] == pytest.approx(fmean(gains))
    assert row["Entropy, nats"] is None, "these runs have not measured it"
    assert "change of length, tokens" in (plan.sweep.path / "drift.svg").read_text()


def test_the_picture_of_drift_has_two_panels_in_a_row(plan, tables):
    def size(count: int) -> list[float]:
        found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drift.picture([("Coins", rows)] * count))
        assert found
        return [float(number) for number in found.groups()]

    rows = drift.drifts(groups(plan))
    assert size(2) == size(1)
    assert size(3) == size(4) == [size(1)[0], 2 * size(1)[1]]


def test_differences_are_paired_by_seed_with_what_they_could_have_shown(plan, tables):
    """Student's quantiles for 2 degrees of freedom are from a table: 4.302653 (0.975), 1.060660 (0.8)."""
    (row,) = tables["Differences"]
    assert (row["Method"], row["tiny Sums"]["seeds"]) == ("EqLen", 3)
    of = {
        method: [
            fmean(
                reward
                for problem in rewards(plan.cell(f"tiny/{method}-seed{seed}").folder, "after")
                for reward in problem
            )
            for seed in (0, 1, 2)
        ]
        for method in ("grpo", "eqlen")
    }
    gains = [ours - theirs for ours, theirs in zip(of["eqlen"], of["grpo"], strict=True)]
    error = stdev(gains) / math.sqrt(3)
    interval = row["tiny Sums"]["interval"]
    assert interval["mean"] == pytest.approx(fmean(gains))
    assert interval["high"] - interval["mean"] == pytest.approx(4.302653 * error, rel=1e-5)
    assert row["tiny Sums"]["detectable"] == pytest.approx((4.302653 + 1.060660) * error, rel=1e-5)
    shown = f"{100 * fmean(gains):+.1f} ["
    assert all(shown in (plan.sweep.path / f"tables.{ending}").read_text() for ending in ("txt", "md", "tex"))


def test_what_a_method_learned_is_its_gain_over_itself_on_the_control(tmp_path):
    text = SWEEP.replace("[tiny.yaml]", "[tiny.yaml, coins.yaml]").replace(
        "sums: S", "coins: coin flips, sums: S"
    )
    file = write_sweep(tmp_path, text + LEARNED)
    (tmp_path / "coins.yaml").write_text("extends: tiny.yaml\nname: coins\n")
    plan = command.read(file, [])
    for cell in plan.cells:
        leave_a_run(cell.recipe(plan.limits(cell) or []))
        if cell.model == "coins":
            drifted = result(0.4 if cell.method == "eqlen" else 0.3, cell.seed)
            write_results(cell.folder / "evaluation/after.json", [drifted])
    assert cli.main(["sweep", str(file), "--tables"]) == 0
    table = json.loads((tmp_path / "runs/tables.json").read_text())[-1]
    assert [row["Method"] for row in table["rows"]] == ["GRPO", "EqLen"]
    assert [*table["rows"][0]] == ["Method", "tiny Sums"], "the control has no column"
    for row, method in zip(table["rows"], ("grpo", "eqlen"), strict=True):
        gains = [
            np.mean(rewards(tmp_path / f"runs/tiny/{method}-seed{seed}", "after"))
            - np.mean(rewards(tmp_path / f"runs/coins/{method}-seed{seed}", "after"))
            for seed in (0, 1, 2)
        ]
        assert row["tiny Sums"]["interval"]["mean"] == pytest.approx(fmean(gains))
    assert "Points above the same method on coin flips" in (tmp_path / "runs/tables.md").read_text()


def test_unequal_budgets_are_said_once_below_the_tables_of_every_format_in_the_sweeps_words(tmp_path):
    text = SWEEP.replace("[tiny.yaml]", "[tiny.yaml, coins.yaml]").replace("sums: S", "coins: Coins, sums: S")
    file = write_sweep(tmp_path, text)
    (tmp_path / "coins.yaml").write_text("extends: tiny.yaml\nname: coins\n")
    plan = command.read(file, [])
    for cell in plan.cells:
        leave_a_run(cell.recipe(plan.limits(cell) or []))
        if cell.group == "coins/mean":
            metrics = cell.folder / "metrics.jsonl"
            records = [json.loads(line) for line in metrics.read_text().splitlines()]
            dearer = [record | {"total/flops": 2 * record["total/flops"]} for record in records]
            metrics.write_text("".join(json.dumps(record) + "\n" for record in dearer))
    write(plan)
    for name in ("tables.txt", "tables.md", "tables.tex"):
        (note,) = re.findall("Unequal budgets.*", (tmp_path / "runs" / name).read_text())
        assert "Coins Mean reward" in note, name
        assert "tiny" not in note, "the budgets of that recipe are alike"


def test_figures_drawn_again_are_the_same_text(plan):
    paths = [path for path in write(plan) if path.suffix == ".svg"]
    drawn = [path.read_text() for path in paths]
    write(plan)
    assert [path.read_text() for path in paths] == drawn


def test_runs_without_rollouts_have_no_learning_tax(plan):
    folder = plan.cell("tiny/eqlen-seed0").folder
    (row,) = learning_taxes([Group("tiny", "EqLen", [read_run(folder)])])
    assert row.pop("Method") == "EqLen"
    assert set(row.values()) == {None}, "0 would say that no token is shared"


def test_a_control_needs_two_recipes(tmp_path):
    with pytest.raises(
        RecipeError, match=r"tables\.6\.recipes: expected recipes and their control, found one"
    ):
        command.read(write_sweep(tmp_path, SWEEP + LEARNED), [])


def test_a_detectable_difference_is_shown_in_80_percent_of_experiments():
    """Five seeds, differences with deviation 1: the true difference is the detectable one of a typical
    experiment."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(4000, 5))
    true = (2.776445 + 0.940965) / math.sqrt(5)
    shown = fmean(seed_difference(np.zeros(5), differences + true).low > 0 for differences in noise[:500])
    assert 0.74 < shown < 0.86
    squares = fmean(detectable_difference(np.zeros(5), sample) ** 2 for sample in noise)
    assert math.sqrt(squares) == pytest.approx(true, rel=0.03)
    assert math.isnan(detectable_difference(np.zeros(1), np.ones(1)))


def texts(drawn: ElementTree.ElementTree) -> set[str | None]:
    return {element.text for element in drawn.iter(f"{SVG}text")}


def test_tables_go_into_a_document_between_its_lines(plan, tmp_path):
    document = tmp_path / "results.md"
    document.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    for _ in range(2):
        assert (
            cli.main(
                ["sweep", str(plan.sweep.path.parent / "sweep.yaml"), "--tables", "--into", str(document)]
            )
            == 0
        )
        made = (plan.sweep.path / "tables.md").read_text()
        picture = "pictures/runs_figures-tiny.svg"
        images = [
            f"\n![Figures of runs]({file})\n\n{about}\n"
            for file, about in (("pictures/runs_drift.svg", ABOUT_DRIFT), (picture, ABOUT_BANDS))
        ]
        assert document.read_text() == f"before\n{START}\n{made}{''.join(images)}{END}\nafter\n"
    drawn = ElementTree.parse(tmp_path / picture)
    assert texts(drawn) >= {"EqLen", "GRPO", "Mean reward", "Accuracy on sums, %", "Reward", "Gradient norm"}
    charts = [group for group in drawn.iter(f"{SVG}g") if (group.get("id") or "").startswith("axes_")]
    bands = [{group.get("id") for group in chart.iter(f"{SVG}g")} for chart in charts]
    assert len(bands) == 5
    assert all({"band EqLen", "band GRPO", "band Mean reward"} <= names for names in bands)
    document.write_text("nothing")
    with pytest.raises(ValueError, match=r"results\.md: expected a line <!-- tables of a sweep -->"):
        write_into(document, plan.sweep.path)


def test_figures_show_the_methods_that_are_named(plan, tmp_path):
    some = copy(plan)
    some.sweep = plan.sweep.model_copy(update={"figures": ["mean", "grpo"], "folder": str(tmp_path)})
    write(some)
    said = texts(ElementTree.parse(tmp_path / "figures-tiny.svg"))
    assert said >= {"GRPO", "Mean reward"}
    assert "EqLen" not in said
    assert "EqLen" in (tmp_path / "tables.md").read_text()


def test_a_summary_shows_the_methods_and_charts_that_are_named(plan, tmp_path):
    some, summary = copy(plan), SummaryRecipe(methods=["grpo", "eqlen"], charts=["Gradient norm", "Reward"])
    some.sweep = plan.sweep.model_copy(update={"summary": summary, "folder": str(tmp_path / "sweep")})
    (tmp_path / "sweep").mkdir()
    write(some)
    document = tmp_path / "results.md"
    document.write_text(f"{START}\n{END}\n")
    write_into(document, some.sweep.path)
    said = texts(ElementTree.parse(tmp_path / "pictures/sweep_summary-tiny.svg"))
    assert said >= {"EqLen", "GRPO", "Reward", "Gradient norm"}
    assert not said & {"Mean reward", "Accuracy on sums, %"}
    assert "summary" not in document.read_text()
    summary.charts.append("Rewards")
    with pytest.raises(ValueError, match=r"summary\.charts: expected some of .*Reward.*, found 'Rewards'"):
        write(some)


def test_the_ends_of_curves_are_means_of_the_last_steps_over_seeds(tables):
    grpo, eqlen = tables["Training"]
    assert eqlen["Reward"] == pytest.approx(0.5 + 0.1 * 2.5), "4 steps"
    steps = [11, 10, 9]
    of_seeds = [fmean(0.5 + 0.1 * step for step in range(1, count + 1)[-10:]) for count in steps]
    assert grpo["Reward"] == pytest.approx(fmean(of_seeds))
    assert (grpo["Test: cut, %"], grpo["Test: length, tokens"], grpo["Entropy, nats"]) == (0, 9, None)


def test_every_format_has_the_same_numbers(plan, tables):
    folder = plan.sweep.path
    cells = [row["tiny Sums"] for row in tables["Main results"]]
    numbers = [
        f"{100 * cell['paper']['mean']:.1f}±{50 * (cell['paper']['high'] - cell['paper']['low']):.1f}"
        for cell in cells
    ]
    brackets = [
        f"[{100 * cell['headline']['low']:.1f}, {100 * cell['headline']['high']:.1f}]" for cell in cells
    ]
    for name in ("tables.txt", "tables.md"):
        text = (folder / name).read_text()
        assert all(
            f"{number} {bracket}" in text for number, bracket in zip(numbers, brackets, strict=True)
        ), name
    latex = (folder / "tables.tex").read_text()
    assert all(number.replace("±", r"$\pm$") in latex for number in numbers)
    best = max(cells, key=lambda cell: cell["paper"]["mean"])
    bold = numbers[cells.index(best)]
    assert f"**{bold}" in (folder / "tables.md").read_text()
    assert r"\textbf{" + bold.replace("±", r"$\pm$") + "}" in latex


def test_latex_columns_are_as_many_as_cells(plan):
    latex = (plan.sweep.path / "tables.tex").read_text()
    for table in latex.split(r"\begin{tabular}{")[1:]:
        spec, _, rest = table.partition("}")
        lines = [line for line in rest.split(r"\end{tabular}")[0].splitlines() if line.endswith(r"\\")]
        for line in lines:
            spans = sum(int(span) - 1 for span in re.findall(r"\\multicolumn\{(\d+)\}", line))
            assert line.count(" & ") + spans + 1 == len(spec), line
    assert latex.count(r"\begin{table}") == latex.count(r"\end{table}") == len(plan.sweep.tables)
    assert latex.count(r"\resizebox") == 4, "of the wide ones"


def test_what_is_missing_and_unequal_is_said_below_the_tables(tmp_path, capsys):
    file = write_sweep(tmp_path)
    plan = command.read(file, [])
    assert cli.main(["sweep", str(file), "--tables"]) == 2
    assert "expected runs that have ended, found none" in capsys.readouterr().err
    for seed in (0, 1, 2):
        leave_a_run(plan.cell(f"tiny/eqlen-seed{seed}").recipe([]))
    assert cli.main(["sweep", str(file), "--tables"]) == 0
    assert "Seeds that have ended on tiny, 0 of 3: GRPO" in capsys.readouterr().out
    for seed in (0, 1, 2):
        leave_a_run(plan.cell(f"tiny/grpo-seed{seed}").recipe(["steps=4"]))  # as if it had been trained alone
    assert cli.main(["sweep", str(file), "--tables"]) == 0
    assert "Seeds that have ended on tiny, 0 of 3: GRPO" in capsys.readouterr().out, "it may spend more"


# ---- curves ---------------------------------------------------------------------------------------------


def test_seeds_with_the_same_steps_are_averaged_where_they_are():
    series = over_seeds("x", [[(1, 2.0), (2, 4.0)], [(1, 4.0), (2, 10.0)]])
    assert series.points == [(1, 3.0), (2, 7.0)]
    assert series.intervals == [(2.0, 4.0), (4.0, 10.0)]


def test_seeds_with_other_costs_are_compared_at_the_same_cost():
    """Both curves are straight lines, so interpolation is exact: y = x, and y = 2 x from x = 1 on."""
    series = over_seeds("x", [[(0.0, 0.0), (3.0, 3.0), (8.0, 8.0)], [(1.0, 2.0), (5.0, 10.0)]])
    assert (series.points[0][0], series.points[-1][0]) == (1.0, 5.0)
    for (x, y), (low, high) in zip(series.points, series.intervals, strict=True):
        assert (y, low, high) == pytest.approx((1.5 * x, x, 2 * x))


def test_an_oscillation_is_the_relative_change_from_step_to_step():
    def of(values: list[float]) -> float:
        records = [{"step": step, "train/grad_norm": value} for step, value in enumerate(values, 1)]
        return oscillation("train/grad_norm")(Curves(records, {}))[-1][1]

    assert of([3.0] * 5) == 0
    assert of([1.0, 3.0] * 20) == pytest.approx(1.0)
    assert of([0.0, 5.0]) == 2
    assert of([9.0, 1.0, *[2.0] * 11]) == 0, "the newest ten"


def test_effective_samples_add_up():
    records = [
        {"step": 1, "objective/effective_samples": 3.0},
        {"step": 2, "objective/effective_samples": 4.0},
    ]
    assert MEASURES["Effective samples so far"](Curves(records, {})) == [(1, 3.0), (2, 7.0)]


def test_latex_escapes_what_would_be_a_command():
    made = latex(Table("50% of A & B_1", [{"Method": r"~x^2 {a} \b $c$ #1", "A < B": 0.5}]))
    assert r"50\% of A \& B\_1." in made
    assert r"\textasciitilde{}x\textasciicircum{}2 \{a\} \textbackslash{}b \$c\$ \#1 & 0.500 \\" in made
    assert r"\textbf{A \textless{} B}" in made
    plain = re.sub(r"\\[{}]", "", made)
    depth = list(itertools.accumulate({"{": 1, "}": -1}.get(character, 0) for character in plain))
    assert min(depth) == 0 == depth[-1]
