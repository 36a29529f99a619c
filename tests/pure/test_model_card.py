"""The exported model's README, as the hub and people read it."""

import dataclasses

import pytest
from huggingface_hub import ModelCard

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.evaluation.result import Answers, EvaluationResult, compare, write_results
from megatron_eqlen.report.metrics import MetricsWriter
from megatron_eqlen.report.model_card import push, write_model_card
from tests.kit.hub import Hub, serving, use
from tests.kit.report_runs import recipe, write_run


def result(*rewards: list[float]) -> EvaluationResult:
    answers = [Answers(f"sums#{n}", reward, ["x"] * 2, [3] * 2) for n, reward in enumerate(rewards)]
    return EvaluationResult("sums", answers, {"question_ids": ["a", "b"], "weights": "before"})


def exported(folder, *, evaluated: bool):
    run = write_run(folder / "run", recipe(folder / "Qwen3-Tiny"))
    (run / "export").mkdir()
    (run / "evaluation").mkdir()
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
    assert f"| sums | 2 | avg@2 | {after.accuracy} | {compare(before, after).points} |" in read.text
    assert compare(before, after).points.startswith("+50.0 points [")
    assert "`Qwen3-Tiny` trained with megatron_eqlen: eqlen-grpo, seed 0; 20 of 20 steps." in read.text
    assert "- sums: `sums.parquet`, read as deepmath" in read.text


@pytest.mark.parametrize(("to", "name"), [(None, "ann/Qwen3-Tiny-eqlen-grpo"), ("lab/best", "lab/best")])
def test_push_uploads_the_export_with_its_card_to_a_private_repository(
    tmp_path, monkeypatch, capsys, to, name
):
    card, *_ = exported(tmp_path, evaluated=True)
    (card.parent / "model.safetensors").write_bytes(b"weights")
    hub = Hub()
    with serving(hub) as address:
        use(monkeypatch, address, tmp_path / "cache")
        assert cli.main(["push", str(tmp_path / "run"), *(["--to", to] if to else [])]) == 0
    assert capsys.readouterr().out.startswith(f"{address}/{name}/commit/")
    assert hub.created[0]["visibility"] == "private"
    assert hub.files("model", name) == {"README.md": card.read_bytes(), "model.safetensors": b"weights"}


def test_a_run_that_has_exported_nothing_cannot_be_pushed(tmp_path):
    with pytest.raises(ValueError, match="expected the folder of an ended run, with export/, found none"):
        push(write_run(tmp_path / "run", recipe(tmp_path)))


def test_a_run_without_benchmarks_has_a_card_too(tmp_path):
    card, *_ = exported(tmp_path, evaluated=False)
    assert "## Evaluation" not in ModelCard.load(card).text
