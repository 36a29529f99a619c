"""Runs that stop, are killed, skip updates or lose a checkpoint, and resume."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_eqlen.evaluation.result import read_results
from megatron_eqlen.job import load
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.processes.run_state import read_state
from megatron_eqlen.recipe.load import load_run
from megatron_eqlen.record.arrow_log import batches
from megatron_eqlen.record.format import SEGMENTS
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.report.status import RunStatus
from megatron_eqlen.types import Part
from tests.kit.jobs import run, start, start_ranks
from tests.kit.processes import are_gone, descendants, within
from tests.kit.talking import ANSWERED
from tests.kit.train_runs import (
    NO_EVALUATION,
    STEPS,
    checkpoints,
    column,
    command,
    metrics,
    nan_logprob,
    no_reward,
    same_weights,
    streams_that_teach_little,
    train,
    wait_for_steps,
)


def streams_of(folder: Path) -> list[Part]:
    """Return all segments of a run's record, in training order."""
    return [
        segment
        for step in sorted((folder / "streams").glob("step-*"))
        for rollout in read_step(step)
        for segment in rollout.parts
    ]


def test_a_finished_run_is_left_as_it_is(home, trained):
    before = (trained / "metrics.jsonl").read_bytes()
    assert "complete; see" in run(*command(home, "one")).stdout, "it looks before it starts an engine"
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_steps_that_train_nothing_are_said_and_a_skipped_one_has_a_checkpoint_only_at_the_end(
    home, trained, tmp_path
):
    spoils = {0: no_reward, 1: nan_logprob, STEPS - 1: nan_logprob}
    spoiled = streams_that_teach_little(trained, tmp_path / "streams", spoils)
    again = command(home, "idle", "checkpoint.keep=3", NO_EVALUATION, "--replay", str(spoiled))
    said = run(*again)
    assert column(home / "idle", "train/updates") == [0, 0, 0]
    assert column(home / "idle", "train/skipped_updates") == [0, 1, 1]
    assert "WARNING: step 1 trained nothing: none of its" in said.stdout
    assert "WARNING: step 2 trained nothing: 1 updates were skipped" in said.stdout
    assert "no checkpoint after step 2" in said.stdout
    assert "WARNING: 3 of 3 steps trained nothing: the weights are those that" in said.stdout
    warned = [text for _, text in read_state(home / "idle").warnings]
    assert warned[0].startswith("step 1 trained nothing")
    assert warned[1].startswith("update 1 is skipped")
    assert "the rollout_logprob of token 0 is nan" in said.stderr
    assert checkpoints(home / "idle") == ["1", "3"]
    ended = [(home / "idle" / name).read_bytes() for name in ("metrics.jsonl", "export/model.safetensors")]
    run(*again)
    assert ended == [
        (home / "idle" / name).read_bytes() for name in ("metrics.jsonl", "export/model.safetensors")
    ]
    with pytest.raises(AssertionError, match="1 updates in a row could not be taken"):
        run(*command(home, "strict", "optimizer.max_skipped_updates=0", *again[-3:]))
    assert checkpoints(home / "strict") == ["1"]
    assert not (home / "strict/export").exists()


LONG = ("rollout.max_response_length=120", "packing.max_tokens_per_row=768", "steps=2", NO_EVALUATION)


HOLDS_IN_MID_HARVEST = """
import sys, time
from collections import Counter
from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.record import recorder
recorder.INTERVAL = 0.0
decode_step_finished = recorder.Recorder.decode_step_finished
steps = Counter()  # by harvest
def then_hold(self, last=False):
    decode_step_finished(self, last)
    steps[self] += 1
    if len(steps) == 2 and steps[self] == 30:
        time.sleep(600)
recorder.Recorder.decode_step_finished = then_hold
sys.exit(main())
"""
"""``eqlen`` that records after each decode step, and waits after the 30th of the second harvest until it is
killed."""


def tokens_in(journal: Path) -> int:
    """Return the number of tokens of unfinished rollouts in a file; 0 if it does not exist."""
    read = batches(journal, SEGMENTS, ["tokens"]) if journal.exists() else ()
    return sum(sum(batch["tokens"].to_pylist()) for batch in read)


