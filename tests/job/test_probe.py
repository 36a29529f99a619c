"""``eqlen probe`` as a command: the weights of a step, its record, and what is refused."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_eqlen.record.reader import read_step
from megatron_eqlen.sampling.probe import PROBE
from tests.kit.jobs import run, start
from tests.kit.talking import ANSWERED
from tests.kit.train_runs import NO_EVALUATION, column, command, metrics, same_weights, train


def probe(*arguments):
    return run("-m", "megatron_eqlen.cli", "probe", *arguments).stdout


def continuations(folder):
    return [part for rollout in read_step(folder) for part in rollout.parts if part.role == PROBE]


def test_a_step_is_continued_by_the_weights_that_sampled_it(home, trained, tmp_path):
    """They come from a checkpoint, or from training the recorded steps again: the same bits and draws."""
    asked = ("--step", 3, "--at", "every:5", "--samples", 3)
    killed = tmp_path / "one/weights/checkpoints/.step-00000002.partial"  # while it copied
    killed.mkdir(parents=True)
    assert "trained again" not in probe(trained, *asked, "--out", tmp_path / "one")
    shutil.copytree(trained, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    cost = probe(tmp_path / "bare", *asked, "--out", tmp_path / "other")
    assert re.search(r"2 steps trained again, \d+ s", cost)
    two = train(home, "two-steps", "steps=2", NO_EVALUATION)
    folders = [tmp_path / name / "step-00000002" for name in ("one", "other")]
    for folder in folders:
        assert same_weights(folder.parent / "weights", two)
    assert [part.tokens for part in continuations(folders[0])] == [
        part.tokens for part in continuations(folders[1])
    ]
    recorded = read_step(trained / "streams/step-00000002")
    versions = {int(v) for part in recorded[0].parts for v in part.tokens["versions"]}
    assert {int(v) for part in continuations(folders[0]) for v in part.tokens["versions"]} == versions
    found = json.loads((tmp_path / "one/probe.json").read_text())["found"]
    assert all(len(response["stretches"]) >= 1 for response in found["responses"])
    assert any(len(response["stretches"]) > 1 for response in found["responses"])


NAMED = ["reward.weights={even: 1.0, brief: 0.5}", "data.sources.0.grader=tests.kit.rubrics:even_and_brief"]


@pytest.mark.parametrize("kind", ["gdpo", "taught", "served"])
def test_rewards_by_name_a_teacher_and_servers_are_probed_as_they_were_trained(home, trained, request, kind):
    """Rewards of continuations are the weighed sums; the table has a row of the run's objective, and servers
    give the tokens of the engine that shares the ranks, after a sync too."""
    groups = ["sampling=independent", "objective=dr_grpo", "steps=2", NO_EVALUATION]
    own = {
        "gdpo": [*NAMED, "objective=gdpo"],
        "taught": [f"teacher.path={trained}/export"],
        "served": request.getfixturevalue("served") if kind == "served" else [],
    }
    folder = train(home, f"probed-{kind}", *groups, *own[kind])
    asked = ("--step", 2, "--at", "every:10", "--samples", 4, "--budget", 2000)
    assert "the run's" in probe(folder, *asked)
    out = folder / "probes/step-00000002"
    found = json.loads((out / "probe.json").read_text())["found"]
    (run_own,) = [row for row in found["objectives"] if "the run's" in row["objectives"]]
    assert not run_own["refused"]
    new = continuations(out / "step-00000001")
    assert {int(v) for part in new for v in part.tokens["versions"]} == {1}
    rewards = {part.grade.reward for part in new if part.finish_reason == "stop"}
    assert rewards <= ({0.0, 0.5, 1.0, 1.5} if kind == "gdpo" else {0.0, 1.0})
    assert len(rewards) > 1
    if kind == "served":
        inside = train(home, "probed-inside", *groups)
        probe(inside, *asked)
        folder = inside / "probes/step-00000002/step-00000001"
        tokens = [[part.token_ids.tolist() for part in parts] for parts in (new, continuations(folder))]
        assert tokens[0] == tokens[1]


def test_forks_in_mid_turn_have_the_environment_that_was_there(home, tmp_path):
    """The environment is made anew and told the messages; each continuation is answered as the line was."""
    saves, groups = "environment.name=tests.kit.talking:Kept", ("sampling=independent", "objective=grpo")
    talked = train(home, "talked", *ANSWERED, saves, "steps=1", *groups, NO_EVALUATION)
    probe(talked, "--step", 1, "--at", "every:10", "--samples", 2, "--budget", 2000)
    folder = talked / "probes/step-00000001/step-00000000"
    states, found = (
        {file.name for file in (place / "environments").iterdir()}
        for place in (talked / "streams/step-00000000", folder.parent / "recorded")
    )
    assert states == found, "where a turn's state is looked for"
    assert states
    new = continuations(folder)
    assert len(new) > 10
    assert any(len(part.tokens) > len(part) for part in new), "some are answered"
    assert all(part.grade for part in new if part.finish_reason == "stop")
    assert "inherits" in run("-m", "megatron_eqlen.cli", "inspect", folder).stdout
    shown = run("-m", "megatron_eqlen.cli", "inspect", talked, "--limit", 1).stdout
    assert re.search(r"probed .*value at the prompt", shown)
    (line,) = run("-m", "megatron_eqlen.cli", "inspect", talked, "--limit", 1, "--json").stdout.splitlines()
    probed = json.loads(line)["probed"]
    assert all(stretch["text"] for response in probed for stretch in response["stretches"])


def test_a_run_begins_after_a_step_of_another_one_bit_for_bit_and_a_changed_key_parts_them(home, trained):
    forked = train(home, "forked", "--from", f"{trained}@2")
    assert same_weights(forked, trained)
    assert metrics(forked)[:2] == metrics(trained)[:2]
    assert (forked / "evaluation/before.json").read_bytes() == (
        trained / "evaluation/before.json"
    ).read_bytes()
    other = train(home, "forked-other", "--from", f"{trained}@2", "optimizer.lr=1e-2")
    assert column(other, "loss/total")[:2] == column(trained, "loss/total")[:2]
    assert not same_weights(other, trained)
    for name, source, says in (
        ("forked-late", f"{trained}@7", "expected RUN@STEP, one of its checkpoints (2, 3), found"),
        ("forked-from-none", f"{trained}", "one of its checkpoints (2, 3), found"),
        ("forked", f"{trained}@3", f"has begun, {trained}@2"),
        ("one", f"{forked}@3", "has begun, from nothing else"),
    ):
        job = start(*command(home, name, "--from", source))
        assert job.wait() == 2
        assert says in job.stderr
    assert "complete" in run(*command(home, "forked", "--from", f"{trained}@2")).stdout


def test_a_run_begins_after_a_step_of_another_one_on_more_ranks(home, trained):
    """The moments of the optimizer are shared anew."""
    recorded = ("--replay", str(trained / "streams"), NO_EVALUATION)
    wide = train(home, "forked-wide", "--from", f"{trained}@2", *recorded, ranks=2)
    assert metrics(wide)[:2] == metrics(trained)[:2]
    assert column(wide, "train/grad_norm") == pytest.approx(column(trained, "train/grad_norm"), rel=1e-4)
    ours, theirs = (load_file(folder / "export/model.safetensors") for folder in (wide, trained))
    apart = [float((ours[name] - theirs[name]).abs().mean()) for name in ours]
    assert max(apart) < 1e-5, "without Adam's moments it is 1e-4"


@pytest.mark.parametrize(("name", "kept", "step", "says"), [
    ("metrics.jsonl", None, 3, "metrics.jsonl: expected the updates of all steps before step 3"),
    ("streams/step-00000001", None, 3, "streams: expected step-00000000 to step-00000001, found 2 steps"),
    ("streams/step-00000001", None, 2, "streams (2 of 1 to 3, nearest 1), found 2"),
    ("streams/step-00000001/grades-rank-0.arrow", None, 2, "streams (2 of 1 to 3, nearest 1), found 2"),
    ("streams/step-00000000/grades-rank-0.arrow", 400, 1, "expected grades of all responses, found none of"),
    ("checkpoints/step-00000002/metadata.json", 9, 3, "bare/checkpoints/step-00000002/metadata.json: trunc"),
])  # fmt: skip
def test_a_step_that_is_damaged_or_gone_is_refused_in_a_probes_words(
    trained, tmp_path, name, kept, step, says
):
    bare = tmp_path / "bare"
    ignored = shutil.ignore_patterns("" if name.startswith("checkpoints") else "checkpoints")
    shutil.copytree(trained, bare, ignore=ignored)
    if kept is not None:
        os.truncate(bare / name, kept)
    else:
        (shutil.rmtree if (bare / name).is_dir() else Path.unlink)(bare / name)
    job = start("-m", "megatron_eqlen.cli", "probe", bare, "--step", step, "--at", "every:5")
    assert job.wait() == 2
    assert says in job.stderr
    assert "--replay" not in job.stderr


@pytest.mark.parametrize(("arguments", "says"), [
    (("--step", "9"), "expected a graded step of"),
    (("--step", "1", "--at", "words"), "--at: expected sentences, forks, every:TOKENS"),
    (("--step", "3", "--at", "forks", "--budget", "1"), "--at forks: expected places, found none"),
    (("--step", "1", "--samples", "1"), "--samples: expected 2 or more"),
    (("--step", "1", "--seed", "-1"), "--seed: expected 0 to"),
])  # fmt: skip
def test_what_cannot_be_probed_is_said_in_one_line(trained, arguments, says, tmp_path):
    job = start("-m", "megatron_eqlen.cli", "probe", trained, *arguments, "--out", tmp_path / "out")
    assert job.wait() == 2
    (line,) = job.stderr.splitlines()
    assert says in line
    assert not (tmp_path / "out").exists()
