"""Rollouts written as they complete read back identically, also after the writer was killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import pytest

from megatron_eqlen.rollout.recorder import Recorder, read_dump, read_step, set_aside_stale
from megatron_eqlen.types import Grade, Group, Pair, Prompt, Segment, Stream, rollout_key, training_order


def prompt(name: str, number: int = 0) -> Prompt:
    return Prompt(name, [1], "?", "math", "1", number=number)


GRADE = Grade(0.5, "correct", "\\frac{1}{3} – π", "math_verify-0.9.0", 0.1 + 0.2)
STREAM = Stream(
    Prompt("deepmath/a.parquet#17", [1, 2], "¿x?", "math", "3", "deepmath", 4), 2, 5,
    [Pair(Segment([1, 9], [-0.1, -1e-9 / 3], "stop", GRADE), Segment([3, 4], [-1 / 3, -12.0]))],
    "truncated", Segment([7], [-2.5e-300], "length"),
)  # fmt: skip
GROUP = Group(prompt("p"), 0, [
    Segment([1], [-0.5], "stop", sampling_mask=[(1, 4)]),
    Segment([2, 2], [-0.1, -0.7], sampling_mask=[(2,), (0, 2, 9)]),
])  # fmt: skip


def test_rollouts_read_back_identically(tmp_path):
    path = tmp_path / "run" / "streams" / "step-000001.jsonl"
    with Recorder(path) as recorder:
        recorder.write(STREAM)
        recorder.write(GROUP)
    with Recorder(path) as recorder:
        recorder.write(Stream(prompt("q"), 0, 0, [], "budget"))
    assert read_dump(path) == [STREAM, GROUP, Stream(prompt("q"), 0, 0, [], "budget")]
    assert [rollout_key(r) for r in read_dump(path)] == [("deepmath/a.parquet#17", 2), ("p", 0), ("q", 0)]


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_a_torn_last_line_is_dropped_aloud_and_the_file_goes_on(tmp_path, caplog, cut):
    path = tmp_path / "dump.jsonl"
    with Recorder(path) as recorder:
        recorder.write(GROUP)
        recorder.write(STREAM)
    path.write_bytes(path.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        assert read_dump(path) == [GROUP]
    assert "dropped a torn last line" in caplog.text
    with Recorder(path) as recorder:
        recorder.write(STREAM)
    assert read_dump(path) == [GROUP, STREAM]


def test_kill_9_loses_nothing_that_was_written(tmp_path):
    path = tmp_path / "dump.jsonl"
    script = f"""
import sys
from megatron_eqlen.rollout.recorder import Recorder
from megatron_eqlen.types import Group, Prompt, Segment
recorder = Recorder({str(path)!r})
for i in range(10**9):
    prompt = Prompt(str(i), [1], "?", "math", "1")
    recorder.write(Group(prompt, 0, [Segment(list(range(50)), [-0.5] * 50, "stop")]))
    if i == 20:
        print("written", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
    rollouts = read_dump(path)
    assert len(rollouts) > 20
    assert [rollout.prompt_id for rollout in rollouts] == [str(i) for i in range(len(rollouts))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", r"dump.jsonl:4: expected a rollout"),
        ('{"type": "star", "prompt": "p"}', "expected equal_length, independent, tree, found 'star'"),
        ("nonsense", "dump.jsonl:4"),
    ],
)
def test_a_line_that_is_no_rollout_is_named(tmp_path, line, message):
    path = tmp_path / "dump.jsonl"
    with Recorder(path) as recorder:
        recorder.write(GROUP)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_dump(path)


def test_what_weights_of_another_version_generated_is_set_aside(tmp_path, caplog):
    """After a resume an update that was skipped may be taken: what is recorded of later steps is stale."""
    folder = tmp_path / "step-00000003"
    set_aside_stale(folder, 3)  # nothing is recorded yet
    with Recorder(folder / "rank-0.jsonl") as recorder:
        recorder.write(GROUP)
    set_aside_stale(folder, GROUP.policy_version)
    assert read_step(folder) == [GROUP]
    with Recorder(folder / "rank-1.jsonl") as recorder:
        recorder.write(STREAM)
    set_aside_stale(folder, GROUP.policy_version)
    assert read_step(folder) == []
    assert read_step(tmp_path / "stale-step-00000003") == sorted([GROUP, STREAM], key=training_order)
    assert "generated with policy version 0, 5, but this run is at 0" in caplog.text
