"""The exported model's README, as the hub and people read it."""

import dataclasses

from huggingface_hub import ModelCard

from megatron_eqlen.evaluation.result import Answers, EvaluationResult, compare, write_results
from megatron_eqlen.processes.hold import Hold
from megatron_eqlen.report.metrics import MetricsWriter
from megatron_eqlen.report.model_card import write_model_card
from tests.kit.report_runs import recipe, write_run


def result(*rewards: list[float]) -> EvaluationResult:
    answers = [Answers(f"sums#{n}", reward, ["x"] * 2, [3] * 2) for n, reward in enumerate(rewards)]
    return EvaluationResult("sums", answers, {"question_ids": ["a", "b"], "weights": "before"})


def exported(folder, *, evaluated: bool):
    run = write_run(folder / "run", recipe(folder / "Qwen3-Tiny"))
    (run / "export").mkdir()
    (run / "evaluation").mkdir()
    Hold(run, {"versions": {"torch": "2.13.0"}})
    writer = MetricsWriter(run)
    writer.write(20, {})
    writer.close()
    before, after = result([0, 0], [0, 1]), result([1, 1], [0, 1])
    after = dataclasses.replace(after, manifest=before.manifest | {"weights": "after"})
    if evaluated:
        write_results(run / "evaluation/before.json", [before])
        write_results(run / "evaluation/after.json", [after])
    return write_model_card(run), before, after


def test_the_hub_finds_the_accuracies_and_people_the_change(tmp_path):
    card, before, after = exported(tmp_path, evaluated=True)
    read = ModelCard.load(card)
    (found,) = read.data.eval_results
    assert (found.dataset_name, found.metric_name, found.metric_value) == ("sums", "avg@2", 0.75)
    assert read.data.library_name == "transformers"
    assert f"| sums | 2 | avg@2 | {after.accuracy} | {compare([before], [after]).points} |" in read.text
    assert compare([before], [after]).points.startswith("+50.0 points [")
    assert "`Qwen3-Tiny` trained with megatron_eqlen: eqlen-grpo, seed 0; 20 of 20 steps." in read.text
    assert read.text.endswith("## Made with\n\ntorch 2.13.0\n")
    assert "- sums: `sums.parquet`, read as deepmath" in read.text


def test_the_card_has_no_address_or_local_path(tmp_path):
    where = {
        "run_dir": str(tmp_path / "run"),
        "reward": {"sandbox_url": "http://secret-host:1"},
        "variant": {"reward.sandbox_url": "http://secret-host:1"},
        "data": {"instruction": "x" * 300 + " and/or", "sources": [{"name": "sums", "path": "sums.parquet"}]},
    }
    run = write_run(tmp_path / "run", recipe(tmp_path / "Qwen3-Tiny", **where))
    (run / "export").mkdir()
    text = write_model_card(run).read_text()
    assert "secret" not in text
    assert str(tmp_path) not in text
    assert "kl_coef: 0" in text


def test_a_run_without_benchmarks_has_a_card_too(tmp_path):
    card, *_ = exported(tmp_path, evaluated=False)
    assert "## Evaluation" not in ModelCard.load(card).text
