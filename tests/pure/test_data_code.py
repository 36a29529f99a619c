"""Code problems in their real schemas: OpenCodeReasoning with its source sets, LiveCodeBench. All rows
are ours.
"""

import base64
import json
import os
import pickle
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_eqlen.data import jsonl, livecodebench
from megatron_eqlen.data.rows import BadRow, Tally
from megatron_eqlen.data.sources import open_source
from megatron_eqlen.graders.code.tests import CodeTests
from megatron_eqlen.recipe import SourceRecipe
from recipes import opencodereasoning
from recipes.opencodereasoning import SOURCE_SETS, question_and_tests

TAKE_TWO = "Read two numbers\nand print their sum."


def ocr_row(question_id: str, dataset: str, text: str, split: str = "train", **keys) -> dict:
    columns = ("output", "source", "license", "solution")
    row = dict.fromkeys(columns, "x") | {"id": question_id, "input": text, "dataset": dataset, "split": split}
    return row | {"difficulty": "7"} | keys


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def taco_row(question: str, input_output: object, starter: str = "") -> dict:
    text = input_output if isinstance(input_output, str) else json.dumps(input_output)
    return {"question": question, "input_output": text, "starter_code": starter, "difficulty": "EASY"}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return an OpenCodeReasoning folder with its source sets, every case once."""
    ocr, sets = tmp_path / "questions", tmp_path / "tests"
    function = {"inputs": [[[1, 2]]], "outputs": [[3]], "fn_name": "total"}
    empty = {"input": [], "output": []}
    plain = {"official_tests": [{"input": "2 3\n", "output": "6\n"}], "generated_checker": None}
    plain |= {"time_limit": 1.0, "memory_limit": 256.0}
    files = {
        ocr / "split_0.parquet": [
            ocr_row("cc-0", "code_contests", "Add.", difficulty="2"),
            ocr_row("cc-0", "code_contests", "Add."),
            ocr_row("cc-none", "code_contests", "No tests here."),
            ocr_row("cc-lost", "code_contests", "Nobody has this text."),
            ocr_row("taco-text", "taco", "Read two  numbers and print\ntheir sum."),
            ocr_row("cf-0", "open-r1/codeforces", "Multiply."),
            ocr_row("cf-checker", "open-r1/codeforces", "Print any number."),
            ocr_row("other", "leetcode", "?"),
        ],
        ocr / "split_1.parquet": [
            ocr_row("apps-1", "apps", "-", index="1", difficulty="interview"),
            ocr_row("apps-2", "apps", "-", index="2"),
            ocr_row("apps-9", "apps", "-", index="9"),
            ocr_row("apps-x", "apps", "-", index="one"),
        ],
        sets / "taco/train-00000.parquet": [
            taco_row("Something else.", ""),
            taco_row(TAKE_TWO, {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}),
        ],
        sets / "apps/train.jsonl": [
            taco_row("Zero.", ""),
            taco_row("Sum a list.", function, "class Solution:\n    def total(self, xs):\n"),
            taco_row("Broken.", {"inputs": ["1"], "outputs": []}),
        ],
        sets / "code_contests/train-00000.parquet": [
            {"description": "Add.", "public_tests": {"input": ["1 1\n"], "output": ["2\n"]},
             "private_tests": {"input": ["2 2\n"], "output": ["4\n"]},
             "generated_tests": {"input": [""], "output": ["0\n"]},
             "time_limit": {"seconds": 2, "nanos": 500000000}},
            {"description": "No tests here.", "public_tests": empty, "private_tests": empty,
             "generated_tests": empty, "time_limit": None},
        ],
        sets / "codeforces/train-00000.parquet": [
            plain | {"description": "Multiply."},
            plain | {"description": "Print any number.", "generated_checker": "import sys"},
        ],
    }  # fmt: skip
    for path, rows in files.items():
        write(path, rows)
    return tmp_path


def test_questions_meet_their_tests_and_the_rest_is_counted(folder):
    tally = Tally()
    rows = {row.row_id: row for row in opencodereasoning.read(folder, tally)}
    assert set(rows) == {"cc-0", "taco-text", "cf-0", "cf-checker", "apps-1"}
    assert CodeTests.from_json(rows["cf-checker"].gold).checker == "import sys"
    assert tally.dropped == {
        "same_question": 1, "no_tests": 1, "not_in_source_set": 2, "unknown_dataset": 1,
        "bad_tests": 1, "wrong_type": 1,
    }  # fmt: skip
    contest = CodeTests.from_json(rows["cc-0"].gold)
    assert contest.inputs == ["1 1\n", "2 2\n", ""]
    assert contest.time_limit == 2.5
    assert (rows["cc-0"].difficulty, rows["apps-1"].difficulty) == (2.0, None)
    lines = CodeTests.from_json(rows["taco-text"].gold)
    assert (lines.stdin(1), lines.outputs[1]) == ("3\n4", "7")
    assert CodeTests.from_json(rows["cf-0"].gold).memory_mb == 256
    called = CodeTests.from_json(rows["apps-1"].gold)
    assert (called.function, called.rules, called.inputs) == ("total", "apps", [[[1, 2]]])
    assert called.is_right(0, "", "3")
    assert called.is_right(0, "", "[3]")
    assert "def total(self, xs)" in rows["apps-1"].question
    assert rows["taco-text"].question.startswith(TAKE_TWO)
    assert all(row.grader == "code" and row.instruction == "" for row in rows.values())


@pytest.mark.parametrize("index", ["\u00b2", "\u0663", "9" * 5000, "-1", "1.5", "", None])
def test_an_index_that_is_no_number_is_a_bad_row(folder, index):
    (folder / "questions/split_0.parquet").unlink()
    write(folder / "questions/split_1.parquet", [ocr_row("x", "apps", "-", index=index)])
    tally = Tally()
    assert list(opencodereasoning.read(folder, tally)) == []
    assert tally.dropped.total() == 1
    assert {"wrong_type", "empty_field"} & set(tally.dropped)


def test_two_ids_of_one_record_are_one_question_and_the_second_is_counted(folder):
    numbered = [ocr_row(name, "apps", "-", index="1") for name in ("first", "second")]
    write(folder / "questions/split_1.parquet", numbered)
    write(folder / "questions/split_0.parquet", [ocr_row("text", "apps", "Sum a list.")])
    tally = Tally()
    (row,) = opencodereasoning.read(folder, tally)
    assert row.row_id == "first"
    assert tally.dropped == {"same_question": 2}


@pytest.mark.parametrize("change", [
    {"starter_code": ["def f():"]}, {"starter_code": 5}, {"difficulty": None}, {"difficulty": "\u00b2"},
])  # fmt: skip
def test_odd_values_in_optional_columns_never_end_the_reading(tmp_path, change):
    question = ocr_row("q", "taco", TAKE_TWO) | ({} if "starter_code" in change else change)
    given = {key: value for key, value in question.items() if value is not None}
    write(tmp_path / "questions" / "train.jsonl", [given])
    record = taco_row(TAKE_TWO, {"inputs": [[1]], "outputs": [1], "fn_name": "f"}) | change
    write(tmp_path / "tests" / "taco" / "train.jsonl", [record])
    tally = Tally()
    rows = list(opencodereasoning.read(tmp_path, tally))
    assert len(rows) + tally.dropped["wrong_type"] == 1


def test_missing_source_sets_are_named(folder):
    (folder / "tests/apps/train.jsonl").unlink()
    (folder / "tests/apps").rmdir()
    with pytest.raises(ValueError, match="tests/apps: expected a folder with apps's files"):
        list(opencodereasoning.read(folder, Tally()))


CODEFORCES_ROW = {
    "description": "Multiply.", "official_tests": [{"input": "2 3\n", "output": "6\n"}],
    "official_tests_complete": True, "input_mode": "stdio", "executable": True, "interaction_format": None,
    "generated_checker": None,
}  # fmt: skip
CONTESTS_ROW = {
    "description": "Add.", "public_tests": {"input": ["1 1\n"], "output": ["2\n"]},
    "input_file": "", "output_file": "",
}  # fmt: skip
TACO_ROW = taco_row(TAKE_TWO, {"inputs": ["1 2\n"], "outputs": ["3\n"]})


@pytest.mark.parametrize(("dataset", "change", "reason"), [
    ("open-r1/codeforces", {"interaction_format": "Print a query, then read the answer."}, "interactive"),
    ("open-r1/codeforces", {"description": "This is an interactive problem."}, "interactive"),
    ("open-r1/codeforces", {"input_mode": "file"}, "file_input"),
    ("open-r1/codeforces", {"executable": False}, "not_executable"),
    ("open-r1/codeforces", {"official_tests_complete": False}, "incomplete_tests"),
    ("code_contests", {"input_file": "sum.in"}, "file_input"),
    ("code_contests", {"output_file": "sum.out"}, "file_input"),
    ("code_contests", {"description": "If there are several, print any of them."}, "needs_checker"),
    ("code_contests", {"description": "Any valid solution will be accepted."}, "needs_checker"),
    ("code_contests", {"description": "If there are many answers, print any."}, "needs_checker"),
    ("taco", {"question": "In case of a tie output any, but only one."}, "needs_checker"),
    ("apps", {"question": "If there are multiple plans, you may choose any of them."}, "needs_checker"),
    ("taco", {"question": "Its absolute or relative error must not exceed 1e-6."}, "needs_checker"),
    ("taco", {"question": "Answers within 10^-5 of the actual value are accepted."}, "needs_checker"),
    ("apps", {"question": "You may return the answer in any order."}, "needs_checker"),
    ("apps", {"question": "The task is interactive: flush after each line."}, "interactive"),
])  # fmt: skip
def test_problems_that_stdin_and_stdout_cannot_judge_are_left_out_by_reason(dataset, change, reason):
    whole = {"open-r1/codeforces": CODEFORCES_ROW, "code_contests": CONTESTS_ROW}.get(dataset, TACO_ROW)
    question_and_tests(SOURCE_SETS[dataset], whole)
    with pytest.raises(BadRow) as bad:
        question_and_tests(SOURCE_SETS[dataset], whole | change)
    assert bad.value.reason == reason


@pytest.mark.parametrize("statement", [
    "Note that this is not an interactive problem.",
    "Do not print any extra spaces.",
    "The numbers are given in any order. Print the smallest.",
    "It is possible to reach any of them. Print the number of ways.",
    "In one move Bob may choose any of the stones. How many moves does he need?",
    "Alice can choose any one of several cards. Print the largest sum.",
])  # fmt: skip
def test_statements_with_one_right_output_are_kept(statement):
    question_and_tests(SOURCE_SETS["taco"], TACO_ROW | {"question": statement})


def test_columns_that_decide_whether_a_problem_is_kept_are_read_from_parquet(tmp_path):
    """A column that the reader does not ask for would be absent, and every problem kept."""
    ocr, sets = tmp_path / "questions", tmp_path / "tests"
    kinds = {"mode": {"input_mode": "file"}, "run": {"executable": False}, "all": {}}
    write(ocr / "train.parquet", [ocr_row(kind, "open-r1/codeforces", f"{kind}?") for kind in kinds])
    rows = [CODEFORCES_ROW | change | {"description": f"{kind}?"} for kind, change in kinds.items()]
    write(sets / "codeforces" / "train-0.parquet", rows)
    write(ocr / "contests.parquet", [ocr_row("file", "code_contests", "Add.")])
    limit = {"time_limit": None, "private_tests": None, "generated_tests": None}
    write(sets / "code_contests" / "train-0.parquet", [CONTESTS_ROW | limit | {"input_file": "sum.in"}])
    tally = Tally()
    assert [row.row_id for row in opencodereasoning.read(tmp_path, tally)] == ["all"]
    assert tally.dropped == {"file_input": 2, "not_executable": 1}


def test_a_codeforces_question_has_its_formats_examples_and_note(tmp_path):
    """The question is put together as by the sets' authors; a row of split_0 repeats it."""
    record = CODEFORCES_ROW | {"input_format": "Two integers.", "output_format": "One integer."}
    record |= {"examples": [{"input": "2 3", "output": "6"}], "note": "2 times 3 is 6."}
    text = (
        "Multiply.\n\nInput\n\nTwo integers.\n\nOutput\n\nOne integer.\n\nExamples\n\nInput\n\n2 3\n\n"
        "Output\n\n6\n\nNote\n\n2 times 3 is 6."
    )
    write(tmp_path / "questions" / "train.parquet", [ocr_row("cf", "open-r1/codeforces", text)])
    write(tmp_path / "tests" / "codeforces" / "train.parquet", [record])
    (row,) = opencodereasoning.read(tmp_path, Tally())
    assert row.question.startswith(text)


