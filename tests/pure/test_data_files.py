"""Damaged and foreign files: every error names the file and the row, what was expected and what was found."""

import base64
import gzip
import io
import json
import pickle
import zlib
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_eqlen.data import jsonl, livecodebench
from megatron_eqlen.data.files import parse_json, read_records
from megatron_eqlen.data.rows import BadRow, Tally
from megatron_eqlen.data.sources import PLAIN_READERS, open_source, read_problems
from megatron_eqlen.recipe import BenchmarkRecipe, SourceRecipe
from megatron_eqlen.rewards.functions import RewardFunction
from megatron_eqlen.types import Prompt

GOOD = b'{"question": "What is 1 + 1?", "answer": 2}\n'


@pytest.mark.parametrize(("line", "message"), [
    (b"{", "not JSON: Expecting property name enclosed in double quotes at column [23] of '"),
    (b'{"question": "\xff", "answer": "1"}', "expected UTF-8, found byte 0xff at 14"),
    (b'{"question": "a\\ud800b", "answer": "1"}', r"half a surrogate pair, \\ud800"),
    (b'{"question": "q", "answer": "1", "note\\udfff": 1}', r"half a surrogate pair, \\udfff"),
    (b'{"question": "q", "answer": ' + b"9" * 5000 + b"}", "4300"),
    (b'{"question": "q", "answer": ' + b"[" * 100_000, "deeper nesting"),
    (b'{"question": "q", "answer": NaN}', "found NaN"),
    (b'{"question": "q", "info": {"gold": 1, "gold": 2}}', "each key once, found 'gold' more than once"),
    (b'{"question": "q", "difficulty": -Infinity}', "found -Infinity"),
])  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(GOOD + GOOD + line + b"\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl: line 3: .*{message}"):
        list(jsonl.read(file, Tally()))
    listed = tmp_path / "rows.json"
    listed.write_bytes(b"[" + line + b"]")
    with pytest.raises(ValueError, match=rf"rows\.json: .*{message.replace(' at 14', '')}"):
        list(read_records(listed, ()))


@pytest.mark.parametrize(("data", "message"), [
    (b"", "expected records, found an empty file"),
    (gzip.compress(GOOD), "found a gzip file: unpack it"),
    (b"\x28\xb5\x2f\xfd" + GOOD, "found a zstd file"),
    (GOOD.decode().encode("utf-16"), "found UTF-16: convert it to UTF-8"),
    (GOOD.decode().encode("utf-16-be"), "line 1: not JSON"),
    (b"PAR1" + GOOD, "found a parquet file: name it .parquet"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "a pointer of Git LFS"),
], ids=["empty", "gzip", "zstd", "utf-16", "utf-16 without mark", "parquet", "lfs"])  # fmt: skip
def test_a_file_of_another_kind_is_named(tmp_path, data, message):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"rows\.jsonl: .*{message}"):
        list(jsonl.read(file, Tally()))


def test_a_utf8_mark_is_read_over(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert [row.gold for row in jsonl.read(file, Tally())] == ["2"]
    listed = file.with_suffix(".json")
    listed.write_bytes(GOOD + GOOD)
    assert [row.gold for row in jsonl.read(listed, Tally())] == ["2", "2"], "lines under the name of a list"


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"rows\.jsonl: expected files named .*found none"):
        list(jsonl.read(tmp_path / "rows.jsonl", Tally()))
    with pytest.raises(ValueError, match=r"rows\.jsonl: expected a file, found a folder"):
        list(read_records(tmp_path / "rows.jsonl", ()))


def write_deepmath(path, rows=600, **columns):
    whole = {
        "question": [f"What is {i} + 1?" for i in range(rows)],
        "final_answer": [str(i + 1) for i in range(rows)],
        "difficulty": [1.0] * rows,
    } | columns
    pq.write_table(pa.table(whole), path, row_group_size=200, compression="snappy", write_page_checksum=True)
    return path