def test_killed_in_mid_harvest_it_resumes_from_the_journal_and_ends_with_the_same_bits(home):
    """An environment answers turns: what it said before is repeated to a new one. The teacher is the model as
    it was at the start."""
    keys = (*LONG, *ANSWERED, f"teacher.path={home / 'base'}")
    whole = train(home, "long", *keys)
    folder = home / "long-killed"
    journal = folder / "streams/step-00000001/open-rank-0.arrow"
    _, _, *arguments = command(home, "long-killed", *keys)
    job = start("-c", HOLDS_IN_MID_HARVEST, *arguments)
    assert within(300, lambda: tokens_in(journal) > 50 or job.poll() is not None), job.stderr
    job.kill()
    assert RunStatus(folder).condition == "killed"
    train(home, "long-killed", *keys)
    tokens = [[segment.token_ids for segment in streams_of(run)] for run in (folder, whole)]
    assert all(np.array_equal(mine, others) for mine, others in zip(*tokens, strict=True))
    assert same_weights(folder, whole)
    assert column(folder, "harvest/resumed_tokens")[1] > 50
    assert column(folder, "harvest/generated_tokens") == column(whole, "harvest/generated_tokens")
    assert column(whole, "environment/turns")[1] > 0 < column(whole, "harvest/forks")[1]
    for name in ("environment/turns", "environment/cut", "harvest/forks", "harvest/forks_prefilled"):
        assert column(folder, name) == column(whole, name)
    assert column(folder, "harvest/requests")[1] > column(whole, "harvest/requests")[1], "of both attempts"
    assert column(whole, "loss/teacher_kl")[1] > 0


def test_killed_in_a_batch_of_prompts_it_resumes_and_draws_further_batches(home):
    """Only one of the first 8 questions of this seed can teach, so dynamic sampling draws more than 2 x 4."""
    grader = "data.sources.0.grader=tests.kit.rubrics:even_length_if_odd_gold"
    keys = (*LONG, "steps=1", "objective=dapo", "seed=4", grader)
    whole, folder = train(home, "batches", *keys), home / "batches-killed"
    assert (whole / "streams/step-00000000/rank-0-3.arrow").exists()
    journal = folder / "streams/step-00000000/open-rank-0-2.arrow"
    job = start("-c", HOLDS_IN_MID_HARVEST, *command(home, "batches-killed", *keys)[2:])
    assert within(300, lambda: tokens_in(journal) > 20 or job.poll() is not None), job.stderr
    job.kill()
    train(home, "batches-killed", *keys)
    assert same_weights(folder, whole)
    assert not journal.exists()


def test_killed_in_an_evaluation_it_goes_on_with_the_responses_and_their_environments(home):
    """Each sample has an environment of its own, which a resumed one meets again."""
    keys = (*LONG[:-1], *ANSWERED, "steps=1", "evaluation.samples=4")
    whole, folder = train(home, "evaluated", *keys), home / "evaluated-killed"
    job = start("-c", HOLDS_IN_MID_HARVEST.replace("== 2", "== 1"), *command(home, folder.name, *keys)[2:])
    responses = folder / "evaluation/before-responses"
    assert within(300, lambda: sum(map(tokens_in, responses.glob("*/open-*"))) > 50 or job.poll() is not None)
    job.kill()
    assert not (folder / "evaluation/before.json").exists()
    said = run(*command(home, folder.name, *keys)).stdout
    (of_benchmark,) = responses.iterdir()
    assert f"questions: goes on from the responses in {of_benchmark}" in said
    for name in ("before", "after"):
        results = [read_results(each / f"evaluation/{name}.json") for each in (folder, whole)]
        assert results[0][0].answers == results[1][0].answers
        assert results[0][0].manifest == results[1][0].manifest
    assert same_weights(folder, whole)
    lengths = {rollout.prompt_id: [*map(len, rollout.parts)] for rollout in read_step(of_benchmark)}
    (before,) = read_results(folder / "evaluation/before.json")
    assert lengths == {answers.prompt_id: answers.lengths for answers in before.answers}
    shown = run("-m", "megatron_eqlen.cli", "inspect", responses).stdout
    assert of_benchmark.name in shown
    assert "again" in shown


HOLDS_AFTER_A_STEP = """
import sys, time
from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.report.metrics import MetricsWriter
write = MetricsWriter.write
def write_and_hold(self, step, *others):
    write(self, step, *others)
    time.sleep(600)
MetricsWriter.write = write_and_hold
sys.exit(main())
"""
"""``eqlen`` that waits after a step until it is killed."""


