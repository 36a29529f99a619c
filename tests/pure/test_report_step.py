"""``eqlen report RUN --step``: what the page filters and draws is what the record and training hold."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel

import tests.kit.rollouts as kit
from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.build import weighted_units
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.report.rollouts import by_token
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part, Rollout
from tests.kit.report_runs import example_stream, make_tokenizer, prompt, recipe, unpacked, write_run

STEPS = ("step-00000000", "step-00000001", "step-00000006")


def of_an_environment() -> Rollout:
    """Return the stream with a token in B_1 that an environment gave; what is wrong there has a quarter."""
    stream = example_stream()
    stream.parts[0].grade = stream.parts[4].grade = Grade(0.25, "wrong", "8")
    part = stream.parts[1]
    part.tokens = Tokens.of([6, 3, 7], [-1.25, 0.0, -0.5], versions=[4, 4, 5], given=[[], [0], []])
    return stream


@pytest.fixture
def run(tmp_path) -> Path:
    make_tokenizer(tmp_path / "model")
    rollouts = {name: [example_stream()] for name in STEPS} | {STEPS[1]: [of_an_environment()]}
    return write_run(tmp_path / "run", recipe(tmp_path / "model"), rollouts)


def rows(page: Path) -> list[dict]:
    return json.loads(re.search("const ROWS = (.*)\n", page.read_text())[1])


def test_the_page_has_the_rollouts_of_a_step_as_they_were_recorded_and_trained(run, capsys):
    assert main(["report", str(run), "--step", "2"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == run / "rollouts-2.html"
    (row,), recorded = rows(page), read_step(run / "streams" / STEPS[1])
    assert [row[name] for name in ("step", "prompt", "source")] == [2, "sums/a.parquet#1", "sums"]
    assert (row["verdicts"], row["length"], row["gap"]) == (["correct", "wrong"], 5, 0.75)
    assert row["reward"] == 0.5
    shown, (rollout,) = unpacked(row["packed"])["parts"], recorded
    assert [part["label"] for part in shown] == KINDS[rollout.kind].labels(rollout)[1]
    assert [part["parent"] for part in shown] == [part.parent for part in rollout.parts]
    places = [(part["start"], len(part["tokens"])) for part in shown]
    assert places == [(0, 2), (0, 3), (3, 2), (3, 2), (5, 1)]
    columns = shown[1]["columns"]
    assert (columns["log-prob"], columns["version"]) == ([-1.25, 0, -0.5], [4, 4, 5])
    assert columns["given"] == [0, 1, 0]
    units = weighted_units(recorded, Job(recipe(run.parent / "model")))
    nodes = {id(part): node for unit in units for part, node in zip(unit.members, unit.nodes, strict=True)}
    node = nodes[id(rollout.parts[1])]
    assert columns["advantage"] == [node.advantage, 0, node.advantage]
    assert columns["weight"] == pytest.approx([node.weight, 0, node.weight], rel=1e-2)
    assert not {"advantage", "weight"} & {*shown[4]["columns"]}, "the tail is not compared"


def test_a_stream_of_two_truncated_tracks_has_a_row_without_a_gap(run):
    tail = Part(Tokens.of([5, 6], [-1.0] * 2), "length")
    kit.record(
        run / "streams" / STEPS[0] / "rank-1.arrow", [kit.stream(prompt(1), 1, 3, [], "truncated", tail)]
    )
    assert main(["report", str(run), "--step", "1"]) == 0
    assert [row["gap"] for row in rows(run / "rollouts-1.html")] == [1, None]


def test_a_range_has_all_its_steps_and_the_page_loads_nothing(run):
    assert main(["report", str(run), "--step", "1-2"]) == 0
    page = run / "rollouts-1-2.html"
    assert [row["step"] for row in rows(page)] == [1, 2]
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page.read_text())
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"https?:|\*|'self'|connect-src|eval", policy)


@pytest.mark.parametrize(("asked", "said"), [
    ("3", r"--step: expected a graded step of .*streams \(3 of 1 to 7, nearest 2\), found 3"),
    (f"1-{10**15}", r"--step: expected a graded step of .*, found 3"),
    ("7-1", "expected a step as 12, or steps as 10-12, found '7-1'"),
    ("0", "expected a step as 12, or steps as 10-12, found '0'"),
])  # fmt: skip
def test_a_step_that_is_not_recorded_is_an_error_that_names_those_that_are(run, capsys, asked, said):
    with suppress(SystemExit):  # of argparse
        assert main(["report", str(run), "--step", asked]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_damaged_record_is_named(run, capsys):
    damaged = run / "streams" / STEPS[2] / "rank-0.arrow"
    written = bytearray(damaged.read_bytes())
    written[len(written) // 2] ^= 4
    damaged.write_bytes(written)
    assert main(["report", str(run), "--step", "7"]) == 2
    assert f"{damaged}: " in capsys.readouterr().err


def test_a_character_of_several_tokens_stands_at_its_last(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "model")
    token_ids = tokenizer.encode("é")
    stream = example_stream()
    stream.parts[4].tokens = Tokens.of(token_ids, [-1.0] * len(token_ids))
    run = write_run(tmp_path / "run", recipe(tmp_path / "model"), {STEPS[0]: [stream]})
    assert main(["report", str(run), "--step", "1"]) == 0
    (row,) = rows(run / "rollouts-1.html")
    assert unpacked(row["packed"])["parts"][4]["tokens"] == ["", "é"]


def test_a_words_space_stays_where_a_tokenizer_drops_it_at_the_start_of_a_text():
    backend = Tokenizer(WordLevel({"7": 0, "▁one": 1, "▁two": 2}))
    backend.decoder = Metaspace()
    assert backend.decode([2]) == "two"
    decode = by_token(lambda token_ids: backend.decode([*token_ids]))
    assert [decode((token,)) for token in (1, 2)] == [" one", " two"]
