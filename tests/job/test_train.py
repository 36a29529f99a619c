"""The main job as a user runs it: `eqlen train` in processes of its own, on a tiny random model.

Real vLLM, real Megatron, real checkpoints; the reward is a rubric, so that a random model has a signal.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_eqlen.recipe_load import load
from megatron_eqlen.report.rollouts import recipe_of
from megatron_eqlen.rollout import recorder
from megatron_eqlen.rollout.recorder import read_dump, read_step
from tests.kit import ROOT
from tests.kit.jobs import run, start, start_ranks
from tests.kit.processes import within
from tools.benchmarks import servers

STEPS = 3


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """A folder with a random tiny model, its data and a recipe."""
    folder = tmp_path_factory.mktemp("train")
    run("tools/make_arithmetic.py", "--out", folder / "data", "--train", "60", "--test", "4")
    data = folder / "data/train.parquet"
    model = ["--out", folder / "base", "--steps", "0", "--processes", "1"]
    run("tools/make_tiny_model.py", "--data", data, *model)
    rows = [{"question": f"Compute ${n}+1$.", "answer": str(n + 1), "grader": "rubric"} for n in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        f"""
name: test
steps: {STEPS}
group_size: 4
model: {{path: {folder}/base, dtype: float32}}
data:
  prompts_per_step: 4
  max_prompt_length: 48
  instruction_role: none
  sources: [{{name: questions, reader: jsonl, path: {folder}/questions.jsonl}}]
reward: {{rubric: "tests.kit.rubrics:even_length", workers: 1}}
rollout:
  {{temperature: 1.0, top_p: 1.0, top_k: 0, max_response_length: 80, max_num_seqs: 32, kv_cache_gib: 0.2}}
optimizer: {{lr: 1e-3, warmup_steps: 0}}
packing: {{max_tokens_per_row: 512}}
checkpoint: {{every: 1, keep: 2}}
evaluation:
  samples: 2
  benchmarks: [{{name: questions, reader: jsonl, path: {folder}/questions.jsonl, limit: 4}}]
"""
    )
    return folder


@pytest.fixture(scope="session")
def trained(home) -> Path:
    """A finished run on one rank."""
    return train(home, "one")


def train(home: Path, name: str, *arguments: str, ranks: int = 1) -> Path:
    processes = f"cluster.processes_per_node={ranks}"
    run(*command(home, name, processes, *arguments), ranks=ranks)
    return home / name


def command(home: Path, name: str, *arguments: str) -> list:
    return ["-m", "megatron_eqlen.cli", "train", home / "recipe.yaml", f"run_dir={home / name}", *arguments]


def metrics(run_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def column(run_folder: Path, name: str) -> list[float]:
    return [record[name] for record in metrics(run_folder)]


def test_trainer_and_engine_agree_at_every_step(trained):
    assert column(trained, "step") == [1, 2, 3]
    assert max(column(trained, "loss/mismatch_max")) < 1e-4
    assert max(map(abs, column(trained, "loss/mismatch_kl"))) < 1e-5
    assert min(column(trained, "train/grad_norm")) > 0, "nothing was trained"
    for record in metrics(trained):
        effective = record["objective/effective_samples"] / record["harvest/generated_tokens"]
        assert record["objective/effective_per_1k_tokens"] == pytest.approx(1000 * effective)


def test_every_rollout_is_recorded_with_its_grades(trained):
    for step in range(STEPS):
        rollouts = read_dump(trained / f"streams/step-{step:08d}/rank-0.arrow")
        assert len(rollouts) == 4 * 2
        assert {rollout.policy_version for rollout in rollouts} == {step}
        assert all(segment.grade is not None for rollout in rollouts for segment, _ in rollout.ended())


def test_the_run_folder_is_complete(trained):
    for name in ("recipe.yaml", "report.html", "evaluation/before.json", "evaluation/after.json"):
        assert (trained / name).stat().st_size > 0
    assert list((trained / "tensorboard").glob("events*"))
    assert [path.name for path in sorted((trained / "checkpoints").glob("step-*"))] == [
        "step-00000002",
        "step-00000003",
    ]
    first, *later = metrics(trained)
    assert first.get("checkpoint/bytes") is None
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


def test_a_finished_run_is_left_as_it_is(home, trained):
    before = (trained / "metrics.jsonl").read_bytes()
    assert "complete; see" in run(*command(home, "one")).stdout, "it looks before it starts an engine"
    assert (trained / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("layout", ["parallel.tensor=2", "parallel.tensor=1"])
def test_two_ranks_train_like_one_on_the_same_streams(home, trained, layout):
    two = train(home, layout, layout, "--replay", str(trained / "streams"), ranks=2)
    for name in ("loss/total", "loss/policy", "loss/ref_kl", "loss/entropy", "train/grad_norm"):
        assert column(two, name) == pytest.approx(column(trained, name), rel=1e-5, abs=1e-6), name


def streams_that_teach_little(trained: Path, folder: Path, spoil_of: dict[int, Callable]) -> Path:
    """The run's record with the rollouts of some steps, counted from 0, spoiled."""
    shutil.copytree(trained / "streams", folder)
    for step, spoil in spoil_of.items():
        path = folder / f"step-{step:08d}/rank-0.arrow"
        rollouts = read_dump(path)
        path.unlink()
        path.with_name("grades-rank-0.arrow").unlink()
        for rollout in rollouts:
            spoil(rollout)
        recorder.record(path, rollouts)
    return folder


