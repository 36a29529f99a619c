"""The main job as a user runs it: `eqlen train` in processes of its own, on a tiny random model.

Real vLLM, real Megatron, real checkpoints; the reward is a function, so that a random model has a signal.
"""

import gzip
import json
import math
import re
import shutil
import statistics
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.job import load
from megatron_eqlen.processes import events
from megatron_eqlen.processes.lifeline import named
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.report.status import RunStatus
from megatron_eqlen.report.text import recipe_of
from tests.kit.jobs import run, start
from tests.kit.marks import weekly
from tests.kit.processes import are_gone, command_line, descendants, within
from tests.kit.sentencepiece_maker import write_sentencepiece_tokenizer
from tests.kit.servers import ENVIRON, free_ports
from tests.kit.train_runs import NO_EVALUATION, STEPS, column, command, metrics, train


def test_trainer_and_engine_agree_at_every_step(trained):
    assert column(trained, "step") == [1, 2, 3]
    assert max(column(trained, "mismatch/logprob_abs_diff_max")) < 1e-4
    assert max(map(abs, column(trained, "mismatch/kl"))) < 1e-5
    assert min(column(trained, "train/grad_norm")) > 0, "nothing was trained"
    for record in metrics(trained):
        effective = record["objective/effective_samples"] / record["harvest/generated_tokens"]
        assert record["objective/effective_per_1k_tokens"] == pytest.approx(1000 * effective)


def test_every_rollout_is_recorded_with_its_grades(trained):
    for step in range(STEPS):
        rollouts = read_step(trained / f"streams/step-{step:08d}")
        assert len(rollouts) == 4 * 2
        assert {rollout.policy_version for rollout in rollouts} == {step}
        assert all(segment.grade is not None for rollout in rollouts for segment, _ in rollout.ended())


def test_the_run_folder_is_complete(trained):
    for name in ("recipe.yaml", "report.html", "evaluation/before.json", "evaluation/after.json"):
        assert (trained / name).stat().st_size > 0
    assert [path.name for path in sorted((trained / "checkpoints").glob("step-*"))] == [
        "step-00000002",
        "step-00000003",
    ]
    assert not (trained / "hang").exists()
    assert RunStatus(trained).condition == "complete"
    first, *later = metrics(trained)
    assert first.get("checkpoint/bytes") is None
    stages = Counter(event["stage"] for event in events.read(trained) if "began" in event)
    assert all(stages[name] >= STEPS for name in ("harvest", "unpark", "train", "park", "sync"))
    for record in metrics(trained):
        assert record["memory/peak/train"] > 1e8
        assert record["train/tokens_per_gpu_second"] > 0
    assert [record["data/prompts_drawn"] for record in metrics(trained)] == [4, 8, 12]
    assert first["data/source/questions/epochs"] == 4 / 40
    for record in later:  # the checkpoint of the step before, in force before this step's update
        assert record["checkpoint/bytes"] > 1e5
        assert record["time/checkpoint"] > 0
        assert record["memory/parked_bytes"] > 1e5


def test_the_export_is_the_trained_model_for_transformers(home, trained):
    base = AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(trained / "export", dtype=torch.float32)
    moved = [
        (after - before).abs().max().item()
        for before, after in zip(base.parameters(), exported.parameters(), strict=True)
    ]
    assert 1e-4 < max(moved) < 3 * STEPS * 1e-3, "Adam moves a weight by about lr a step"


def test_two_tensor_parallel_ranks_train_like_one_on_the_same_streams(home, trained):
    replay = ["--replay", str(trained / "streams")]
    two = train(home, "tensor", "parallel.tensor=2", *replay, NO_EVALUATION, ranks=2)
    for name in ("loss/total", "loss/policy", "loss/ref_kl", "loss/entropy", "train/grad_norm"):
        assert column(two, name) == pytest.approx(column(trained, name), rel=1e-5, abs=1e-6), name
    assert set(column(two, "time/slowest_rank/train")) <= {0.0, 1.0}