def test_a_damaged_page_is_named_with_its_row(tmp_path):
    file = write_deepmath(tmp_path / "train-0.parquet")
    data = bytearray(file.read_bytes())
    group = pq.read_metadata(file).row_group(2).column(0)
    start = group.dictionary_page_offset or group.data_page_offset
    data[start + group.total_compressed_size // 2] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"train-0\.parquet: row 2\d\d or after: expected parquet data"):
        list(PLAIN_READERS["deepmath"](file, Tally()))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_parquet_file_is_named(tmp_path, keep):
    file = write_deepmath(tmp_path / "train-0.parquet")
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(ValueError, match=r"train-0\.parquet: "):
        list(PLAIN_READERS["deepmath"](file, Tally()))


def test_bytes_in_a_parquet_text_are_named_with_their_row(tmp_path):
    texts = [b"What is 1 + 1?"] * 300 + [b"\xff\xfe"] + [b"What?"] * 10
    offsets = pa.array(texts, pa.binary()).buffers()
    column = pa.StringArray.from_buffers(len(texts), offsets[1], offsets[2])
    file = tmp_path / "train-0.parquet"
    answers, difficulty = pa.array(["2"] * len(texts)), pa.array([1.0] * len(texts))
    pq.write_table(pa.table({"question": column, "final_answer": answers, "difficulty": difficulty}), file)
    with pytest.raises(ValueError, match=r"train-0\.parquet: row 256 or after: .* Invalid UTF8 sequence"):
        list(PLAIN_READERS["deepmath"](file, Tally()))


def answered(completion, answer, unit, extra_info):
    return float((completion, unit, extra_info) == (answer, "m", {"index": ["m"]}))


def test_texts_of_a_parquet_file_may_be_bytes_in_utf_8_and_no_others(tmp_path):
    columns = {"question": [b"a\xc3\xa9", b"b"], "answer": [b"7", b"8"], "image": [b"\x89PNG"] * 2}
    columns |= {"extra_info": [{"index": [b"m"]}] * 2, "unit": [b"m", b"\xff"]}
    pq.write_table(pa.table(columns), file := tmp_path / "train.parquet")
    rows = [*jsonl.read(file, Tally())]
    assert [(row.question, row.gold) for row in rows] == [("a\xe9", "7"), ("b", "8")]
    rows = jsonl.read(file, Tally(), grader=(name := f"{__name__}:answered"))
    prompt = Prompt("b", [1], "a", name, next(rows).gold, "sums")
    assert RewardFunction(name, "grader").grade(prompt, "7").reward == 1.0
    wrong = rf"^{file}: row 1: unit: expected text in UTF-8, found the bytes b'\\xff'$"
    with pytest.raises(ValueError, match=wrong):
        next(rows)


def test_a_folder_that_lacks_files_which_the_others_names_count_is_told_and_no_benchmark(tmp_path):
    for number in (0, 1, 3):
        (tmp_path / f"train-0000{number}-of-00004-ab{number}.jsonl").write_bytes(
            b'{"question": "%d + 0?", "answer": %d}\n' % (number, number)
        )
    for split in (None, "train"):
        tally = Tally()
        source = SourceRecipe(name="sums", path=str(tmp_path), split=split)
        assert len(open_source(source, tally)) == 3
        assert tally.notes == ["not there: train-00002-of-00004, which the names of other files count"]
    with pytest.raises(ValueError, match=r"^benchmark sums: .*: not there: train-00002-of-00004"):
        read_problems(BenchmarkRecipe(name="sums", path=str(tmp_path)), Tally())
    (tmp_path / "train-00002-of-00004-ab2.jsonl").write_bytes(GOOD)
    # what is left of a download is none of the files
    (cache := tmp_path / ".cache/huggingface/download").mkdir(parents=True)
    (cache / "train-00000-of-00004-ab0.jsonl.metadata").touch()
    for split in (None, "train"):
        open_source(SourceRecipe(name="sums", path=str(tmp_path), split=split), whole := Tally())
        assert whole.notes == []


def test_a_column_that_stands_twice_is_refused(tmp_path):
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["1"]), pa.array([1.0])]
    names = ["question", "question", "final_answer", "difficulty"]
    pq.write_table(pa.Table.from_arrays(columns, names=names), tmp_path / "train-0.parquet")
    with pytest.raises(ValueError, match=r"expected each column once, found \['question'\]"):
        list(PLAIN_READERS["deepmath"](tmp_path, Tally()))


@pytest.mark.parametrize(("answers", "golds"), [
    ([Decimal("70.00"), Decimal("0.50")], ["70", "0.5"]), ([70, 5], ["70", "5"]),
    ([Decimal("12345678901234567890123456789012345678"), Decimal("7E+2")],
     ["12345678901234567890123456789012345678", "700"]),
    ([70.0, 0.5], ["70", "0.5"]), ([7.0, None], ["7"]), ([True, False], []),
])  # fmt: skip
def test_answers_written_as_numbers_are_read_and_others_counted(tmp_path, answers, golds):
    columns, tally = {"final_answer": pa.array(answers), "question": ["a", "b"]}, Tally()
    file = write_deepmath(tmp_path / "train-0.parquet", 2, **columns)
    assert [row.gold for row in PLAIN_READERS["deepmath"](file, tally)] == golds
    assert tally.dropped.total() == 2 - len(golds)


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


LIES = {
    "huge text": b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"x.",
    "2 GB text": b"\x80\x04X\xff\xff\xff\x7fx.",
    "huge memo": b"\x80\x04r\xff\xff\xff\x7f.",
    "huge memo with a text": b"\x80\x04\x8c\x01xr\xff\xff\xff\x7fx.",
    "deep": pickle.dumps("[" * 100_000),
    "cut": pickle.dumps("[]")[:-3],
    "empty": b"",
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_a_pickle_that_lies_is_refused_without_memory(data):
    with pytest.raises(ValueError, match=r"bad_tests|JSON"):
        livecodebench.unpack_private_tests(packed(data))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickled_text_of_every_protocol_is_read(protocol):
    tests = [{"input": "é\n\U0001f600", "output": "2", "testtype": "stdin"}] * 300
    data = pickle.dumps(json.dumps(tests, ensure_ascii=False), protocol)
    assert livecodebench.unpack_private_tests(packed(data)) == tests


def test_a_zip_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(livecodebench, "LARGEST_UNPACKED", 1 << 20)
    with pytest.raises(BadRow, match="expected at most 1048576 bytes, found more"):
        livecodebench.unpack_private_tests(packed(b"0" * (1 << 24)))


def test_every_value_of_json_is_read():
    value = {"a": [1, -2.5e3, "é \U0001f600 \\ud", None, True], "b": {"c": 10**4000}}
    assert parse_json(json.dumps(value)) == parse_json(json.dumps(value).encode()) == value
    assert parse_json(io.BytesIO(b'"\\ud83d\\ude00"').read()) == "\U0001f600"
