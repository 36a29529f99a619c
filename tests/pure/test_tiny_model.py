"""Tokenizers for tiny models, and the tiny models that imitate demonstrations."""

import importlib.util
import json
import random
import sys
import unicodedata

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from megatron_eqlen.environments.tool_calls import tool_calls
from megatron_eqlen.hf.tokenizer import BREAK, load_tokenizer, require_same
from tests.kit import ROOT, demonstrations
from tests.kit.marks import examples
from tests.kit.sentencepiece_maker import write_sentencepiece_tokenizer
from tests.kit.tiny_models import tiny_config
from tools.make_search import make_rows, write_rows
from tools.tokenizer_maker import write_hf_tokenizer

TOOLS = ROOT / "tools"


def load_tool(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_another_tokenizer_is_refused_by_its_first_difference(tmp_path):
    for folder, words in (("ours", "ab ab"), ("same", "ab ab"), ("theirs", "cd cd")):
        (tmp_path / folder).mkdir()
        write_hf_tokenizer(tmp_path / folder, [words * 9], 263)
    ours, same, theirs = (load_tokenizer(tmp_path / folder) for folder in ("ours", "same", "theirs"))
    require_same(ours, same)
    refused = r"theirs: expected the tok.* in its vocabulary: expected \(\d+, 'ab'\)"
    with pytest.raises(ValueError, match=refused):
        require_same(ours, theirs)


@pytest.fixture(scope="module")
def rows():
    return make_rows(300, seed=0)


@pytest.fixture(scope="module", params=["hf", "sentencepiece"])
def tokenizer(request, rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write = write_hf_tokenizer if request.param == "hf" else write_sentencepiece_tokenizer
    write(folder, [f"{row['question']}\n{row['r1_solution_1']}" for row in rows])
    return load_tokenizer(folder)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_damaged_sentencepiece_model_is_named(share, rows, tmp_path):
    write_sentencepiece_tokenizer(tmp_path, [row["question"] for row in rows])
    model = tmp_path / "tokenizer.model"
    model.write_bytes(model.read_bytes()[: int(share * model.stat().st_size)])
    with pytest.raises(ValueError, match=r"tokenizer\.model: expected a SentencePiece model"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_model_that_would_be_converted_to_another_is_refused(rows, tmp_path):
    write_sentencepiece_tokenizer(tmp_path, [row["question"] for row in rows], add_dummy_prefix=True)
    refused = r"tokenizer\.model: expected the pieces \['▁.*found \['[^▁].*tokenizer_class"
    with pytest.raises(ValueError, match=refused):
        load_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pieces_of(tokenizer.encode("What"))[0].startswith("▁")
    text = f"Name <{BREAK}|im_end|>, {BREAK}which ends"
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace(BREAK, ""), "no space where text goes on"


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"])
def test_tokenizer_json_is_read_whole_whatever_class_stands_beside_it(kind, rows, tmp_path):
    """``LlamaTokenizerFast`` stands beside that of DeepSeek's distilled Llama, whose BPE is of bytes."""
    write_hf_tokenizer(tmp_path, [row["question"] for row in rows])
    tiny_config("llama").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": kind}))
    stored = json.loads((tmp_path / "tokenizer.json").read_text()) | {"normalizer": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    text = "What is 12 + 30?\n\n  A  e\u0301 "
    expected = Backend.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    assert load_tokenizer(tmp_path).encode(text) == expected
    assert load_tokenizer(tmp_path).decode(expected) == text


@examples(30)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40))
def test_any_text_survives_the_byte_level_tokenizer(text, byte_level):
    assume("<|" not in text)  # a special token's name is that token
    assert byte_level.decode(byte_level.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.fixture(scope="module")
def byte_level(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte-level")
    write_hf_tokenizer(folder, [row["r1_solution_1"] for row in rows])
    return load_tokenizer(folder)


def test_digits_are_single_tokens_and_demonstrations_survive(tokenizer, rows):
    assert len(tokenizer.encode("123456")) == 6
    for row in rows[:50]:
        assert tokenizer.decode(tokenizer.encode(row["r1_solution_3"])) == row["r1_solution_3"]


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="found 200"):
        write_hf_tokenizer(tmp_path, ["a"], vocab_size=200)


@pytest.fixture(scope="module")
def tool():
    return load_tool("make_tiny_model")


@pytest.fixture(scope="module")
def data(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    write_rows(path, rows)
    return path


def warmup(tool, **changes):
    return tool.Warmup(**{"steps": 0, "batch_size": 8, "seed": 0, "processes": 1} | changes)


def test_the_same_arguments_give_the_same_weights_and_are_not_made_twice(tool, data, tmp_path, capsys):
    for name in ("first", "second"):
        tool.make(tmp_path / name, data, warmup(tool))
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    modified = first.stat().st_mtime_ns
    tool.make(tmp_path / "first", data, warmup(tool))
    assert first.stat().st_mtime_ns == modified
    assert "left as it is" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="other arguments"):
        tool.make(tmp_path / "first", data, warmup(tool, seed=1))
    assert json.loads((tmp_path / "first" / "made_by.json").read_text())["seed"] == 0


@pytest.mark.parametrize(("row", "plain", "demonstration"), [
    ({"question": "3 ants?", "answer": "3*6 = 18\n#### 18"}, False, "3*6 = 18\n\\boxed{18}"),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
                   {"role": "assistant", "content": "Lima"}]}, True, "Lima"),
    ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "7"}}, False,
     "\\boxed{7}"),
    ({"question": "q", "answer": "so \\boxed{7}"}, False, "so \\boxed{7}"),
])  # fmt: skip
def test_answers_of_ones_own_file_are_imitated(tool, tmp_path, row, plain, demonstration):
    data = tmp_path / "mine.jsonl"
    data.write_text(json.dumps(row) + "\n")
    tool.make(tmp_path / "model", data, warmup(tool), plain)
    ((turns, text),) = tool.read_texts(data, plain)
    asked = row.get("messages") or row.get("prompt") or [{"role": "user", "content": row["question"]}]
    assert (text, turns) == (demonstration, asked[: len(turns)])
    assert (tmp_path / "model/model.safetensors").is_file()


