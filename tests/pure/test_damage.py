"""Damaged run folders and closed streams: a line that names the file, and no traceback."""

import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from megatron_eqlen.evaluation.result import Answers, EvaluationResult, read_results, write_results
from megatron_eqlen.files import read_json, remove_partial, write_json, write_text
from megatron_eqlen.models.checkpoint_folder import (
    BLOCK,
    CheckpointError,
    describe,
    latest,
    verify,
    write_manifest,
)
from megatron_eqlen.processes.failures import LONGEST, words
from megatron_eqlen.recipe.contents import changed, is_whole, keep, recorded, written
from megatron_eqlen.report.status import RunStatus
from tests.kit.report_runs import recipe, write_run

HOLDER = '{"host": "a", "pid": 1, "time": %s, "slurm_job": null, "restart": 0%s}'


@pytest.mark.parametrize(("name", "text"), [
    ("metrics.jsonl", b'{"step": 1, "time": 1.0, "reward/mean": "x"}\n'),
    ("metrics.jsonl", b'{"step": 1, "time": 1.0, "reward/mean": Infinity}\n'),
    ("metrics.jsonl", b'{"step": 1, "time": 1.0, "reward/mean": 1e999}\n'),
    ("metrics.jsonl", b'{"step": 1, "time": null}\n'),
    ("metrics.jsonl", b'{"step": true, "time": 1.0}\n'),
    ("metrics.jsonl", b"null\n"),
    (".lock", (HOLDER % ('"noon"', "")).encode()),
    (".lock", (HOLDER % ("1e999", "")).encode()),
    (".lock", (HOLDER % ("NaN", "")).encode()),
    (".lock", (HOLDER % ("1.0", ', "versions": 3')).encode()),
    (".lock", b"[]"),
    ("events.jsonl", b'{"time": "noon", "kind": "step"}\n'),
    ("events.jsonl", b'{"time": 1.0, "kind": 3}\n'),
    ("events.jsonl", b'{"time": 1.0, "kind": "stage", "stage": ["train"]}\n'),
    ("events.jsonl", b'{"time": 1.0, "kind": "error", "text": ["a"]}\n'),
    ("events.jsonl", b'{"time": 1.0, "kind": "ended", "error": {"a": 1}}\n'),
    ("checkpoints/latest", b"\xff\xfe"),
    ("checkpoints/latest", b"step-00"),
    ("recipe.yaml", b"\xff\xfe"),
    ("recipe.yaml", b"a: &a {b: *a}"),
    ("evaluation/before.json", b"null"),
    ("evaluation/before.json", b"{}"),
    ("evaluation/before.json", b'[{"benchmark": "b", "manifest": {}, '
     b'"summary": {"intervals": [{"mean": 0, "low": 0, '
     b'"high": 0, "method": "m"}]}, "answers": [{"prompt_id": "p", "rewards": ["x"], "verdicts": ["wrong"], '
     b'"lengths": [3]}]}]'),
])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, name, text):
    run = write_run(tmp_path / "run", recipe(tmp_path / "model"))
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(text)
    with pytest.raises(ValueError, match=name):
        RunStatus(run).screen()


@pytest.mark.parametrize("damage", [
    {"manifest": None}, {"manifest": {}}, {"manifest": {"rollout": None}},
    {"manifest": {"rollout": {"temperature": "x", "max_response_length": 8}}},
    {"manifest": {"rollout": {"temperature": 0, "max_response_length": 8}, "benchmark": None}},
    {"answers": []},
    {"answers": [Answers("a", [1.0], ["correct"], [3]), Answers("b", [1.0, 0.0], ["correct"], [3])]},
    {"summary": {"intervals": [{"mean": None, "low": 0.0, "high": 0.0, "method": "m"}]}},
], ids=str)  # fmt: skip
def test_a_damaged_result_of_an_evaluation_is_named(tmp_path, damage):
    """Whatever is asked of it later: its accuracy, its sampling, whether it was measured as a recipe says."""
    sampling = {"temperature": 0, "max_response_length": 8}
    answers = [Answers("a", [1.0], ["correct"], [3])]
    write_results(file := tmp_path / "before.json", [EvaluationResult("b", answers, {"rollout": sampling})])
    assert read_results(file)[0].sampling == "greedy, at most 8 tokens"
    (record,) = read_json(file)
    write_json(file, [record | TypeAdapter(dict).dump_python(damage, mode="json")])
    with pytest.raises(ValueError, match=r"before\.json: expected (an evaluation|a) result"):
        print(read_results(file)[0].sampling)


