"""tools/prepare_data.py and the prepared reader: the rows kept, the messages, and bounded memory."""

import contextlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatron_eqlen.data.overlap import read_overlaps
from megatron_eqlen.data.prepared import CODE_TESTS_VERSION, PreparedRows, prepared_file
from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.data.sources import open_source
from megatron_eqlen.graders.math.grader import MathGrader
from megatron_eqlen.recipe import BenchmarkRecipe, DataRecipe, SourceRecipe
from tests.pure.test_data_prompts import write_deepmath
from tools import prepare_data
from tools.prepare_data import prepare


class Words:
    """A tokenizer of one token a word."""

    special_tokens = ()

    def render_chat(self, messages, enable_thinking=None, tools=()):
        return " ".join(message["content"] for message in messages)

    def encode(self, text):
        return [1 for _ in text.split()]


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    rows = [(f"What is {i} + {i}?", str(2 * i), float(i % 10)) for i in range(300)]
    rows += [("What is 1 + 1?", "2", 1.0), ("Bad gold?", "\\frac{", 1.0), ("Hard?", "5", 99.0)]
    return write_deepmath(tmp_path_factory.mktemp("raw") / "data" / "train-00000.parquet", rows)


@pytest.fixture(scope="module")
def prepared(raw) -> Path:
    """Return a file made by the real command."""
    out = raw.parent.parent / "prepared" / "deepmath.parquet"
    command = ["prepare_data.py", "--reader", "deepmath", "--path", str(raw.parent)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", [*command, "--out", str(out), "--max-difficulty", "10"])
        prepare_data.main()
    assert "left out: unparseable_gold" in said.getvalue()
    return out


def test_a_reader_that_is_none_is_named_in_a_line(tmp_path, monkeypatch):
    command = ["prepare_data.py", "--reader", "deepmth", "--path", "x", "--out", str(tmp_path / "x.parquet")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=r"^error: reader: .*'deepmth' \(nearest: 'deepmath'\)$"):
        prepare_data.main()


@pytest.mark.parametrize("words", [["9"], ["0", "--tokenizer", "model"]])
def test_a_limit_that_nothing_measures_is_refused(tmp_path, monkeypatch, capsys, words):
    command = ["prepare_data.py", "--reader", "jsonl", "--path", "x", "--out", str(tmp_path / "x.parquet")]
    monkeypatch.setattr(sys, "argv", [*command, "--max-prompt-length", *words])
    with pytest.raises(SystemExit):
        prepare_data.main()
    assert "expected a number from 1 on, and --tokenizer, which measures" in capsys.readouterr().err


@pytest.fixture(scope="module")
def grader():
    with contextlib.closing(MathGrader(workers=1)) as grader:
        yield grader


def test_the_manifest_says_what_happened(prepared):
    manifest = PreparedRows(prepared).manifest
    assert manifest["rows"] == 300
    assert manifest["dropped"] == {"difficulty": 1, "duplicate": 1, "unparseable_gold": 1}
    assert manifest["source"]["max_difficulty"] == 10.0
    assert manifest["grader"] == MathGrader().name


def test_prepared_rows_are_random_access(prepared):
    rows = PreparedRows(prepared)
    for number in (299, 0, 64, 63, 200):
        assert rows[number].question == f"What is {number} + {number}?"
        assert rows[number].gold_checked
    assert [row.row_id for row in rows] == rows.row_ids()
    with pytest.raises(IndexError):
        rows[300]


def test_a_prepared_source_gives_the_same_prompts_as_its_raw_files(raw, prepared):
    def questions(reader: str, path: Path) -> set[str]:
        source = SourceRecipe(name="s", reader=reader, path=str(path), min_difficulty=5, max_difficulty=10)
        prompts = PromptSource(DataRecipe(sources=[source]), Words(), 0)
        found = {prompt.question for prompt in prompts.next(150)}
        prompts.close()
        return found

    assert questions("prepared", prepared) == questions("deepmath", raw)


@pytest.mark.parametrize(("least", "kept"), [(None, 300), (5, 150), (100, 0)])
def test_a_prepared_source_is_opened_without_reading_its_golds(prepared, monkeypatch, least, kept):
    monkeypatch.setattr(PreparedRows, "_read_group", lambda rows, group: pytest.fail("whole rows were read"))
    source = SourceRecipe(name="s", reader="prepared", path=str(prepared), min_difficulty=least)
    if kept:
        assert len(open_source(source, Tally())) == kept
    else:
        with pytest.raises(ValueError, match="no usable row"):
            open_source(source, Tally())


@pytest.mark.parametrize("least", [None, 5])
def test_benchmark_questions_in_it_are_found_without_reading_golds(raw, prepared, monkeypatch, least):
    monkeypatch.setattr(PreparedRows, "_read_group", lambda rows, group: pytest.fail("whole rows were read"))
    source = SourceRecipe(name="s", reader="prepared", path=str(prepared), min_difficulty=least)
    (found,) = read_overlaps(DataRecipe(sources=[source]), [BenchmarkRecipe(name="b", path=str(raw))])
    assert f"holds {300 if least is None else 150} of the 302 questions" in found


def test_a_file_that_was_not_prepared_or_is_cut_is_refused(raw, prepared, tmp_path):
    copy, data = tmp_path / prepared.name, prepared.read_bytes()
    with pytest.raises(ValueError, match=r"deepmath\.parquet: expected a file of tools/prepare_data\.py"):
        PreparedRows(copy)
    with pytest.raises(ValueError, match=r"version \d+, found version None: prepare it again"):
        PreparedRows(raw)
    for other in (data[:-100], data[:100] + data[101:], b"PAR1", b""):
        copy.write_bytes(other)
        with pytest.raises(ValueError, match=r"deepmath\.parquet: damaged: .*: prepare it again"):
            list(PreparedRows(copy))


def test_a_file_of_another_versions_checks_is_refused(tmp_path):
    write_prepared(tmp_path / "old.parquet", [Problem("r#0", "?", "1")], version=CODE_TESTS_VERSION - 1)
    with pytest.raises(ValueError, match=r"version \d+, found version \d+: prepare it again"):
        PreparedRows(tmp_path / "old.parquet")


def test_damage_is_found_where_it_is_read_and_opening_reads_the_index_alone(prepared, tmp_path):
    copy = tmp_path / prepared.name
    data = bytearray(prepared.read_bytes())
    data[200] ^= 4
    copy.write_bytes(data)
    rows = PreparedRows(copy)
    assert rows[299].question == "What is 299 + 299?"
    with pytest.raises(ValueError, match=r"deepmath\.parquet: damaged: .*: prepare it again"):
        rows[0]
    with pytest.raises(ValueError, match=r"deepmath\.parquet: damaged"):
        list(rows.without_golds())


def test_a_row_group_ends_early_where_golds_are_long(tmp_path):
    """One random access decodes a row group: 64 problems with megabytes of tests would be too much."""
    golds = (Problem(f"r#{number}", "?", "x" * (3 << 20), "code", None, None, True) for number in range(10))
    write_prepared(tmp_path / "long.parquet", golds)
    groups = pq.read_metadata(tmp_path / "long.parquet")
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [2] * 5
    assert [row.row_id for row in PreparedRows(tmp_path / "long.parquet")] == [f"r#{n}" for n in range(10)]


def write_prepared(file: Path, rows: Iterable[Problem], **manifest) -> None:
    with prepared_file(file, manifest) as write:
        for row in rows:
            write(row)


def test_chats_are_kept(tmp_path):
    chat = ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})
    rows = [Problem("r#0", "b", "1"), Problem("r#1", "b", "1", messages=chat)]
    file = tmp_path / "new.parquet"
    write_prepared(file, rows)
    assert list(PreparedRows(file)) == rows
    assert [row.gold for row in PreparedRows(file).without_golds()] == ["", ""]