def test_columns_name_the_question_and_the_answer_of_ones_own_file(tool, tmp_path):
    data, columns = tmp_path / "mine.jsonl", {"question": "task", "answer": "reply"}
    data.write_text('{"task": "1?", "reply": "2"}\n')
    tool.make(tmp_path / "model", data, warmup(tool), columns=columns)
    assert [text for _, text in tool.read_texts(data, columns=columns)] == ["\\boxed{2}"]
    assert json.loads((tmp_path / "model" / "made_by.json").read_text())["columns"] == columns


def test_what_has_no_effect_is_refused(tool, data, tmp_path, monkeypatch, capsys):
    for keys in ({"plain": True}, {"columns": {"question": "question"}}):
        with pytest.raises(ValueError, match="--plain and --columns have no effect: r1_solution_1 is imi"):
            tool.read_texts(data, **keys)
    words = ["--data", str(data), "--out", str(tmp_path / "model"), "--steps", "0", "optimizer.lr=1"]
    monkeypatch.setattr("sys.argv", ["make_tiny_model.py", *words])
    with pytest.raises(SystemExit):
        tool.main()
    assert "optimizer.lr=1 has no effect with --steps 0" in capsys.readouterr().err


def test_a_file_without_answers_is_refused(tool, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "1?", "reply": "2"}\n')
    with pytest.raises(ValueError, match=r"mine\.jsonl"):
        tool.read_texts(tmp_path / "mine.jsonl")


def calculated(seed):
    return load_tool("make_calculator").demonstrate(12, 34, random.Random(seed))


def repaired(seed):
    return load_tool("make_repair").demonstrate(5, "echo $((1-2))", 3, ("+", "*"), random.Random(seed))


@pytest.mark.parametrize(("demonstrate", "lengths", "first"), [
    (calculated, {2, 4}, ("python", "code")), (repaired, {4, 6}, ("run", "command")),
])  # fmt: skip
def test_demonstrations_train_the_policys_turns_in_the_tools_form(demonstrate, lengths, first, tmp_path):
    chats = [demonstrate(seed) for seed in range(20)]
    assert {len(chat) for chat in chats} == lengths
    chat = max(chats, key=len)
    (call,) = tool_calls(chat[1]["content"])
    assert (call.name, *call.arguments) == first
    write_hf_tokenizer(tmp_path, [turn["content"] for turn in chat] * 9, 300)
    demonstrations.write_rows(tmp_path / "rows.jsonl", [{"messages": chat}])
    recipe = demonstrations.supervised(tmp_path, tmp_path / "rows.jsonl", packing={"max_tokens_per_row": 512})
    (row,) = demonstrations.drawn(recipe, 1)
    tokenizer, trained = load_tokenizer(tmp_path), row.response.token_ids[row.response.is_generated]
    assert tokenizer.decode(trained) == "".join(turn["content"] for turn in chat[1::2])
    assert sum(token in tokenizer.eos_token_ids for token in trained.tolist()) == len(chat) // 2


def test_the_calculators_demonstrations_have_the_answer_of_their_call():
    chat = next(chat for chat in map(calculated, range(20)) if len(chat) == 4)
    (call,) = tool_calls(chat[1]["content"])
    assert str(eval(call.arguments["code"])) == chat[2]["content"]