GOOD_TESTS = {"inputs": ["1"], "outputs": ["1"]}
DEEP = json.loads("[" * 300 + "]" * 300)
BAD_TESTS = [None, "1", [], {}]
BAD_TESTS += [{"inputs": inputs, "outputs": outputs} for inputs, outputs in (
    ([], []), (None, None), (["1"], []), (["1"], [None]), (["1"], [1]),
)]  # fmt: skip
BAD_TESTS += [GOOD_TESTS | {"time_limit": -1}, GOOD_TESTS | {"time_limit": "fast"}]
BAD_TESTS += [GOOD_TESTS | {"memory_mb": 0}, GOOD_TESTS | {"function": "f"}]
BAD_TESTS += [{"inputs": [[1]], "outputs": [1], "function": "f()"}]
BAD_TESTS += [{"inputs": [[1]], "outputs": [DEEP], "function": "f"}]


def test_bad_tests_in_plain_rows_are_left_out_with_file_row_and_reason(tmp_path, caplog):
    path = tmp_path / "code.jsonl"
    rows = [{"question": "q", "grader": "code", "tests": tests} for tests in [*BAD_TESTS, GOOD_TESTS]]
    write(path, rows)
    tally = Tally()
    (kept,) = jsonl.read(path, tally)
    assert CodeTests.from_json(kept.gold).inputs == ["1"]
    assert tally.dropped == {"bad_tests": len(BAD_TESTS)}
    first = f"{path}: code.jsonl#0: left out: bad_tests (expected an object of tests, found NoneType)"
    assert first in caplog.text
    write(path, rows[:-1])
    said = r"code.jsonl: no usable row: 15 of 15 rows are left out: 15 bad_tests"
    with pytest.raises(ValueError, match=said):
        open_source(SourceRecipe(name="s", reader="jsonl", path=str(path)), Tally())