def test_killed_ranks_take_their_processes_with_them_and_started_again_the_run_ends_the_same(home, trained):
    whole = train(home, "two", "steps=2", NO_EVALUATION, ranks=2)
    folder = home / "killed-ranks"
    _, _, *arguments = command(home, "killed-ranks", "cluster.processes_per_node=2", "steps=2", NO_EVALUATION)
    ranks = start_ranks(2, "-c", HOLDS_AFTER_A_STEP, *arguments)
    wait_for_steps(folder, 1, *ranks)
    started = [pid for rank in ranks for pid in descendants(rank.pid)]
    assert started
    for rank in ranks:
        rank.kill()
    assert within(20, are_gone(started))
    assert RunStatus(folder).condition == "killed"
    train(home, "killed-ranks", "steps=2", NO_EVALUATION, ranks=2)
    assert column(folder, "step") == [1, 2]
    assert column(folder, "loss/total") == column(whole, "loss/total")
    assert same_weights(folder, whole)
    assert column(folder, "loss/total") == pytest.approx(
        column(trained, "loss/total")[:2], rel=1e-4, abs=1e-6
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own needs root")
def test_a_run_whose_disk_fills_up_leaves_whole_checkpoints_and_continues_when_there_is_room(home, trained):
    """The disk fills up while the second checkpoint is written."""
    folder = home / "full"
    folder.mkdir()
    size = sum(file.stat().st_size for file in (trained / "checkpoints/step-00000003").iterdir())
    replay = command(home, "full", NO_EVALUATION, "--replay", str(trained / "streams"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * size)}", "tmpfs", folder], check=True)
    try:
        failure = r"eqlen train: .*step-00000002: could not be written: .* \(0.00 GB free\)"
        with pytest.raises(AssertionError, match=failure):
            run(*replay)
        assert checkpoints(folder) == ["1"]
        checkpoint_folder.verify(folder / "checkpoints/step-00000001")
        subprocess.run(["mount", "-o", "remount,size=1g", folder], check=True)
        run(*replay)
        assert column(folder, "loss/total") == column(trained, "loss/total")
        mine, others = (
            load_file(run_folder / "export/model.safetensors") for run_folder in (folder, trained)
        )
        assert all(torch.equal(weight, others[name]) for name, weight in mine.items())
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_ctrl_c_ends_the_run_after_its_step_as_a_stop_file_does(home):
    """A STOP from before the start, which a killed try did not see, does not stop this one."""
    folder = home / "stopped"
    folder.mkdir()
    (folder / "STOP").touch()
    os.utime(folder / "STOP", (0, 0))
    job = start(*command(home, "stopped", "steps=200", "checkpoint.every=100", NO_EVALUATION))
    assert within(100, lambda: f"{folder}/STOP: removed: it is older than this command" in job.stderr)
    wait_for_steps(folder, 2, job)
    os.kill(job.pid, signal.SIGINT)
    assert job.wait() == 0
    assert "eqlen: stops after this step" in job.stderr
    done = len(metrics(folder))
    assert (folder / "checkpoints/latest").read_text().strip() == f"step-{done:08d}"
    assert not (folder / "export").exists()


def test_a_stop_file_of_after_the_commands_start_ends_the_run_before_it_begins(home):
    folder = home / "early"
    folder.mkdir()
    (folder / "STOP").touch()
    said = run(*command(home, "early", "cluster.processes_per_node=2"), ranks=2, EQLEN_BEGAN="0").stdout
    assert f"stopped before it began, as {folder}/STOP asked; the same command starts it" in said
    assert not (folder / "STOP").exists()
    assert RunStatus(folder).condition == "stopped"
    assert not (folder / "evaluation").exists()


def test_a_run_ends_with_its_budget_and_resumes_with_more_to_the_same_bits(home, trained):
    folder = train(home, "budget", "gpu_hours=1e-6")
    assert column(folder, "step") == [1]
    ended = (folder / "evaluation/after.json").read_bytes()
    (responses,) = (folder / "evaluation/after-responses").iterdir()
    flops = column(trained, "total/flops")
    train(home, "budget", "steps=null", f"flops={flops[1] + 1}")
    assert column(folder, "step") == [1, 2, 3]
    assert column(folder, "total/flops") == flops, "what a run spends does not depend on where it stopped"
    assert column(folder, "total/generated_tokens")[2] == sum(column(trained, "harvest/generated_tokens"))
    assert 1e-6 < column(folder, "time/gpu_hours")[0] < column(folder, "time/gpu_hours")[2]
    assert (folder / "evaluation/step-00000001.json").read_bytes() == ended, "nothing earned is lost"
    assert (folder / "evaluation/step-00000001-responses" / responses.name).is_dir()
    assert (folder / "export-step-00000001/model.safetensors").is_file()
    assert (folder / "evaluation/after.json").read_bytes() != ended
    assert [result.benchmark for result in read_results(folder / "evaluation/after.json")] == ["questions"]
    weights = [load_file(run / "export/model.safetensors") for run in (folder, trained)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_an_ended_run_measures_what_its_evaluation_lacks_and_nothing_twice(home, trained):
    folder = shutil.copytree(trained, home / "measured")
    before, after = (folder / f"evaluation/{name}.json" for name in ("before", "after"))
    first, (record,) = before.read_bytes(), json.loads(after.read_text())
    record["answers"][0]["verdicts"][0] = "marked"
    (folder / "evaluation/step-00000003.json").write_text(json.dumps([record]))
    after.unlink()
    same = load(home / "recipe.yaml").evaluation.benchmarks[0].model_dump(mode="json", exclude_unset=True)
    both = f"evaluation.benchmarks={json.dumps([same, same | {'name': 'fewer', 'limit': 2}])}"
    run(*command(home, "measured", both))
    answers = {result.benchmark: result.answers for result in read_results(after)}
    assert answers["questions"][0].verdicts[0] == "marked", (
        "the last step's own evaluation is of these weights"
    )
    assert [len(answers["fewer"]), len(answers["fewer"][0].rewards)] == [2, 2]
    assert "complete; see" in run(*command(home, "measured", both)).stdout
    run(*command(home, "measured", both, "evaluation.samples=3"))
    for result in read_results(after):
        assert result.samples == 3
        assert result.verdict_fraction("marked") == 0
    assert before.read_bytes() == first, "no weights are left to measure before training"


def test_a_run_whose_checkpoints_or_records_are_gone_says_so(home, trained):
    folder = shutil.copytree(trained, home / "lost")
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().partition("\n")[2])
    more = command(home, "lost", "steps=4", NO_EVALUATION)
    said = run(*more).stdout
    assert f"{folder}/metrics.jsonl has no record of 1 of 3 steps (the first: step 1)" in said
    shutil.rmtree(folder / "checkpoints")
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(
        AssertionError, match="checkpoints: holds no checkpoint, but one was saved after step 4"
    ):
        run(*command(home, "lost", "steps=5", NO_EVALUATION))
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_an_ended_run_exports_again_what_was_lost_and_refuses_other_data(home, trained):
    folder = shutil.copytree(trained, home / "exported")
    (folder / "export/README.md").write_text("Edited.")
    assert "complete; see" in run(*command(home, "exported")).stdout
    (folder / "export/model.safetensors").unlink()
    said = run(*command(home, "exported"))
    assert "export: not what this run wrote: set aside as export-changed" in said.stderr
    assert same_weights(folder, trained)
    assert (folder / "export-changed/README.md").read_text() == "Edited."
    rows = home / "questions.jsonl"
    kept = rows.read_text()
    rows.write_text("".join(reversed(kept.splitlines(keepends=True))))
    try:
        with pytest.raises(AssertionError, match=r"other inputs: .*questions\.jsonl has changed; put them"):
            run(*command(home, "exported", "steps=4"))
    finally:
        rows.write_text(kept)
    assert column(folder, "step") == [1, 2, 3]
    assert RunStatus(folder).condition == "complete", "a command that is refused changes no recipe"
    stored = folder / "recipe.yaml"
    stored.write_text(stored.read_text().replace("steps: 3", "steps: 4"))
    assert RunStatus(folder).condition != "complete", (
        "as after a longer run that did not get to its first step"
    )
    assert "complete; see" in run(*command(home, "exported")).stdout
    assert RunStatus(folder).condition == "complete"
    before = stored.read_bytes()
    assert "complete; see" in run(*command(home, "exported", "reward.on_error=zero")).stdout
    assert stored.read_bytes() == before, "the keys that the run used"


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(home, trained):
    """The run was complete at step 3: its final results stay those of step 3, though it goes back to
    step 2."""
    folder = shutil.copytree(trained, home / "damaged")
    data = max((folder / "checkpoints/step-00000003").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    said = run(*command(home, "damaged", "steps=4")).stderr
    assert f"{data}: damaged: expected crc32" in said
    assert "step-00000002: the run continues from this checkpoint" in said
    assert column(folder, "step") == [1, 2, 3, 4]
    assert load_run(folder).steps == 4, "the recipe that it follows now"
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


TRIES_EACH_TREE = """
import sys
from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.sampling import placed
placed.KEPT, placed.TRIED = 30, 16
sys.exit(main())
"""
"""``eqlen`` that tries the place of forks with all trees until it knows 30, as three steps have."""


def test_what_a_run_knows_of_its_forks_is_the_same_after_a_resume(home):
    rule = "tree_sampling={fork: profile, step_tokens: 10, forks: 1}"
    asked = ["sampling=tree", "objective=rloo", "group_size=2", rule, "data.prompts_per_step=10"]
    for name, steps in (("placed", 4), ("placed-again", 3), ("placed-again", 4)):
        _, _, *arguments = command(home, name, *asked, NO_EVALUATION, f"steps={steps}")
        run("-c", TRIES_EACH_TREE, *arguments)
    whole, again = home / "placed", home / "placed-again"
    assert column(again, "harvest/forks") == column(whole, "harvest/forks")
    assert same_weights(whole, again)
    *tried, known = column(whole, "harvest/forks")
    assert known < min(tried)