def test_the_baseline_runs_with_the_same_command_and_its_trace_names_the_stages(home):
    traced = ["profile.steps=[1]", "rollout.max_response_length=24", "loss.epochs=2", NO_EVALUATION]
    folder = train(home, "grpo", "objective=grpo", "sampling=independent", "steps=1", *traced)
    with gzip.open(folder / "profile/step-00000001-rank-0.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert names >= {"stage harvest", "stage trees", "stage train", "stage sync", "aten::mm"}
    assert column(folder, "harvest/completions") == [4 * 4]
    assert column(folder, "train/grad_norm")[0] > 0
    (record,) = metrics(folder)
    trained = record["train/tokens_per_second"] * record["time/train"]
    assert trained == pytest.approx(2 * record["packing/tokens"]), "each epoch computes all rows"


def test_dynamic_sampling_refills_the_step_with_prompts_that_teach(home):
    grader = "data.sources.0.grader=tests.kit.rubrics:even_length_if_odd_gold"
    options = ["objective=dapo", "steps=1", "loss.max_num_gen_batches=5", NO_EVALUATION]
    folder = train(home, "dapo", *options, grader)
    (record,) = metrics(folder)
    assert record["objective/filtered_prompts"] > 0
    recorded = read_step(folder / "streams/step-00000000")
    trained_on = {rollout.prompt_id for rollout in recorded}
    assert len(trained_on) > 4, "more prompts than one batch were sampled"
    assert record["harvest/rollouts"] == len(recorded), "of all batches"
    assert record["objective/zero_advantage_fraction"] < 1


def test_with_the_sampling_mask_the_trainer_computes_the_distribution_that_was_sampled(home):
    """Sampling cuts off half of the probability here, so without the mask the two would be far apart."""
    sampling = ["rollout.top_k=5", "rollout.top_p=0.7", "rollout.keep_sampling_mask=true"]
    sampling += ["rollout.max_response_length=80"]
    folder = train(home, "masked", "steps=2", *sampling, NO_EVALUATION)
    assert max(column(folder, "mismatch/logprob_abs_diff_max")) < 1e-4
    assert all(1 < kept <= 5 for kept in column(folder, "harvest/kept_per_token"))
    assert min(column(folder, "train/grad_norm")) > 0
    segments = [segment for r in read_step(folder / "streams/step-00000001") for segment in r.parts]
    for segment in segments:
        assert all(t in kept for t, kept in zip(segment.token_ids, segment.tokens["kept"], strict=True))


def test_an_fp8_engine_is_synced_and_its_larger_mismatch_is_measured_and_corrected(home):
    """A sync before the first update and one after it. The mean difference is 0.001 without quantization, and
    0.007 and 0.011 with it: weights are rounded alike on every processor. A guess would differ by what
    log-probs differ among each other (0.2)."""
    options = ["model.dtype=bfloat16", "rollout.quantization=fp8", "loss.rollout_is=token", "steps=2"]
    folder = train(home, "fp8", *options, NO_EVALUATION)
    assert column(folder, "harvest/policy_version") == [0, 1]
    for step, record in enumerate(metrics(folder)):
        recorded = read_step(folder / f"streams/step-{step:08}")
        logprobs = [value for r in recorded for part in r.parts for value in part.tokens["logprobs"]]
        mean, largest = record["mismatch/logprob_abs_diff"], record["mismatch/logprob_abs_diff_max"]
        assert 0 < mean < statistics.stdev(logprobs)
        # A weight is exp(d), cut at 2, so it is no farther from 1 than |d| times this slope.
        slope = math.expm1(largest) / largest
        assert 0 < abs(record["mismatch/rollout_is_mean"] - 1) <= slope * mean * (1 + 1e-5)
    for record in metrics(folder):
        assert all(math.isfinite(value) for name, value in record.items() if name.startswith("mismatch/"))
        assert record["train/updates"] == 1
        assert record["train/grad_norm"] > 0


def test_sampled_trees_train_and_a_run_says_once_that_it_trains_on_its_benchmark(home):
    options = ["objective=treerpo", "sampling=tree", "tree_sampling.branching=2", "steps=1"]
    said = run(*command(home, "tree", "cluster.processes_per_node=1", *options))
    assert column(home / "tree", "train/grad_norm")[0] > 0
    text = said.stdout + said.stderr
    assert text.count("data source questions holds 4 of the 4 questions of benchmark questions") == 1


def test_a_model_whose_tokenizer_is_a_sentencepiece_model_is_trained_reported_and_exported(home):
    model = home / "pieces"
    shutil.copytree(home / "base", model, ignore=shutil.ignore_patterns("tokenizer*"))
    write_sentencepiece_tokenizer(model, (home / "questions.jsonl").read_text().splitlines())
    folder = train(home, "pieces-run", f"model.path={model}", "steps=1", NO_EVALUATION)
    assert re.search(r"Compute \$\d+\+1\$", (folder / "report.html").read_text())
    texts = [load_tokenizer(each).encode("Compute $12+1$.</think>") for each in (model, folder / "export")]
    assert texts[0] == texts[1]
    assert not (folder / "export/tokenizer.json").exists()


def test_harvest_without_a_trainer_says_that_nothing_forked(home):
    out = home / "harvested"
    trees = ["sampling=tree", "objective=rloo", "tree_sampling={fork: marker, marker: never}"]
    said = run("-m", "megatron_eqlen.cli", "harvest", home / "recipe.yaml", *trees, "--out", out).stdout
    assert f"4 rollouts in {out}/step-00000000" in said
    assert "WARNING: no line forked: 'never' (tree_sampling.marker) is in no response" in said
    assert len(read_step(out / "step-00000000")) == 4
    assert recipe_of(out) == recipe_of(out / "step-00000000") == load(home / "recipe.yaml", trees)


def test_another_model_is_evaluated_on_other_questions(home, trained):
    out = home / "evaluation.json"
    arguments = [home / "recipe.yaml", f"run_dir={trained}", "evaluation.benchmarks.0.limit=2"]
    model = ["--model", trained / "export", "--out", out]
    said = run("-m", "megatron_eqlen.cli", "evaluate", *arguments, *model).stdout
    (result,) = json.loads(out.read_text())
    assert len(result["answers"]) == 2
    assert re.search(r"\| Benchmark .*\n.*\n\| \w+ +\| 2 +\| \d+\.\d% \[", said), said


FORKED = """
import os, runpy, sys
def execve(path, command, environ):
    os.environ.update(environ)
    sys.argv[:] = command[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
os.execve = execve
sys.argv[0] = "server"
runpy.run_module("megatron_eqlen.engines.server", run_name="__main__")
"""
"""A server whose second program, vLLM's own server, begins in the process of the first, which has vLLM."""


@pytest.mark.parametrize("command", [["-c", FORKED], weekly(["-m", "megatron_eqlen.engines.server"])])
def test_the_engine_of_a_server_that_is_killed_dies_with_it(home, command):
    """Python spawns the engine, which may not have begun. Weekly, the server imports vLLM as a user's."""
    port = ["--port", *free_ports(1)]
    server = start(*command, home / "recipe.yaml", *port, **named(), **ENVIRON)

    def has_engine() -> bool:
        assert server.poll() is None, server.stderr
        return any("spawn_main" in command_line(pid) for pid in descendants(server.pid))

    try:
        assert within(300, has_engine, every=0.2)
        engine = descendants(server.pid)
    finally:
        server.kill()
    assert within(60, are_gone(engine))