@pytest.mark.parametrize(("name", "change"), [
    *((name, change) for name in ("metrics.jsonl", "events.jsonl", "checkpoints/latest", "recipe.yaml")
      for change in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name),
                     lambda path: path.symlink_to("/dev/zero"))),
    (".lock", os.mkfifo), ("evaluation/before.json", os.mkfifo),
])  # fmt: skip
def test_what_is_no_file_is_named_and_not_taken_for_a_file_that_is_not_there(tmp_path, name, change):
    run = write_run(tmp_path / "run", recipe(tmp_path / "model"))
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    change(run / name)
    with pytest.raises((ValueError, OSError), match=name):
        RunStatus(run).screen()


@pytest.mark.parametrize("name", ["[" * 5000, "step-1", "../step-00000001", "step-00000001\n[]", ""])
def test_a_pointer_that_names_no_checkpoint_is_named_in_a_short_message(tmp_path, name):
    (tmp_path / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="latest: names") as caught:
        latest(tmp_path)
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


def test_a_checksum_is_of_all_blocks_of_a_file(tmp_path):
    """Shards of real models have thousands of blocks, those of tiny ones a single one."""
    content = os.urandom(2 * BLOCK + 100)
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(content)
    write_manifest(tmp_path, described := describe(tmp_path, [file.name]))
    assert described == {file.name: {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}}
    verify(tmp_path)
    for at in (5, BLOCK, -1):
        damaged = bytearray(content)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{file.name}: damaged: expected crc32"):
            verify(tmp_path)


def test_an_export_that_is_not_as_the_run_wrote_it_names_what_changed(tmp_path):
    (tmp_path / "export").mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / "export" / name).write_text("{}")
    keep(tmp_path, {"RUN/export": written(tmp_path / "export")})
    (tmp_path / "export/README.md").write_text("mine")
    assert is_whole(tmp_path / "export")
    (tmp_path / "export/config.json").unlink()
    assert changed(tmp_path / "export") == ["config.json"]
    (tmp_path / "contents.json").unlink()
    (tmp_path / "contents.json").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"contents\.json: no such file"):
        recorded(tmp_path)


def test_a_torn_line_is_said_once_even_if_it_is_the_only_one(tmp_path, caplog):
    run = write_run(tmp_path / "run", recipe(tmp_path / "model"))
    (run / "metrics.jsonl").write_bytes(b'{"step": 1, "ti')
    assert not RunStatus(run).records
    assert caplog.messages == [f"{run}/metrics.jsonl: dropped a torn last line of 15 bytes"]


@pytest.mark.parametrize("text", ["[]", '{"a": 3}', '"x"', "3"])
def test_damaged_contents_are_named(tmp_path, text):
    (tmp_path / "contents.json").write_text(text)
    with pytest.raises(ValueError, match=r"contents\.json: expected digests of files by path"):
        recorded(tmp_path)


def test_partial_files_of_killed_processes_are_removed_and_those_of_running_ones_are_not(tmp_path):
    left, fresh = (tmp_path / f".report.html.0{n}234567.partial" for n in range(2))
    for path in (left, fresh):
        path.write_text("x")
    os.utime(left, (time.time() - 60,) * 2)
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [fresh.name]
    os.utime(fresh, (time.time() - 3600,) * 2)
    write_text(tmp_path / "report.html", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_message_with_a_million_items_is_cut():
    text = words(ValueError(f"key: expected one, found {[*range(1_000_000)]}"))
    assert len(text) < LONGEST + 100
    assert text.startswith("key: expected one, found [0, 1,")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_command_runs_with_closed_streams(tmp_path, closed):
    run = write_run(tmp_path / "run", recipe(tmp_path / "model"))
    command = f"{sys.executable} -m megatron_eqlen.cli status {run} {closed}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