def no_reward(rollout) -> None:
    for segment, _ in rollout.ended():
        segment.grade.reward = 0.0


def nan_logprob(rollout) -> None:
    for segment in rollout.segments():
        segment.logprobs = np.where(np.arange(len(segment)) == 0, np.float32(math.nan), segment.logprobs)


def checkpoints(run_folder: Path) -> list[str]:
    return [path.name[-1] for path in sorted((run_folder / "checkpoints").glob("step-*"))]


def test_steps_that_train_nothing_are_said_and_skipped_ones_leave_the_checkpoint(home, trained, tmp_path):
    spoiled = streams_that_teach_little(trained, tmp_path / "streams", {0: no_reward, 1: nan_logprob})
    replay = ["--replay", str(spoiled)]
    said = run(*command(home, "idle", "checkpoint.keep=3", *replay))
    assert column(home / "idle", "train/updates") == [0, 0, 1]
    assert column(home / "idle", "train/skipped_updates") == [0, 1, 0]
    assert "WARNING: step 1 trained nothing: none of its" in said.stdout
    assert "WARNING: step 2 trained nothing: 1 updates were skipped" in said.stdout
    assert "no checkpoint after step 2" in said.stdout
    assert "WARNING: 2 of 3 steps trained nothing" in said.stdout
    assert "the rollout_logprob of token 0 is nan" in said.stderr
    assert checkpoints(home / "idle") == ["1", "3"]
    with pytest.raises(AssertionError, match="1 updates in a row could not be taken"):
        run(*command(home, "strict", "optimizer.max_skipped_updates=0", *replay))
    assert checkpoints(home / "strict") == ["1"]
    assert not (home / "strict/export").exists()


def test_a_run_whose_last_update_is_skipped_ends_like_any_other(home, trained, tmp_path):
    spoiled = streams_that_teach_little(trained, tmp_path / "streams", {STEPS - 1: nan_logprob})
    again = command(home, "last", "--replay", str(spoiled))
    assert "WARNING: step 3 trained nothing: 1 updates were skipped" in run(*again).stdout
    assert checkpoints(home / "last") == ["2", "3"]
    ended = (home / "last/metrics.jsonl").read_bytes()
    exported = (home / "last/export/model.safetensors").read_bytes()
    run(*again)
    assert (home / "last/metrics.jsonl").read_bytes() == ended
    assert (home / "last/export/model.safetensors").read_bytes() == exported