def test_turns_that_a_prepared_file_cannot_hold_are_refused(tmp_path):
    chat = (
        {"role": "user", "content": "b", "tool_calls": [{}]},
        {"role": "tool", "content": "5", "name": "add"},
    )
    with pytest.raises(ValueError, match="r#1: a prepared file keeps no name, tool_calls of turns"):
        write_prepared(tmp_path / "new.parquet", [Problem("r#1", "b", "1", messages=chat)])
    assert not list(tmp_path.iterdir())


def test_prompt_length_is_measured(raw, grader, tmp_path):
    source = SourceRecipe(name="s", path=str(raw))
    manifest = prepare(source, tmp_path / "out.parquet", grader, Words(), max_prompt_length=4)
    assert manifest["dropped"]["too_long"] == 300
    assert manifest["rows"] == 1  # "Hard?"


def test_nothing_is_left_behind_when_no_row_is_kept(raw, grader, tmp_path):
    source = SourceRecipe(name="s", path=str(raw), min_difficulty=1000.0)
    with pytest.raises(ValueError, match=r"no usable row: 303 of 303 rows are left out: 303 difficulty"):
        prepare(source, tmp_path / "out.parquet", grader)
    assert list(tmp_path.iterdir()) == []


def test_reading_streams(grader, tmp_path, monkeypatch):
    """Rows reach the writer while most of the file is unread."""
    from megatron_eqlen.data import rows as reading

    rows = [(f"Question number {i}?", str(i), 1.0) for i in range(4000)]
    file = write_deepmath(tmp_path / "train-0.parquet", rows)
    taken, plain = [], reading.text_field
    counting = lambda record, name: taken.append(name) or plain(record, name)  # noqa: E731
    monkeypatch.setattr("megatron_eqlen.data.jsonl.text_field", counting)
    source, seen = SourceRecipe(name="s", path=str(file)), []
    note = lambda tally: seen.append((tally.kept, len(taken)))  # noqa: E731
    prepare(source, tmp_path / "out.parquet", grader, progress=note)
    assert all(read - kept <= 512 for kept, read in seen)
    assert seen[-1] == (4000, 4000)


class Killed(BaseException):
    pass


class DyingGrader(MathGrader):
    """Dies at the second batch of golds, like a killed process."""

    asked = 0

    def check_golds(self, golds):
        self.asked += 1
        if self.asked == 2:
            raise Killed
        return super().check_golds(golds)


def test_a_preparation_that_is_interrupted_leaves_no_file_and_the_next_writes_the_same(raw, grader, tmp_path):
    source, out = SourceRecipe(name="s", path=str(raw)), tmp_path / "out.parquet"
    whole = prepare(source, tmp_path / "whole.parquet", grader)
    with pytest.raises(Killed):
        prepare(source, out, DyingGrader())
    assert not out.exists()
    out.with_name("out.parquet.unfinished").write_bytes(b"PAR1 and no end")  # as SIGKILL leaves it
    assert prepare(source, out, grader) == whole
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
