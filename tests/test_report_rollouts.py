"""Rollouts for people: what the views, drawings and the terminal say of types.py's worked example."""

from __future__ import annotations

import dataclasses
import io
import re
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from megatron_eqlen.recipe import EqualLengthRecipe
from megatron_eqlen.report.drawing import draw
from megatron_eqlen.report.rollouts import view
from megatron_eqlen.report.text import print_rollouts
from megatron_eqlen.types import Pair, Stream
from tests.report_runs import (
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
    return " ".join(map(str, token_ids))


def look(rollout, **settings):
    return view(rollout, as_ids, EqualLengthRecipe(**settings))


def boxes(svg: str) -> dict[str, tuple[float, float]]:
    """Label: left edge and width."""
    root = ET.fromstring(svg)
    found = {}
    for group in root.iter("g"):
        rect = group.find("rect")
        label = group.find("title").text.split(":")[0]
        found[label] = float(rect.get("x")), float(rect.get("width"))
    return found


def test_a_stream_shows_what_each_side_inherits_and_how_it_is_rewarded():
    seen = look(example_stream())
    assert seen.question == "What is 3 + 4?"
    assert seen.title == "stream 0, 2 pairs, max pairs"
    sides = [side for pair in seen.pairs for side in (pair.a, pair.b)]
    assert [(s.label, s.before, s.text, s.inherited, s.reward, s.role) for s in sides] == [
        ("A1", "", "5 9", 0, 0.0, "lowered"),
        ("B1", "", "6 7", 0, 1.0, "raised"),
        ("A2", "6 7", "8 9", 2, 1.0, "raised"),
        ("B2", "6 7", "4 4", 2, 0.0, "lowered"),
    ]
    assert [pair.use for pair in seen.pairs] == ["trained", "trained"]
    (tail,) = seen.segments
    assert (tail.label, tail.before, tail.inherited, tail.role) == ("tail", "6 7 4 4", 4, "plain")


def test_equal_rewards_are_skipped_and_dropped_pairs_left_out():
    stream = example_stream()
    stream.pairs[1].a.grade = WRONG
    assert [pair.use for pair in look(stream).pairs] == ["skipped", "skipped"]
    unfinished = dataclasses.replace(stream, tail=None)
    assert [pair.use for pair in look(unfinished, unfinished="drop").pairs] == ["skipped", "left out"]


def test_unscored_rollouts_have_no_rewards():
    stream, group = example_stream(), example_group()
    stream.pairs[1].a.grade = None
    group.completions[1].grade = None
    assert [(pair.use, pair.a.reward, pair.a.role) for pair in look(stream).pairs] == [
        ("not scored", None, "plain")
    ] * 2
    assert {(one.reward, one.role) for one in look(group).segments} == {(None, "plain")}


def test_a_group_is_compared_with_its_mean_and_truncated_counts_as_wrong():
    seen = look(example_group())
    assert [(one.reward, one.role, one.end) for one in seen.segments] == [
        (1.0, "raised", "stop"),
        (0.0, "lowered", "stop"),
        (0.0, "lowered", "length"),
    ]


def test_a_tree_names_the_step_that_each_step_continues():
    seen = look(example_tree())
    assert [(one.label, one.before, one.inherited) for one in seen.segments] == [
        ("step 0", "", 0),
        ("step 1 after step 0", "5 6", 2),
        ("step 2 after step 0", "5 6", 2),
    ]
    assert set(boxes(draw(seen))) == {"the prompt", "step 0", "step 1 after step 0", "step 2 after step 0"}


def test_a_leaf_is_drawn_below_its_other_side_at_the_same_width():
    found = boxes(draw(look(example_stream())))
    assert found["A1"] == found["B1"]
    assert found["A2"] == found["B2"]
    assert found["A2"][0] > found["A1"][0] + found["A1"][1]
    assert found["tail"][0] > found["B2"][0]


def test_widths_of_completions_are_their_lengths():
    found = boxes(draw(look(example_group())))
    assert found["completion 1"][1] + 2 == pytest.approx(2 * (found["completion 0"][1] + 2), abs=0.3)


# ---- eqlen inspect ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return folder


@pytest.fixture
def run(tmp_path, model):
    tokenizer = make_tokenizer(model)
    stream = Stream(prompt(1), 0, 0, [], "both_ended")
    right, wrong = (segment(tokenizer, text, g) for text, g in (("it is seven", RIGHT), ("or eight", WRONG)))
    stream.pairs = [Pair(wrong, right)]
    return write_run(
        tmp_path,
        recipe(model),
        {"step-00000000": [stream, example_group()], "step-00000004": [example_stream()]},
    )


def printed(path, model, limit=10) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    print_rollouts(path, model, limit, console)
    return console.file.getvalue()


def test_inspect_prints_text_rewards_and_outcome(run, model):
    text = printed(run / "streams" / "step-00000000" / "rank-0.jsonl", model)
    assert re.search(r"sums/a\.parquet#1 +stream 0, 1 pair, both ended", text)
    assert re.search(r"A1 +reward 0, wrong: <b>8</b>, stop, \d+ tokens\n +or eight", text)
    assert re.search(r"B1 +reward 1, correct: 7, stop, \d+ tokens\n +it is seven", text)
    assert "trained" in text


def test_inspect_reads_a_file_a_step_or_all_steps(run, model):
    streams = run / "streams"
    paths = (streams / "step-00000000" / "rank-0.jsonl", streams / "step-00000000", streams)
    assert [printed(path, model).count("sums/a.parquet#") for path in paths] == [2, 2, 3]
    assert printed(streams, model, limit=2).count("sums/a.parquet#") == 2


@pytest.mark.parametrize("name", ["nothing", "empty", "file.jsonl"])
def test_inspect_names_a_path_without_rollouts(tmp_path, model, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.jsonl").touch()
    with pytest.raises(ValueError, match=f"{name}: expected"):
        printed(tmp_path / name, model)