def test_malformed_records_of_the_source_sets_are_bad_rows():
    """The records come from JSON Lines files, where no schema holds a field's type."""
    public = {"public_tests": {"input": ["1"], "output": ["1"]}}
    official = {"official_tests": [{"input": "1", "output": "1"}]}
    limits = (5, {"seconds": "5"}, {"seconds": -5})
    records = {
        "code_contests": [
            {"public_tests": "x"},
            {"public_tests": {"input": "12", "output": "34"}},
            *(public | {"time_limit": limit} for limit in limits),
        ],
        "open-r1/codeforces": [
            *({"official_tests": tests} for tests in ("x", ["x"], [{"input": "1"}])),
            official | {"time_limit": float("nan")},
            official | {"memory_limit": float("inf")},
        ],
        "taco": [
            {"input_output": "["},
            {"input_output": "[" * 100_000},
            {"input_output": '{"inputs": [[NaN]], "outputs": [1], "fn_name": "f"}'},
            {"input_output": '{"inputs": [[1]], "outputs": [1], "fn_name": 7}'},
        ],
    }
    for name, bad in records.items():
        for record in bad:
            with pytest.raises(BadRow, match=r"bad_tests|wrong_type"):
                question_and_tests(SOURCE_SETS[name], {"description": "d", "question": "q"} | record)


