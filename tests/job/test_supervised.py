"""`eqlen train` with `objective: sft`, as a user runs it."""

import json

import pytest

from megatron_eqlen.evaluation.result import read_results
from megatron_eqlen.hf.tokenizer import load_tokenizer, require_same
from megatron_eqlen.job import load
from megatron_eqlen.report.status import RunStatus
from tests.kit.jobs import forked_python, run
from tests.kit.train_runs import column, metrics, same_weights


@pytest.fixture(scope="module")
def recipe(home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": f"{n + 1}"}]}
        for n in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.yaml").write_text(
        f"""
name: sft
objective: sft
steps: 3
model: {{path: {home}/base, dtype: float32}}
data: {{prompts_per_step: 4, sources: [{{name: rows, reader: jsonl, path: {folder}/rows.jsonl}}]}}
optimizer: {{lr: 1e-3, warmup_steps: 0}}
packing: {{max_tokens_per_row: 128}}
checkpoint: {{every: 1}}
cluster: {{device: cpu}}
"""
    )
    return folder / "sft.yaml"


def trained(recipe, name: str, *arguments: str):
    run("-m", "megatron_eqlen.cli", "train", recipe, f"run_dir={recipe.parent / name}", *arguments)
    return recipe.parent / name


def test_a_run_without_benchmarks_starts_no_engine_and_resumes_bit_for_bit(recipe):
    whole = trained(recipe, "whole")
    trained(recipe, "part", "steps=2")
    resumed = trained(recipe, "part", "steps=3")
    assert same_weights(whole, resumed)
    assert column(whole, "loss/nll") == column(resumed, "loss/nll")
    assert column(whole, "loss/nll")[2] < column(whole, "loss/nll")[0]
    assert RunStatus(whole).condition == "complete"
    (record, *_) = metrics(whole)
    assert not [name for name in record if name.startswith(("mismatch/", "engine/", "reward/", "time/sync"))]
    assert record["data/prompts_drawn"] == 4
    load(whole / "recipe.yaml")  # the resolved recipe is a recipe


def test_benchmarks_are_answered_with_the_trained_weights(home, recipe):
    keys = "limit: 4, grader: tests.kit.rubrics:even_length"
    benchmark = f"[{{name: questions, reader: jsonl, path: {home}/questions.jsonl, {keys}}}]"
    run_folder = trained(
        recipe, "evaluated", f"evaluation.benchmarks={benchmark}", "evaluation.samples=2",
        "rollout.max_response_length=8",
        "rollout.kv_cache_gib=0.02", "data.max_prompt_length=48", "data.instruction_role=none", "lora.rank=4",
    )  # fmt: skip
    before, after = (read_results(run_folder / f"evaluation/{name}.json")[0] for name in ("before", "after"))
    assert before.scores.shape == after.scores.shape == (2, 4)
    assert (run_folder / "adapter").is_dir()


TOOL = """
import runpy, sys
_, sys.executable, *sys.argv = sys.argv
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A tool, whose own processes are forked: Python would import torch, Megatron and vLLM for each."""


def test_a_tiny_model_is_warmed_up_on_its_answers_and_the_same_arguments_give_the_same_weights(tmp_path):
    python = forked_python(tmp_path / "python")
    rows = [{"question": f"{n}?", "answer": f"{n}"} for n in range(8)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, steps in (("random", "0"), ("first", "2"), ("second", "2")):
        files = ("--data", tmp_path / "mine.jsonl", "--out", tmp_path / name)
        arguments = (*files, "--steps", steps, "--batch-size", "4", "--processes", "1")
        run("-c", TOOL, python, "tools/make_tiny_model.py", *arguments)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("random", "first", "second")]
    assert weights[0] != weights[1] == weights[2]
    first, random = (load_tokenizer(tmp_path / name) for name in ("first", "random"))
    require_same(first, random)
    assert first.eos_token_ids == random.eos_token_ids
