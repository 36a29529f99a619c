"""``eqlen compare``: run folders in, the paper's tables out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.evaluation.result import Answers, EvaluationResult, write_results
from megatron_eqlen.evaluation.statistics import Interval
from megatron_eqlen.experiments.compare import Difference
from megatron_eqlen.experiments.run_groups import _labels, read_run, run_folders
from megatron_eqlen.recipe.contents import keep
from tests.kit.report_runs import recipe, write_run

PROBLEMS, SAMPLES = 20, 4


def result(right: int, benchmark: str = "aime25", questions: str = "q") -> EvaluationResult:
    """Return a result where ``right`` of 20 problems are solved by every sample."""
    names, four = [f"{questions}{i}" for i in range(PROBLEMS)], (["correct"] * SAMPLES, [9] * SAMPLES)
    answers = [Answers(name, [float(i < right)] * SAMPLES, *four) for i, name in enumerate(names)]
    return EvaluationResult(benchmark, answers, {"question_ids": names})


def make_run(home: Path, seed: int, right: int | None, questions="q", hours=0.5, **changes) -> Path:
    """Write a run of 2 steps: 30 effective samples of 2,000 tokens in ``hours`` GPU hours each."""
    run = recipe(Path("models/Tiny-1B"), seed=seed, **{"steps": 2} | changes)
    folder = write_run(home / f"{run.method}-seed{seed}", run)
    write_results(folder / "evaluation/before.json", [result(10, questions=questions)])
    if right is not None:
        write_results(folder / "evaluation/after.json", [result(right, questions=questions)])
    record = {"time": 0.0, "objective/effective_samples": 30.0, "harvest/generated_tokens": 2000.0}
    records = (record | {"step": step, "time/gpu_hours": hours * step} for step in (1, 2))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def rows(text: str) -> list[list[str]]:
    lines = (line.strip("|") for line in text.splitlines() if "|" in line)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def tables_of(tmp_path: Path) -> dict:
    """Return rows by title, and the notes."""
    out = tmp_path / "compared"
    assert cli.main(["compare", str(tmp_path), "--out", str(out)]) == 0
    record = json.loads((out / "tables.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    return {table["title"]: table["rows"] for table in record["tables"]} | {"notes": record["notes"]}


def test_a_difference_is_written_in_points():
    difference = Difference(Interval(0.2, -0.09, 0.49, ""), 0.41, 3)
    assert str(difference) == "+20.0 [-9.0, +49.0] / 41.0"
    assert str(replace(difference, detectable=None)) == "+20.0 [-9.0, +49.0]"


def test_methods_side_by_side(tmp_path, capsys):
    for seed, right in enumerate((11, 13)):
        make_run(tmp_path, seed, right, sampling="independent")
    for seed, right in enumerate((15, 17)):
        make_run(tmp_path, seed, right)
    make_run(tmp_path, 0, 14, equal_length={"suffix_reward": "mean"})
    make_run(tmp_path, 5, None, steps=3)
    tables = tables_of(tmp_path)
    text = capsys.readouterr().out
    assert f"{tmp_path}/eqlen-grpo-seed5: left out, it has not ended" in text
    accuracy = {row["Method"]: row for row in tables["Accuracy"]}
    assert list(accuracy) == ["base", "grpo", "eqlen-grpo", "eqlen-grpo-mean-reward"]
    means = {method: round(row["aime25"]["headline"]["mean"], 6) for method, row in accuracy.items()}
    assert means == {"base": 0.5, "grpo": 0.6, "eqlen-grpo": 0.8, "eqlen-grpo-mean-reward": 0.7}
    assert [accuracy[name]["Seeds"] for name in ("grpo", "eqlen-grpo-mean-reward")] == [2, 1]
    difference = {row["Method"]: row["aime25"] for row in tables["Difference"]}
    assert difference["eqlen-grpo"]["interval"]["mean"] == pytest.approx(0.2)
    assert difference["eqlen-grpo"]["interval"]["low"] > 0
    alone = difference["eqlen-grpo-mean-reward"]
    assert (alone["seeds"], alone["detectable"]) == (1, None), "its samples are the replicates"
    (grpo, eqlen, _) = tables["Efficiency"]
    assert (grpo["Eff. Samples"], grpo["GPU Time (h)"], grpo["Samples/GPU-h"]) == (60, 1, 60)
    assert (grpo["Samples/1k tokens"], grpo["Equal-Len."], eqlen["Equal-Len."]) == (15, False, True)
    printed = rows(text)
    assert ["Method", "Seeds", "aime25"] in printed
    assert next(row for row in printed if row[0] == "eqlen-grpo")[2].startswith("80.0±")
    svg = tmp_path / "compared/figures-Tiny-1B.svg"
    assert "Accuracy on aime25, %" in svg.read_text()
    words = ["compare", str(tmp_path), "--out", str(tmp_path / "compared"), "--over", "steps", "--charts"]
    assert cli.main([*words, "Accuracy on aime25, %"]) == 0
    assert "over steps" in svg.read_text()
    capsys.readouterr()
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "compared").iterdir()}
    assert cli.main([*words, "Reward"]) == 2, "no run has recorded one"
    assert "### " not in capsys.readouterr().out, (
        "what is asked for is refused before anything is shown or written"
    )
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "compared").iterdir()} == written
    assert cli.main(["compare", str(tmp_path), "--over", "steps"]) == 2, "nothing is drawn"


def test_a_benchmark_that_the_baseline_was_not_measured_on_has_no_difference(tmp_path):
    other = make_run(tmp_path, 0, 12, sampling="independent")
    write_results(other / "evaluation/after.json", [result(12, "amc")])
    make_run(tmp_path, 0, 16)
    assert tables_of(tmp_path)["Difference"] == [{"Method": "eqlen-grpo", "aime25": None}]


def test_two_models_have_columns_of_their_own(tmp_path):
    make_run(tmp_path / "a", 0, 12)
    other = make_run(tmp_path / "b", 0, 16)
    text = (other / "recipe.yaml").read_text().replace("Tiny-1B", "Tiny-2B")
    (other / "recipe.yaml").write_text(text)
    make_run(tmp_path / "a", 1, 12)
    (_, row) = tables_of(tmp_path)["Accuracy"]
    means = [row[f"{model} aime25"]["paper"]["mean"] for model in ("Tiny-1B", "Tiny-2B")]
    assert np.allclose(means, [0.6, 0.8])
    assert row["Seeds"] == 2, "of the model that has more"


def test_a_method_at_half_the_cost_has_twice_the_samples_an_hour(tmp_path):
    make_run(tmp_path, 0, 11, sampling="independent")
    make_run(tmp_path, 0, 11, hours=0.25)
    names = ("Samples/GPU-h", "x first, GPU-h", "x first, tokens")
    found = [[row[name] for name in names] for row in tables_of(tmp_path)["Efficiency"]]
    assert found == [[60, 1, 1], [120, 2, 1]]


def test_models_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for seed, run in enumerate(("small", "large")):
        folder = make_run(tmp_path / run, seed, 12 + seed, hours=0.5 + seed)
        text = (folder / "recipe.yaml").read_text().replace("models/Tiny-1B", f"runs/{run}/export")
        (folder / "recipe.yaml").write_text(text)
    (_, row) = tables_of(tmp_path)["Accuracy"]
    assert [row[f"{run}-export aime25"]["paper"]["mean"] for run in ("small", "large")] == pytest.approx(
        [0.6, 0.65]
    )
    ratios = [line["x first, GPU-h"] for line in tables_of(tmp_path)["Efficiency"]]
    assert ratios == [1, 1], "to the first method of the same model"


def test_names_of_models_are_names_of_files_and_links_keep_theirs(tmp_path):
    for name in ("a/Tiny-1B", "snapshots/abc"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "Tiny-2B").symlink_to(tmp_path / "snapshots/abc")
    assert _labels(["/Tiny-1B", f"{tmp_path}/a/Tiny-1B"]) == ["Tiny-1B", "a-Tiny-1B"]
    assert _labels([f"{tmp_path}/Tiny-2B", f"{tmp_path}/./Tiny-2B"]) == ["Tiny-2B", "Tiny-2B"]


def test_the_base_has_a_result_for_each_seed_also_where_two_are_equal(tmp_path):
    for seed, right in enumerate((0, 0, 20)):
        for sampling in ("independent", "equal_length"):
            folder = make_run(tmp_path, seed, 12, sampling=sampling)
            write_results(folder / "evaluation/before.json", [result(right)])
    (make_run(tmp_path, 3, 12) / "evaluation/before.json").unlink()
    base, *methods = tables_of(tmp_path)["Accuracy"]
    assert [row["Seeds"] for row in methods] == [3, 4]
    assert (base["Method"], base["Seeds"]) == ("base", 3)
    assert base["aime25"]["paper"]["mean"] == pytest.approx(1 / 3)


def test_a_problem_without_a_reward_costs_its_own_pair_alone_and_unequal_evaluations_are_said(tmp_path):
    for seed, right in enumerate((12, 16)):
        make_run(tmp_path, seed, right, sampling="independent")
        folder = make_run(tmp_path, seed, right)
        (whole,) = [result(right)]
        manifest = {
            "question_ids": whole.manifest["question_ids"][1:],
            "rollout": {"temperature": 0.1 * seed},
        }
        write_results(
            folder / "evaluation/after.json", [replace(whole, answers=whole.answers[1:], manifest=manifest)]
        )
    tables = tables_of(tmp_path)
    assert tables["Accuracy"][1]["aime25"]["paper"]["mean"] == pytest.approx(14 / 20)
    (row,) = tables["Difference"]
    assert row["aime25"]["seeds"] == 2
    assert row["aime25"]["interval"]["mean"] == 0, "on the problems that all have"
    assert "Unequal evaluations of aime25: they differ in rollout" in tables["notes"]


def test_a_run_that_was_measured_otherwise_after_training_is_said(tmp_path):
    folder = make_run(tmp_path, 0, 12)
    for name, manifest in (("before", {"temperature": 1.0}), ("after", {"temperature": 0.0})):
        kept = {"question_ids": result(12).manifest["question_ids"], "rollout": manifest}
        write_results(folder / f"evaluation/{name}.json", [replace(result(12), manifest=kept)])
    assert "Unequal evaluations of aime25: they differ in rollout" in tables_of(tmp_path)["notes"]


def test_own_code_that_changed_between_seeds_is_said(tmp_path):
    for seed, digest in ((0, "one"), (1, "two")):
        run = make_run(tmp_path, seed, right=1)
        keep(run, {"lab.rules:score": {"": digest}, "data": {"a": "same"}, "RUN/export": {"": digest}})
    (note,) = tables_of(tmp_path)["notes"]
    assert note == "Unequal inputs: lab.rules:score changed between runs (contents.json has each one's)"


def test_a_reward_is_that_of_the_last_tenth_and_a_step_without_it_is_in_no_mean(tmp_path):
    folder = make_run(tmp_path, 0, 12, steps=20)
    rows = [{"step": n, "time": 0.0, "policy/reward": n / 100} for n in range(1, 21)]
    del rows[-1]["policy/reward"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(folder).reward == 0.19


def test_a_run_that_is_still_to_be_evaluated_has_not_ended(tmp_path, capsys):
    """It has taken all its steps."""
    make_run(tmp_path, 0, 11)
    make_run(tmp_path, 1, None, evaluation={"benchmarks": [{"name": "aime25", "path": "x"}]})
    assert tables_of(tmp_path)["Accuracy"][1]["Seeds"] == 1
    assert f"{tmp_path}/eqlen-grpo-seed1: left out, it has not ended" in capsys.readouterr().out


def test_what_cannot_be_compared_is_named(tmp_path, capsys):
    assert cli.main(["compare", str(tmp_path)]) == 2
    assert "expected a run folder, or a folder of some, found none" in capsys.readouterr().err
    for folder, seed in (("a", 0), ("b", 1), ("c", 0)):
        make_run(tmp_path / folder, seed, 12)
    assert cli.main(["compare", str(tmp_path)]) == 2
    assert "to differ in their seed, found 0 twice" in capsys.readouterr().err
    assert cli.main(["compare", str(tmp_path / "a"), "--baseline", "dapo"]) == 2
    assert "--baseline: expected one of base, eqlen-grpo, found 'dapo'" in capsys.readouterr().err
    first, other = (make_run(tmp_path / "a", seed, 16, questions=name) for seed, name in ((0, "q"), (1, "r")))
    assert cli.main(["compare", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert "aime25: the results are of different questions" in error
    assert f"q0 is in {first}/evaluation/before.json and not in {other}/evaluation/before.json" in error


def test_runs_of_two_recipes_are_two_methods_named_by_what_differs(tmp_path):
    """Folders and names do not matter; seeds of one recipe stay one method."""
    for seed, right in ((0, 11), (1, 13)):
        make_run(tmp_path / "small", seed, right, group_size=4)
        make_run(tmp_path / "large", seed, right + 4, group_size=8, name="other", optimizer={"lr": 1e-3})
    make_run(tmp_path, 0, 10, sampling="independent")
    tables = tables_of(tmp_path)
    assert [(row["Method"], row["Seeds"]) for row in tables["Accuracy"]][1:] == [
        ("grpo", 1),
        ("eqlen-grpo (group_size=8, optimizer.lr=0.001)", 2),
        ("eqlen-grpo (group_size=4, optimizer.lr=1e-06)", 2),
    ]
    assert [row["Parallel Tracks"] for row in tables["Efficiency"]] == [4, 8, 4]


def test_a_method_that_is_named_by_lines_of_text_keeps_its_row(tmp_path, capsys):
    for name, text in (("a", "Think."), ("b", "Think | look.\nThen answer.\n")):
        data = {"sources": [{"name": "sums", "path": "sums.parquet"}], "instruction": text}
        make_run(tmp_path / name, 0, 11, data=data)
    tables_of(tmp_path)
    table = capsys.readouterr().out.partition("### Accuracy")[2].strip().partition("\n\n")[0].splitlines()
    assert len(table) == 5
    assert r"eqlen-grpo (data.instruction=Think \| look. Then answer. )" in table[4]


def test_a_default_written_out_is_no_difference(tmp_path):
    make_run(tmp_path / "a", 0, 11)
    changes = {"loss": {"clip_ratio_low": 0.2}, "cluster": {"nodes": 2}, "profile": {"steps": [1]}}
    changes["inputs_from"] = "tools/quickstart"
    make_run(tmp_path / "b", 1, 11, **changes)
    assert [row["Method"] for row in tables_of(tmp_path)["Accuracy"]] == ["base", "eqlen-grpo"]


def test_equal_budgets_need_no_word(tmp_path):
    make_run(tmp_path, 0, 11)
    make_run(tmp_path, 0, 11, sampling="independent", hours=0.52)
    assert tables_of(tmp_path)["notes"] == []


def test_unequal_budgets_and_runs_cut_short_are_said(tmp_path, capsys):
    make_run(tmp_path, 0, 11, steps=2, gpu_hours=4.0)
    make_run(tmp_path, 0, 11, sampling="independent", steps=40, hours=0.7)
    assert tables_of(tmp_path)["notes"] == [
        "grpo seed 0 is not at its end: 2 of 40 steps",
        "eqlen-grpo seed 0 was cut short of its GPU hours: 2 of 2 steps, 1 of 4 GPU hours (ended by steps)",
        "Unequal budgets (means over runs): grpo 1.4 GPU hours in 2 steps; eqlen-grpo 1 GPU hours in 2 steps",
    ]
    assert "was cut short of its GPU hours" in capsys.readouterr().out


def test_seeds_of_unequal_limits_are_not_pooled(tmp_path):
    make_run(tmp_path, 0, 11, steps=2)
    make_run(tmp_path, 1, 11, steps=3)
    methods = [row["Method"] for row in tables_of(tmp_path)["Accuracy"]]
    assert methods == ["base", "eqlen-grpo (steps=2)", "eqlen-grpo (steps=3)"]


def test_runs_are_found_at_any_depth_but_not_inside_of_runs(tmp_path):
    found = [make_run(tmp_path / "a" / "b", 0, 11), make_run(tmp_path / "c", 1, 11)]
    (found[0] / "checkpoints").mkdir()
    (found[0] / "checkpoints" / "recipe.yaml").write_text("name: a copy")
    (tmp_path / "again").symlink_to(tmp_path)
    assert run_folders([tmp_path]) == found
    assert run_folders([found[1], tmp_path]) == [found[1], found[0]]
    with pytest.raises(ValueError, match="evaluation: expected a run folder, or a folder of some"):
        run_folders([found[0], found[1] / "evaluation"])


def test_runs_without_benchmarks_compare_their_rewards_and_lengths(tmp_path, capsys):
    for seed, reward in enumerate((0.25, 0.75)):
        folder = make_run(tmp_path, seed, None)
        (folder / "evaluation/before.json").unlink()
        newest = {"step": 2, "time": 0.0, "policy/reward": reward, "policy/response_length": 40.0}
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text(f"{lines[0]}\n{json.dumps(newest)}\n")
    tables = tables_of(tmp_path)
    assert capsys.readouterr().out.count("has not ended") == 0
    assert tables.keys() == {"Efficiency", "notes"}
    (row,) = tables["Efficiency"]
    assert (row["Reward"], row["Length"]) == (0.5, 40.0)