def pack(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def lcb_row(question_id: str, contest: str = "2025-03-01T00:00:00", **keys) -> dict:
    public = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
    private = [{"input": "5 5\n", "output": "10\n", "testtype": "stdin"}]
    return {
        "question_title": "Sum", "question_content": "Add two numbers.", "platform": "atcoder",
        "question_id": question_id, "contest_id": "x", "contest_date": contest, "starter_code": "",
        "difficulty": "easy", "public_test_cases": json.dumps(public),
        "private_test_cases": pack(json.dumps(private)), "metadata": "{}",
    } | keys  # fmt: skip


def read_lcb(tmp_path: Path, rows: list[dict], since="2025-02-01", until="2025-05-31"):
    write(tmp_path / "test6.jsonl", rows)
    tally = Tally()
    return list(livecodebench.read(tmp_path, tally, since, until)), tally


def test_livecodebench_window_is_inclusive_and_required(tmp_path):
    dates = ["2025-01-31", "2025-02-01T00:00:00", "2025-05-31T23:00:00", "2025-06-01"]
    rows = [lcb_row(f"q{number}", contest) for number, contest in enumerate(dates)]
    kept, tally = read_lcb(tmp_path, rows)
    assert [row.row_id for row in kept] == ["q1", "q2"]
    assert tally.dropped == {"date": 2}
    with pytest.raises(ValueError, match="since: expected a date"):
        read_lcb(tmp_path, rows, since=None)
    with pytest.raises(ValueError, match="until: expected YYYY-MM-DD, found 'v6'"):
        read_lcb(tmp_path, rows, until="v6")


@pytest.mark.parametrize(("given", "returned"), [("NaN", "1"), ("1", "[Infinity]"), ("1" * 5000, "1")])
def test_livecodebench_values_that_json_has_not_are_bad_tests(tmp_path, given, returned):
    tests = json.dumps([{"input": given, "output": returned, "testtype": "functional"}])
    row = lcb_row("q", public_test_cases=tests, private_test_cases="[]", metadata='{"func_name": "f"}')
    assert read_lcb(tmp_path, [row])[1].dropped == {"bad_tests": 1}


def test_livecodebench_tests_of_both_kinds(tmp_path):
    functional = json.dumps([{"input": '[1, 2]\n"x"', "output": "[3]", "testtype": "functional"}])
    starter = "class Solution:\n    def solve(self, xs, s):\n        "
    keys = {"metadata": json.dumps({"func_name": "solve"}), "starter_code": starter}
    keys |= {"public_test_cases": functional, "private_test_cases": pack(functional)}
    rows = [lcb_row("stdin"), lcb_row("json", private_test_cases="[]"), lcb_row("function", **keys)]
    kept, _ = read_lcb(tmp_path, rows)
    tests = {row.row_id: CodeTests.from_json(row.gold) for row in kept}
    assert tests["stdin"].inputs == ["1 2\n", "5 5\n"]
    assert tests["json"].inputs == ["1 2\n"]
    assert all(test.rules == "livecodebench" and test.memory_mb == 4096 for test in tests.values())
    assert tests["function"].inputs == [[[1, 2], "x"]] * 2
    assert tests["function"].outputs == [[3], [3]]
    assert "def solve(self, xs, s)" in kept[2].question


class Payload:
    """Unpickled carelessly, it would make a file."""

    def __reduce__(self):
        return os.mkdir, ("/tmp/unpickled-by-accident",)


@pytest.mark.parametrize("packed", [
    pack(Payload()), pack([1, 2]), pack("not json"), "not base64!", base64.b64encode(b"plain").decode(),
], ids=["code", "no text", "no json", "no base64", "no zlib"])  # fmt: skip
def test_private_tests_that_are_not_plain_are_refused(tmp_path, packed):
    with pytest.raises(ValueError, match=r"bad_tests|JSON"):
        livecodebench.unpack_private_tests(packed)
    assert not Path("/tmp/unpickled-by-accident").exists()
    kept, tally = read_lcb(tmp_path, [lcb_row("bad", private_test_cases=packed), lcb_row("good")])
    assert [row.row_id for row in kept] == ["good"]
    assert tally.dropped == {"bad_tests": 1}


def test_bad_problems_are_counted(tmp_path):
    mixed = [{"input": "", "output": "", "testtype": kind} for kind in ("stdin", "functional")]
    rows = [
        lcb_row("a", public_test_cases="[]", private_test_cases="[]"),
        lcb_row("b", public_test_cases=json.dumps(mixed)),
        lcb_row("c", public_test_cases="{"),
        lcb_row("d", contest_date="soon"),
        *[lcb_row("e")] * 2,
        {key: value for key, value in lcb_row("f").items() if key not in ("metadata", "question_content")},
    ]
    kept, tally = read_lcb(tmp_path, rows)
    assert [row.row_id for row in kept] == ["e"]
    assert tally.dropped == {"bad_tests": 4, "duplicate": 1, "missing_column": 1}
