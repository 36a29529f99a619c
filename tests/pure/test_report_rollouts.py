"""Rollouts in readable form: views, drawings and terminal output of types.py's worked example."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import tests.kit.rollouts as kit
from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.job import Job, load
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.report.rollouts import SHOWN, RolloutView, Training, texts_of, view
from megatron_eqlen.report.text import print_rollouts, recipe_of
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Rollout
from tests.kit.report_runs import (
    RIGHT,
    WRONG,
    example_group,
    example_stream,
    example_tree,
    make_tokenizer,
    prompt,
    recipe,
    segment,
    write_run,
)


def as_ids(token_ids: list[int]) -> str:
    return "".join(f"{token} " for token in token_ids)


def look(rollout, sampling="equal_length", **changes):
    """Return the view of a rollout that was trained alone."""
    job = Job(recipe(Path("model"), sampling=sampling, **changes))
    return view(rollout, as_ids, Training([rollout], job))


def test_a_stream_shows_what_each_side_inherits():
    seen = look(example_stream())
    assert seen.question == "What is 3 + 4?"
    assert seen.title == "stream 0, 2 pairs, max pairs"
    assert [(s.label, s.parent, s.start, s.text) for s in seen.parts] == [
        ("A1", -1, 0, "5 9 "), ("B1", -1, 0, "6 7 "), ("A2", 1, 2, "8 9 "), ("B2", 1, 2, "4 4 "),
        ("tail", 3, 4, "9 "),
    ]  # fmt: skip


def test_a_part_names_the_policy_versions_that_sampled_it_in_order():
    stream = example_stream()
    for part, versions in zip(stream.parts, ([4, 4], [4, 5]), strict=False):
        part.tokens = Tokens.of(part.tokens.token_ids, [-1.0] * 2, versions=versions)
    seen = [part.facts() for part in look(stream).parts]
    assert [[fact for fact in facts if fact.startswith("policy")] for facts in seen] == [
        ["policy version 4"], ["policy version 4, 5"], [], [], []
    ]  # fmt: skip


def uses(seen: RolloutView) -> list[str]:
    return [part.lesson.use for part in seen.parts]


def with_grades(rollout: Rollout, grades: dict[int, Grade | None]) -> Rollout:
    """Return the rollout with other grades, by the number of the part."""
    for number, grade in grades.items():
        rollout.parts[number].grade = grade
    return rollout


def cut_off(rollout: Rollout) -> Rollout:
    rollout.parts[2].finish_reason = None
    return rollout


STREAM, GROUP, TRAINED = example_stream, example_group, "trained"
UNTRAINED = (None, "plain", "not trained")
UNSCORED = {"plain"}, {"not scored"}


@pytest.mark.parametrize(("rollout", "changes", "lessons"), [
    # pairs A1 B1 A2 B2, then the tail; B1 is extended by A2, which is right, and by the tail, which is wrong
    (STREAM(), {}, [(0, "lowered", TRAINED), (1, "raised", TRAINED), (1, "raised", TRAINED),
                    (0, "lowered", TRAINED), (0, "plain", "not trained")]),
    (STREAM(), {"equal_length": {"suffix_reward": "mean"}},
     [(0, "lowered", TRAINED), (0.5, "raised", TRAINED), (1, "raised", TRAINED), (0, "lowered", TRAINED),
      (0, "plain", "not trained")]),
    (with_grades(STREAM(), {2: WRONG}), {}, [(0, "equal", "skipped")] * 4 + [(0, "plain", "not trained")]),
    (dataclasses.replace(STREAM(), parts=STREAM().parts[:-1]),
     {"equal_length": {"unfinished": "drop"}}, [(0, "lowered", TRAINED), (1, "raised", TRAINED),
                                                (1, "plain", "not trained"), UNTRAINED]),
    (with_grades(STREAM(), {2: None}), {}, UNSCORED),
    (with_grades(GROUP(), {1: None}), {}, UNSCORED),
    # a group is compared with its mean; truncated counts as wrong, what the budget cut off is not trained
    (GROUP(), {}, [(1, "raised", TRAINED), (0, "lowered", TRAINED), (0, "lowered", TRAINED)]),
    (with_grades(GROUP(), {1: Grade(0.25, "scored")}), {},
     [(1, "raised", TRAINED), (0.25, "lowered", TRAINED), (0, "lowered", TRAINED)]),
    (cut_off(GROUP()), {}, [(1, "raised", TRAINED), (0, "lowered", TRAINED), UNTRAINED]),
    # without an advantage it is skipped, unless a KL penalty trains it
    (with_grades(GROUP(), {0: WRONG}), {"loss": {"kl_coef": 0.0}}, [(0, "equal", "skipped")] * 3),
    (with_grades(GROUP(), {0: WRONG}), {"loss": {"kl_coef": 0.1}}, [(0, "equal", TRAINED)] * 3),
])  # fmt: skip
def test_a_segment_shows_the_reward_the_role_and_the_use_that_it_had_in_training(rollout, changes, lessons):
    seen = [part.lesson for part in look(rollout, rollout.kind, **changes).parts]
    if isinstance(lessons, tuple):
        assert ({one.role for one in seen}, {one.use for one in seen}) == lessons
    else:
        assert [(one.reward, one.role, one.use) for one in seen] == lessons


def test_bytes_that_are_no_character_stand_at_the_last_of_four_tokens():
    """Tokens are bytes: a character of three, five that are none, and a letter."""
    texts = texts_of([*"三".encode(), *[0xFF] * 5, 65], lambda ids: bytes(ids).decode(errors="replace"))
    assert texts == ["", "", "三", "", "", "", "\ufffd" * 4, "", "\ufffdA"]


def test_prompts_that_dynamic_sampling_dropped_are_not_trained():
    dull = dataclasses.replace(example_group(), prompt=prompt(9))
    dull.parts[0].grade = WRONG
    group = example_group()
    changes = {"sampling": "independent", "objective": "dapo"}
    training = Training([dull, group], Job(recipe(Path("model"), **changes)))
    assert uses(view(dull, as_ids, training)) == ["not trained"] * 3
    assert uses(view(group, as_ids, training)) == ["trained"] * 3


def test_a_page_shows_few_prompts_and_first_those_that_taught():
    asked = Job(recipe(Path("model"), sampling="independent", loss={"kl_coef": 0.0}))
    groups = [dataclasses.replace(example_group(), prompt=prompt(number)) for number in range(SHOWN + 2)]
    for dull in (0, 1):
        groups[dull].parts[0].grade = WRONG
    again = dataclasses.replace(groups[-1], index=1)
    shown = Training([*groups, again], asked).telling([*groups, again])
    assert [rollout.prompt_id for rollout in shown] == [group.prompt_id for group in groups[2:]]


def test_roles_and_uses_are_those_of_the_trees_that_are_trained():
    """With every objective, a segment's tokens are trained upwards exactly if their node's product of weight
    and advantage is positive."""
    rollouts = [example_stream(), dataclasses.replace(example_stream(), index=1)]
    pairs_of(rollouts[1])[0].a.grade = RIGHT
    for objective in ("grpo", "dr_grpo", "dler", "rloo", "gspo"):
        asked = Job(recipe(Path("model"), objective=objective))
        training = Training(rollouts, asked)
        (trees,), _ = build_minibatches(rollouts, asked)
        for rollout, tree in zip(rollouts, trees, strict=True):
            sides = [side for pair in pairs_of(rollout) for side in pair]
            for side, node in zip(sides, tree.nodes[1:], strict=True):
                assert node.token_ids.tolist() == side.token_ids.tolist()
                push = np.sign(node.weight * node.advantage)
                assert training.of(side).role == {1: "raised", -1: "lowered", 0: "equal"}[push]
                assert (training.of(side).use == "trained") == (node.weight > 0)


def test_a_tree_names_the_step_that_each_step_continues():
    seen = look(example_tree(), "tree", objective="treerpo")
    assert [(one.label, one.parent, one.start, one.lesson.role) for one in seen.parts] == [
        ("step 0", -1, 0, "equal"),
        ("step 1 after step 0", 0, 2, "raised"),
        ("step 2 after step 0", 0, 2, "lowered"),
    ]


# ---- eqlen inspect ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return folder


@pytest.fixture
def run(tmp_path, model):
    tokenizer = make_tokenizer(model)
    pair = segment(tokenizer, "is it seven", WRONG), segment(tokenizer, "it is seven", RIGHT)
    stream = kit.stream(prompt(1), 0, 0, [pair], "both_ended")
    other = dataclasses.replace(example_stream(), prompt=prompt(2))
    steps = {"step-00000000": [stream, other], "step-00000004": [example_stream()]}
    return write_run(tmp_path, recipe(model), steps)


def printed(path, model, limit=10, recipe=None) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False)
    print_rollouts(path, model, limit, recipe or recipe_of(path), console)
    return console.file.getvalue()


def test_inspect_names_the_option_for_a_model_that_is_not_here(run, model, capsys):
    """A run was copied from another machine."""
    elsewhere = model.rename(model.with_name("elsewhere"))
    try:
        assert cli.main(["inspect", str(run)]) == 2
        said = f"{run}/streams: no model in {model}: name the tokenizer's folder by --model\n"
        assert capsys.readouterr().err == f"eqlen inspect: {said}"
        assert cli.main(["inspect", str(run), "--model", str(elsewhere)]) == 0
    finally:
        elsewhere.rename(model)


def test_inspect_prints_text_rewards_and_outcome(run, model):
    text = printed(run / "streams" / "step-00000000" / "rank-0.arrow", model)
    assert re.search(r"sums/a\.parquet#1 +stream 0, 1 pair, both ended", text)
    wrong = r"A1 +reward 0, advantage -1, wrong: <b>8</b> \(gold: 7\), stop, \d+ tokens, trained\n +is it sev"
    assert re.search(wrong, text)
    assert re.search(r"B1 +reward 1, advantage 1, correct: 7, stop, \d+ tokens, trained\n +it is seven", text)


def test_inspect_prints_control_characters_without_effect(run, model):
    """A model that is trained by chance alone says some; a terminal would obey them."""
    grade = Grade(0.0, "wrong", "\x1b[1m9\x9b0m")
    said = segment(make_tokenizer(model), "it\x1b[31mis\t\x00\r", grade)
    asked = dataclasses.replace(prompt(3), question="What\x1b]0;?\x07")
    stream = kit.stream(asked, 0, 0, [(said, dataclasses.replace(said, grade=None))], "max_pairs")
    kit.record(run / "streams/step-00000005/rank-0.arrow", [stream])
    text = printed(run / "streams/step-00000005", model)
    assert not set(text) & {"\x1b", "\x9b", "\x07", "\x00", "\r"}
    assert r"What\x1b]0;?\x07" in text
    assert re.search(r"wrong: \\x1b\[1m9\\x9b0m .*\n +it\\x1b\[31mis +\\x00\\x0d", text)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_character_that_the_locale_lacks_is_printed(run, monkeypatch, encoding):
    asked = dataclasses.replace(prompt(3), question="三加四…")
    stream = dataclasses.replace(example_stream(), prompt=asked)
    kit.record(run / "streams/step-00000005/rank-0.arrow", [stream])
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out := io.BytesIO(), encoding=encoding))
        assert cli.main(["inspect", str(run / "streams/step-00000005"), *more]) == 0
        assert "三加四…" in out.getvalue().decode()


def test_inspect_shows_what_the_run_trained_by_its_own_recipe(tmp_path, model):
    mean = recipe(model, equal_length={"suffix_reward": "mean"})
    run = write_run(tmp_path, mean, {"step-00000000": [example_stream()]})
    assert re.search(r"B1 +reward 0\.5", printed(run / "streams", model))


def test_inspect_of_rollouts_without_a_run_says_that_training_is_not_known(tmp_path, model, run):
    (run / "recipe.yaml").rename(tmp_path / "moved.yaml")
    text = printed(run / "streams", model)
    assert "what was trained is not known" in text
    assert "trained\n" not in text
    known = printed(run / "streams", model, recipe=load(tmp_path / "moved.yaml"))
    assert "trained\n" in known


def test_inspect_reads_a_file_a_step_or_all_steps(run, model):
    streams = run / "streams"
    paths = (streams / "step-00000000" / "rank-0.arrow", streams / "step-00000000", streams)
    assert [printed(path, model).count("sums/a.parquet#") for path in paths] == [2, 2, 3]
    assert printed(streams, model, limit=2).count("sums/a.parquet#") == 2


def test_a_file_alone_shows_advantages_among_all_of_its_step(tmp_path, model):
    """REINFORCE++ standardizes over the batch, whose other rollouts lie in other ranks' files."""
    whole = recipe(model, objective="reinforce_pp")
    run = write_run(tmp_path, whole, {"step-00000000": [example_stream()]})
    step, right = run / "streams/step-00000000", segment(make_tokenizer(model), "it is seven", RIGHT)
    stream = kit.stream(prompt(2), 0, 0, [(right, dataclasses.replace(right, grade=None))], "max_pairs")
    kit.record(step / "rank-1.arrow", [stream])
    alone = [printed(step / f"rank-{rank}.arrow", model).splitlines() for rank in (0, 1)]
    assert sorted(alone[0] + alone[1]) == sorted(printed(step, model).splitlines()[1:])
    assert ["a.parquet#2" in "".join(lines) for lines in alone] == [False, True]
    # generated again by a resumed step, with one token more: that is what was trained
    longer = segment(make_tokenizer(model), "it is seven now", RIGHT)
    again = kit.stream(prompt(2), 0, 0, [(longer, dataclasses.replace(longer, grade=None))], "max_pairs")
    kit.record(step / "rank-1-2.arrow", [again])
    assert printed(step / "rank-1.arrow", model) == printed(step / "rank-1-2.arrow", model)


@pytest.mark.parametrize("name", ["nothing", "empty", "file.jsonl", "file.arrow"])
def test_inspect_names_a_path_without_rollouts(tmp_path, model, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.jsonl").touch()
    (tmp_path / "file.arrow").write_text("no rollouts")
    with pytest.raises(ValueError, match=f"{name}: expected"):
        printed(tmp_path / name, model)