def test_killed_at_any_moment_and_started_again_it_ends_the_same(home, trained):
    """Once the launcher alone, with what `eqlen` itself starts; once the ranks."""
    folder = home / "killed"
    two = command(home, "killed", "cluster.processes_per_node=2")
    launcher = subprocess.Popen(
        [sys.executable, *map(str, two)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_steps(folder, 1, launcher)
    launcher.kill()
    launcher.wait()
    ranks = start_ranks(2, *two)
    wait_for_steps(folder, 2, *ranks)
    for rank in ranks:
        rank.kill()
    train(home, "killed", ranks=2)
    assert column(folder, "step") == [1, 2, 3]
    assert column(folder, "loss/total") == pytest.approx(column(trained, "loss/total"), rel=1e-4, abs=1e-6)


def wait_for_steps(folder: Path, count: int, *processes: Any) -> None:
    """Until that many steps are in the metrics."""

    def there() -> bool:
        assert all(process.poll() is None for process in processes), "it ended before its time"
        return (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= count

    assert within(300, there)


def test_with_a_server_two_ranks_train_like_one_with_the_engine_inside(home, trained):
    port = str(*servers.free_ports(1))
    module = ["-m", "megatron_eqlen.rollout.vllm.server", home / "recipe.yaml", "--port", port]
    server = servers.start([sys.executable, *module], {"OMP_NUM_THREADS": "1"}, cwd=ROOT)
    try:
        servers.wait_until_up(f"http://127.0.0.1:{port}", server)
        engine = ["rollout.engine=server", f"rollout.servers=[http://127.0.0.1:{port}]"]
        folder = train(home, "server", *engine, ranks=2)
    finally:
        servers.stop(server)
    assert column(folder, "loss/total") == pytest.approx(column(trained, "loss/total"), rel=1e-4, abs=1e-6)
    assert max(column(folder, "loss/mismatch_max")) < 1e-4
    assert column(folder, "engine/live_replicas") == [1, 1, 1]
    assert column(folder, "harvest/policy_version") == [0, 1, 2]


def test_the_baseline_runs_with_the_same_command(home):
    folder = train(home, "grpo", "objective=grpo", "sampling=independent", "steps=1")
    assert column(folder, "harvest/completions") == [4 * 4]
    assert column(folder, "train/grad_norm")[0] > 0


def test_dynamic_sampling_refills_the_step_with_prompts_that_teach(home):
    rubric = "reward.rubric=tests.kit.rubrics:even_length_if_odd_gold"
    folder = train(home, "dapo", "objective=dapo", "steps=1", "loss.max_num_gen_batches=5", rubric)
    (record,) = metrics(folder)
    assert record["objective/filtered_prompts"] > 0
    recorded = read_step(folder / "streams/step-00000000")
    trained_on = {rollout.prompt_id for rollout in recorded}
    assert len(trained_on) > 4, "more prompts than one batch were sampled"
    assert record["harvest/rollouts"] == len(recorded), "of all batches"
    assert record["objective/zero_advantage_fraction"] < 1


def test_with_the_sampling_mask_the_trainer_computes_the_distribution_that_was_sampled(home):
    """Half of the probability is cut off here, so without the mask the two would be far apart."""
    sampling = ["rollout.top_k=5", "rollout.top_p=0.7", "rollout.logprobs_mode=processed"]
    folder = train(home, "masked", "steps=2", *sampling, "rollout.keep_sampling_mask=true")
    assert max(column(folder, "loss/mismatch_max")) < 1e-4
    assert min(column(folder, "engine/removed_probability")) > 0.5
    assert all(1 < kept <= 5 for kept in column(folder, "harvest/kept_per_token"))
    assert min(column(folder, "train/grad_norm")) > 0
    segments = [one for r in read_dump(folder / "streams/step-00000001/rank-0.arrow") for one in r.segments()]
    for segment in segments:
        assert all(t in kept for t, kept in zip(segment.token_ids, segment.sampling_mask, strict=True))


def test_sampled_trees_train(home):
    folder = train(home, "tree", "objective=treerpo", "sampling=tree", "tree_sampling.branching=2", "steps=1")
    assert column(folder, "train/grad_norm")[0] > 0


def test_a_stop_file_ends_the_run_with_a_checkpoint_and_the_run_goes_on_later(home):
    folder = home / "stopped"
    job = start(*command(home, "stopped", "steps=200", "checkpoint.every=100"))
    wait_for_steps(folder, 1, job)
    (folder / "STOP").touch()
    assert job.wait() == 0
    done = len(metrics(folder))
    assert (folder / "checkpoints/latest").read_text().strip() == f"step-{done:08d}"
    assert not (folder / "export").exists()


def test_a_run_ends_with_its_gpu_hours_and_goes_on_with_more_to_the_same_bits(home, trained):
    folder = train(home, "budget", "gpu_hours=1e-6")
    assert column(folder, "step") == [1]
    ended = (folder / "evaluation/after.json").read_bytes()
    train(home, "budget", "gpu_hours=1")
    assert column(folder, "step") == [1, 2, 3]
    assert 1e-6 < column(folder, "time/gpu_hours")[0] < column(folder, "time/gpu_hours")[2]
    assert (folder / "evaluation/step-00000001.json").read_bytes() == ended, "nothing earned is lost"
    assert (folder / "export-step-00000001/model.safetensors").is_file()
    assert (folder / "evaluation/after.json").read_bytes() != ended
    weights = [load_file(run / "export/model.safetensors") for run in (folder, trained)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(home, trained):
    """The run was complete at step 3: what it ended with stays step 3's, though it goes back to step 2."""
    folder = shutil.copytree(trained, home / "damaged")
    data = max((folder / "checkpoints/step-00000003").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    said = run(*command(home, "damaged", "steps=4")).stderr
    assert f"{data}: damaged: expected crc32" in said
    assert "step-00000002: the run goes on from this checkpoint" in said
    assert column(folder, "step") == [1, 2, 3, 4]
    for name in ("loss/total", "train/grad_norm", "reward/mean"):
        assert column(folder, name)[:3] == column(trained, name), "step 3 is taken again on its own rollouts"
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == [
        "step-00000003",
        "step-00000003-damaged",
        "step-00000004",
    ]
    ended = (trained / "evaluation/after.json").read_bytes()
    assert (folder / "evaluation/step-00000003.json").read_bytes() == ended
    assert (folder / "export-step-00000003/model.safetensors").is_file()


def test_harvest_without_a_trainer(home):
    out = home / "harvested"
    run("-m", "megatron_eqlen.cli", "harvest", home / "recipe.yaml", "--out", out)
    assert len(read_dump(out / "step-00000000/rank-0.arrow")) == 4 * 2
    assert recipe_of(out) == recipe_of(out / "step-00000000") == load(home / "recipe.yaml")


def test_another_model_is_evaluated_on_other_questions(home, trained):
    out = home / "evaluation.json"
    arguments = [home / "recipe.yaml", f"run_dir={trained}", "evaluation.benchmarks.0.limit=2"]
    model = ["--model", trained / "export", "--out", out]
    run("-m", "megatron_eqlen.cli", "evaluate", *arguments, *model)
    (result,) = json.loads(out.read_text())
    assert len(result["answers"]) == 2
