"""Readers, chat format, mixture, resume: facts about the trainer's prompts."""

import json
import re
import shutil
import sys
from collections import Counter, UserList
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Backend

from megatron_eqlen.data.filters import read_questions
from megatron_eqlen.data.first_rewards import first_reward, first_rewards, refuse_unfit
from megatron_eqlen.data.jsonl import read_aime
from megatron_eqlen.data.layouts import final_answer
from megatron_eqlen.data.overlap import read_overlaps
from megatron_eqlen.data.prompts import PromptSource, read_benchmark
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.data.sources import open_source
from megatron_eqlen.hf.tokenizer import Tokenizer, load_tokenizer
from megatron_eqlen.recipe import BenchmarkRecipe, DataRecipe, EnvironmentRecipe, RewardRecipe, SourceRecipe
from megatron_eqlen.recipe.data_sets import BENCHMARKS, TRAINING
from megatron_eqlen.rewards.scoring import Scorer
from tools.tokenizer_maker import write_hf_tokenizer

CORPUS = ["What is 12 + 30? Please reason step by step. \\boxed{42}", "</think> the answer is Yes."] * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_hf_tokenizer(folder, CORPUS)
    ends = [load_id(folder, "<|im_end|>"), load_id(folder, "<|endoftext|>")]
    config = {"eos_token_id": ends, "pad_token_id": ends[1]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": ends[0]}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture
def with_template(folder, tmp_path):
    """Return a function that loads the tokenizer with another chat template."""

    def load(template: str) -> Tokenizer:
        shutil.copytree(folder, tmp_path / "model")
        (tmp_path / "model/chat_template.jinja").write_text(template)
        return load_tokenizer(tmp_path / "model")

    return load


def load_id(folder: Path, token: str) -> int:
    return Backend.from_file(str(folder / "tokenizer.json")).token_to_id(token)


def write_deepmath(path: Path, rows: list[tuple]) -> Path:
    questions, answers, difficulties = zip(*rows, strict=True)
    columns = {"question": questions, "final_answer": answers}
    columns["difficulty"] = pa.array(difficulties, pa.float64())
    columns |= {name: [name] * len(rows) for name in ("topic", "r1_solution_1", "r1_solution_2")}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def sums(count: int, start: int = 0) -> list[tuple]:
    return [(f"What is {i} + 1?", str(i + 1), float(i % 10)) for i in range(start, start + count)]


def recipe(*sources: SourceRecipe, **data) -> DataRecipe:
    return DataRecipe(sources=list(sources), **data)


def source(path: Path, name: str = "deepmath", **keys) -> SourceRecipe:
    return SourceRecipe(name=name, path=str(path), **keys)


def rows_in(folder: Path, rows: list, name: str = "rows.jsonl", **keys) -> SourceRecipe:
    """Write rows as JSON Lines."""
    (folder / name).write_text("\n".join(map(json.dumps, rows)) or "\n\n")
    return source(folder / name, **keys)


def counted(prompts, name="deepmath"):
    """Return how many rows of a source became prompts, and how many were left out by reason."""
    state = prompts.state_dict()["sources"][name]
    return state["kept"], state["dropped"]


def test_end_of_sequence_is_the_set_of_generation_config(folder, tokenizer):
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.eos_token_ids == frozenset(ends)
    assert tokenizer.pad_token_id == ends[1]


def test_without_generation_config_the_fallback_is_said(folder, tmp_path, caplog):
    for file in folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    expected = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert load_tokenizer(tmp_path).eos_token_ids == frozenset({expected})
    assert "no eos_token_id in generation_config.json; config.json says" in caplog.text


def test_decode_keeps_think_and_drops_ends(tokenizer):
    text = "<think>a</think> b"
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, *tokenizer.eos_token_ids, tokenizer.pad_token_id]) == text


def test_a_padding_token_that_is_a_letter_is_text_and_an_id_out_of_range_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    config = json.loads(file.read_text())
    letter = load_id(folder, "W")
    file.write_text(json.dumps(config | {"pad_token_id": letter}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pad_token_id == letter
    assert tokenizer.decode([letter, letter, *tokenizer.eos_token_ids]) == "WW"
    for unknown in ({"pad_token_id": 10**6}, {"eos_token_id": [10**6]}):
        file.write_text(json.dumps(config | unknown))
        with pytest.raises(ValueError, match=r"among the tokenizer's ids, 0 to \d+, found \[1000000\]"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(("file", "text", "fault"), [
    ("tokenizer.json", "{}", "expected the files of a tokenizer, found something else"),
    ("tokenizer.json", "[]", "tokenizer.json: expected a JSON object, found a list"),
    ("tokenizer.json", '{"added_tokens": [], "model": {"type": "?"}}', "tokenizer.json: data did not match"),
    ("tokenizer_config.json", "{", "tokenizer_config.json: not valid JSON"),
    ("config.json", "3", "config.json: expected a JSON object, found a int"),
    ("generation_config.json", '{"eos_token_id": true}', "eos_token_id: expected token ids, found True"),
])  # fmt: skip
def test_a_damaged_tokenizer_is_named(folder, tmp_path, file, text, fault):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / file).write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/model.*{re.escape(fault)}"):
        load_tokenizer(tmp_path / "model")


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"expected tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("role", "system", "user"), [
    ("user", "", "What is 0 + 1?\n\nBox it."),
    ("system", "<|im_start|>system\nBox it.<|im_end|>\n", "What is 0 + 1?"),
    ("none", "", "What is 0 + 1?"),
])  # fmt: skip
def test_the_instruction_stands_where_the_recipe_says(tokenizer, tmp_path, role, system, user):
    file = write_deepmath(tmp_path / "train-0.parquet", sums(1))
    data = recipe(source(file), instruction="Box it.", instruction_role=role)
    expected = f"{system}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    assert PromptSource(data, tokenizer, seed=0).next(1)[0].token_ids == tokenizer.encode(expected)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "5"},
]


def test_a_chat_is_the_prompt_as_it_stands_and_its_last_reply_the_answer(tokenizer, tmp_path):
    rows = [
        {"messages": CHAT},
        {"messages": CHAT[1:2], "answer": 6},
        {"messages": CHAT[:1], "answer": 5},
        {"messages": [{"role": "robot", "content": "?"}], "answer": 5},
        {"messages": CHAT[:2]},
    ]
    prompts = PromptSource(recipe(rows_in(tmp_path, rows), shuffle=False), tokenizer, seed=0)
    whole, single = prompts.next(2)
    user = "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert whole.token_ids == tokenizer.encode("<|im_start|>system\nBe brief.<|im_end|>\n" + user)
    assert (whole.question, whole.gold) == ("system: Be brief.\n\nuser: 2 + 3?", "5")
    assert (single.token_ids, single.question, single.gold) == (tokenizer.encode(user), "2 + 3?", "6")
    assert counted(prompts) == (2, {"bad_messages": 2, "missing_column": 1})


GSM8K = ' Let\'s think step by step and output the final answer after "####".'


@pytest.mark.parametrize("wrapped", ["dapo", "gsm8k"])
def test_an_instruction_for_another_grader_goes_out_of_a_chat_whose_other_turns_stay(
    tokenizer, tmp_path, wrapped
):
    asked = DAPO if wrapped == "dapo" else "2 + 3?" + GSM8K
    rows = [
        {"prompt": [*CHAT, {"role": "user", "content": asked}], "answer": 5},
        {"prompt": asked, "answer": 5},
    ]
    source = rows_in(tmp_path, rows, keep_duplicates=True)
    chat, text = PromptSource(recipe(source, shuffle=False), tokenizer, seed=0).next(2)
    said = tokenizer.decode(chat.token_ids)
    assert said.startswith(
        "<|im_start|>system\nBe brief.\n<|im_start|>user\n2 + 3?\n<|im_start|>assistant\n5\n"
    )
    for prompt in (said, tokenizer.decode(text.token_ids)):
        assert "\\boxed" in prompt
        assert "Answer:" not in prompt
        assert "####" not in prompt


def test_a_part_of_a_turn_that_is_no_text_is_no_text(tmp_path):
    parts = [{"type": "text", "text": "What is shown?"}, {"type": "image", "text": None}]
    for other in (parts[1], {"type": "image", "text": ""}, {"type": "image_url"}, {"type": "text"}, "text"):
        tally = Tally()
        rows = [
            {"messages": [{"role": "user", "content": [parts[0], *more]}], "answer": 5}
            for more in ([], [other])
        ]
        (read,) = open_source(rows_in(tmp_path, rows), tally)
        assert (read.question, tally.dropped) == ("What is shown?", {"bad_messages": 1})
        assert "and text, no images, found {" in tally.first["bad_messages"]


def test_in_parquet_a_call_has_its_own_arguments_alone(tmp_path):
    calls = [
        {"function": {"name": name, "arguments": own}}
        for name, own in (("add", {"x": 2}), ("at", {"city": "Rome"}))
    ]
    chats = [[USER[0], {"role": "assistant", "content": "", "tool_calls": [call]}, USER[0]] for call in calls]
    rows = [{"messages": chat, "answer": 5} for chat in chats]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    kept = open_source(source(tmp_path / "train.parquet", keep_duplicates=True), Tally())
    assert [row.messages[1]["tool_calls"] for row in kept] == [[call] for call in calls]


CALLS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% for call in m.tool_calls or [] %}"
    "{% set f = call.function %}[{{ f.name }} ARGUMENTS]{% endfor %}{{ '\\n' }}{% endfor %}"
)


@pytest.mark.parametrize(("written", "given"), [
    ("{{ f.arguments | tojson }}", {"x": "é", "n": [1, 2]}),  # Qwen2.5's
    ("{{ f.arguments | tojson }}", '{"x": "é", "n": [1, 2]}'),  # as OpenAI writes it
    ("{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}",
     '{"x": "é",  "n": [1,2]}'),  # Qwen3's
    ("{{ '' + f.arguments }}", {"x": "é", "n": [1, 2]}),  # DeepSeek's
    ("{{ '' + f.arguments }}", '{"x": "é", "n": [1, 2]}'),
])  # fmt: skip
def test_calls_in_a_chat_have_arguments_in_the_templates_form_and_lost_keys_count(
    with_template, tmp_path, written, given
):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": given}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    lost, asked = called | {"reasoning_content": "Hm."}, {"role": "user", "content": "2 + 3?"}
    rows = [{"messages": [asked, lost, asked | {"content": "3 + 3?"}], "answer": 6}]
    rows += [{"messages": [asked, called, asked], "answer": 5}]
    tokenizer = with_template(CALLS.replace("ARGUMENTS", written))
    prompts = PromptSource(recipe(rows_in(tmp_path, rows), shuffle=False), tokenizer, seed=0)
    expected = 'user: 2 + 3?\nassistant: [add {"x": "é", "n": [1, 2]}]\nuser: 2 + 3?\n'
    assert prompts.next(1)[0].token_ids == tokenizer.encode(expected)
    assert counted(prompts) == (1, {"unrendered_key": 1})


def test_arguments_that_nest_without_end_are_text(with_template, tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": "[" * 3000}}
    turns = [{"role": "user", "content": "2"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    rows, tokenizer = [{"messages": [*turns, turns[0]], "answer": 5}], with_template(CALLS)
    prompts = PromptSource(recipe(rows_in(tmp_path, rows), shuffle=False), tokenizer, seed=0)
    with pytest.raises(ValueError, match="unrendered_key"):
        prompts.next(1)


def test_arguments_that_nest_without_end_leave_those_of_other_calls_as_the_template_takes_them(with_template):
    given = ('{"x": 1}', "[" * 3000)
    calls = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in given]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    tokenizer = with_template(CALLS.replace("ARGUMENTS", "{{ f.arguments | tojson }}"))
    assert '[f {"x": 1}][f "[[[' in tokenizer.render_chat([called])


ADD, SUBTRACT, ADD_ONE = (
    {"type": "function", "function": {"name": name, "arguments": given}}
    for name, given in (("add", {}), ("sub", {}), ("add", '{"n": "one"}'))
)


@pytest.mark.parametrize("turn", [
    {"role": "tool", "content": "Be brief."},
    {"role": "assistant", "content": "I add.", "tool_calls": [ADD]},
    {"role": "assistant", "content": "", "tool_calls": [ADD, SUBTRACT]},
    {"role": "assistant", "content": "", "tool_calls": [ADD_ONE]},
])  # fmt: skip
def test_a_row_with_a_text_that_the_template_leaves_out_is_left_out(with_template, tmp_path, turn):
    said = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role + ': ' }}{{ m.tool_calls[0]"
    tokenizer = with_template(said + ".function.name if m.tool_calls else m.content | trim }}{% endfor %}")
    asked = [{"role": "user", "content": " 2 + 3?\n"}, {"role": "assistant", "content": "5"}]
    rows = [{"messages": [turn, asked[0]], "answer": 5}]
    rows += [{"messages": [*asked, {"role": "user", "content": "3 + 3?"}], "answer": 5}]
    prompts = PromptSource(recipe(rows_in(tmp_path, rows), shuffle=False), tokenizer, seed=0)
    assert prompts.next(1)[0].token_ids == tokenizer.encode("user: 2 + 3?assistant: 5user: 3 + 3?")
    assert counted(prompts) == (1, {"unrendered_key": 1})


@pytest.mark.parametrize(("gold", "answer"), [
    ('["1", "-1"]', "1, -1"), ("['1', '-1']", "1, -1"), ("['1' '-1']", "1, -1"),
    (r'["\\frac{1}{2}"]', r"\frac{1}{2}"),
    (r'["\frac{1}{2}", "x"]', r"\frac{1}{2}, x"),
    ("('1','-1')", "1, -1"), ("('7',)", "7"), ("{'b', 'a'}", "b, a"), ("frozenset({'1', '2'})", "1, 2"),
    ("array(['1', '-1'], dtype=object)", "1, -1"), ("[['1', '-1']]", "1, -1"), ("'7'", "7"), ('"x"', "x"),
    ("[['1'], ['2']]", "[['1'], ['2']]"), ('{"a": "1"}', '{"a": "1"}'), ("'tis", "'tis"),
    ("(1, 2)", "(1, 2)"), ("Fraction(-1, 2)", "-1/2"), ("[Fraction(1, 2), Decimal('1.5')]", "1/2, 1.5"),
    ("np.float64(2.5)", "2.5"), ("(np.str_('a'), np.str_('b'))", "(a, b)"), ("f(1, 2)", "f(1, 2)"),
    ("array([1, 2])", "1, 2"), ("{1, 2}", "{1, 2}"), ("frozenset({3, 1.5})", "3, 1.5"),
    ("[1, 2]", "[1, 2]"), ('["a"', '["a"'), ('["a", 1, "b"]', "a, 1, b"), ("(1-2.5j)", "(1-2.5i)"),
])  # fmt: skip
def test_a_gold_that_is_a_list_of_texts_becomes_one_that_an_answer_can_meet(gold, answer):
    assert final_answer(gold) == answer


def test_a_text_that_nests_too_deep_for_python_is_no_list_and_no_chat(tmp_path):
    sums = "'1'" + "+'1'" * 20_000
    assert final_answer(f"[{sums}]") == f"[{sums}]"
    chat = f"[{{'role': 'user', 'content': {sums}}}]"
    (problem,) = open_source(rows_in(tmp_path, [{"prompt": chat, "answer": 1}]), Tally())
    assert problem.question == chat


DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n2 + 3?\n\nRemember to "
    'put your answer on its own line after "Answer:".'
)
USER = [{"role": "user", "content": "2 + 3?"}]
SHAREGPT = [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]
LAYOUTS = {
    "verl": ({"data_source": "x", "prompt": USER, "ability": "math", "reward_model": {"ground_truth": "5"}},
             "CHAT", "question from prompt (a chat, as it stands), answer from reward_model.ground_truth"),
    "trl": ({"prompt": "2 + 3?", "solution": "It is $\\boxed{5}$, as 2 and 3 are 5."}, "TEXT",
            "question from prompt, answer from solution"),
    "trl chat": ({"prompt": USER, "ground_truth": 5}, "CHAT",
                 "question from prompt (a chat, as it stands), answer from ground_truth"),
    "openrlhf": ({"input": "2 + 3?", "label": "5"}, "TEXT", "question from input, answer from label"),
    "an instruction beside a chat": (
        {"prompt": USER, "answer": "5", "instruction": "Be brief."}, "CHAT",
        "question from prompt (a chat, as it stands), answer from answer; not shown to the model: "
        "instruction"),
    "sharegpt": ({"conversations": SHAREGPT}, "CHAT", "question from conversations (a chat, as it stands)"),
    "nemo-rl": ({"problem": "2 + 3?", "expected_answer": "5"}, "TEXT",
                "question from problem, answer from expected_answer"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}], "gold": "5"},
              "CHAT", "question from messages (a chat, as it stands), answer from gold"),
    "capitals, written as text": (
        {"Question": json.dumps(USER), "Answer": "The answer is: 5.", "choices": ["4", "5"]}, "CHAT",
        "question from Question (a chat, as it stands), answer from Answer; not shown to the model: choices"),
    "written by Python's str": (
        {"question": str(USER), "answer": 5, "system": "Be brief.", "label": "6"}, "CHAT",
        "question from question (a chat, as it stands), answer from answer; not shown to the model: system; "
        "not read: label"),
    "one question in two forms": ({"problem": "2 + 3?", "messages": [*USER, CHAT[2]], "answer": "5"}, "TEXT",
                                  "question from problem, answer from answer"),
    "roles of other makers": (
        {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "model", "content": "5"}]}, "CHAT",
        "question from messages (a chat, as it stands)"),
    "written as text with spaces": ({"question": json.dumps(USER, indent=2), "answer": "5"}, "CHAT",
                                    "question from question (a chat, as it stands), answer from answer"),
    "a column with a dot in its name, beside one without an answer": (
        {"prompt": "2 + 3?", "answer": "", "reward_model.ground_truth": "5"}, "TEXT",
        "question from prompt, answer from reward_model.ground_truth"),
    "a request beside its input": ({"prompt": "2 + 3?", "input": "2 + 3?", "answer": "5"}, "TEXT",
                                   "question from prompt, answer from answer; not shown to the model: input"),
    "names with spaces and the mark of a CSV": (
        {"\ufeffQuestion": "2 + 3?", " answer ": "5"}, "TEXT",
        "question from \ufeffQuestion, answer from  answer "),
    "two spellings of one name": (
        {"Question": "2 + 3?", "answer": "5", "Answer": "6"}, "TEXT",
        "question from Question, answer from answer; not read: Answer"),
    "a whole solution beside the answer": (
        {"problem": "2 + 3?", "solution": "Add.", "answer": ["5"], "difficulty": "hard"}, "TEXT",
        "question from problem, answer from answer"),
}  # fmt: skip
"""A row, how its question is put, and what is said of the file."""


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_of_other_trainers_are_recognised(tmp_path, case):
    row, form, told = LAYOUTS[case]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for name in ("train.parquet", "rows.jsonl"):
        tally = Tally()
        (read,) = open_source(source(tmp_path / name), tally)
        assert (read.question, read.gold) == ("2 + 3?", "5")
        assert read.messages == (tuple(USER) if form == "CHAT" else None)
        assert read.instruction == ("" if form == "CHAT" else None), "a chat asks in its own way"
        assert "".join(tally.notes) == told


def of_verl(content: str, gold: str, **extra) -> dict[str, Any]:
    row = {"data_source": "x", "ability": "math", "extra_info": extra}
    rewarded = {"ground_truth": gold, "style": "rule"}
    return row | {"prompt": [{"content": content, "role": "user"}], "reward_model": rewarded}


MATH_ROW = {"problem": "2 + 3?", "answer": "5"}
NAMED = {
    "deepmath": ({"data/train-00000-of-00001.parquet": [
        {"question": "2 + 3?", "final_answer": "5", "difficulty": 4.0, "r1_solution_1": "5"}]}, {}, {}),
    "gsm8k": ({"main/train-00000-of-00001.parquet": [{"question": "2 + 3?", "answer": "<<2+3=5>>5\n#### 5"}],
               "main/test-00000-of-00001.parquet": [{"question": "test", "answer": "#### 1"}],
               "socratic/train-00000-of-00001.parquet": [{"question": "2?", "answer": "#### 2"}]}, {}, {}),
    "dapo_math": ({"data/dapo-math-17k.parquet": [of_verl(DAPO, "5", index="a")] * 3}, {}, {"duplicate": 2}),
    "deepscaler": ({"deepscaler.json": [MATH_ROW | {"solution": "Add."}, {"problem": "q", "answer": ""}]},
                   {}, {"empty_field": 1}),
    "polaris": ({"polaris-data-53K.jsonl": [MATH_ROW | {"difficulty": each} for each in ("7/8", "0/8", "")]},
                {"min_difficulty": 0.5}, {"difficulty": 1, "no_difficulty": 1}),
    "skywork_math": ({"data/math-00000-of-00001.parquet": [of_verl("2 + 3?", '["5"]', index=1)],
                      "data/code-00000-of-00002.parquet": [of_verl("Print 5.", '["assert f()"]', index=1)]},
                     {}, {}),
    "big_math": ({"data/train-00000-of-00001.parquet": [
        MATH_ROW | {"source": "x", "domain": ["y"], "llama8b_solve_rate": rate} for rate in (0.5, 0.1)]},
        {"columns": {"difficulty": "llama8b_solve_rate"}, "max_difficulty": 0.2}, {"difficulty": 1}),
}  # fmt: skip
"""Files of a data set's repository, with its columns; keys of the recipe; rows left out by reason."""


@pytest.mark.parametrize("reader", TRAINING)
def test_data_sets_are_read_by_name(tmp_path, reader):
    files, keys, dropped = NAMED[reader]
    for name, rows in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True, parents=True)
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            lines = "\n".join(map(json.dumps, rows))
            file.write_text(json.dumps(rows) if file.suffix == ".json" else lines)
    tally = Tally()
    by_folder = SourceRecipe(name="s", reader=reader, path=str(tmp_path), **keys)
    (read,) = open_source(by_folder, tally)
    assert (read.question, read.gold, dict(tally.dropped)) == ("2 + 3?", "5", dropped)
    file = SourceRecipe(name="s", reader=reader, path=str(tmp_path / next(iter(files))), **keys)
    (again,) = open_source(file, Tally())
    assert replace(again, row_id=read.row_id) == read, "a file by itself"
    assert SourceRecipe.model_validate({"name": "s", "reader": reader}).path == TRAINING[reader]["path"]


def test_duplicates_are_kept_where_the_recipe_says_so_and_a_key_without_effect_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "2 + 3?", "answer": "5"}\n' * 3)
    kept = source(tmp_path / "rows.jsonl", keep_duplicates=True)
    assert [len(open_source(each, Tally())) for each in (source(kept.path), kept)] == [1, 3]
    with pytest.raises(ValueError, match=f"keep_duplicates has no effect with {__name__}:three"):
        open_source(kept.model_copy(update={"reader": f"{__name__}:three"}), Tally())


def three(path, tally):
    return UserList(Problem(str(number), "2 + 3?", "5") for number in range(3))


@pytest.mark.parametrize(("columns", "keys", "message"), [
    ({"question": "promt"}, {}, "columns: question: 'promt' is in none of its first 1 rows (nearest: "
     "'prompt'): expected one of ['prompt', 'text', 'gold.value', 'gold.kind']"),
    ({"answer": "gold.valeu"}, {}, "'gold.valeu' is in none of its first 1 rows (nearest: 'gold.value')"),
    ({"tests": "gold"}, {}, "tests: gold has no effect: no row's grader is code"),
    ({"question": "prompt", "instruction": "text"}, {}, "text has no effect: a chat takes no instruction"),
    ({"instruction": "text"}, {}, "text has no effect: a chat takes no instruction"),
    ({"grader": "text"}, {"grader": "math"}, "grader: text has no effect: the recipe's grader is math"),
    ({"answer": "text"}, {"grader": "code"}, "answer: text has no effect: tests grade code"),
])  # fmt: skip
def test_a_columns_entry_that_cannot_act_is_refused(tmp_path, columns, keys, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": USER, "text": "a", "gold": {"value": "5", "kind": "x"}}))
    with pytest.raises(ValueError, match=re.escape(message)):
        open_source(source(file, columns=columns, **keys), Tally())


def by_length(response):
    return -len(response)


def always_one(response):
    return 1


def of_hashes(response, answer):
    return float(response.rpartition("#### ")[2] == answer)


ASKS_HASHES = [{"role": "user", "content": "2 + 3? Write the answer after ####."}]
MATH = {"question": "2 + 3?", "answer": 5}
CODE = {"question": "Add two numbers.", "grader": "code", "tests": {"inputs": ["2 3\n"], "outputs": ["5\n"]}}
FIRST = {
    "math": (MATH, None, "right 1, wrong 0, empty 0, without its form 0"),
    "a worked gold": (MATH | {"answer": "2 + 3 is 5\n#### 5"}, None, "right 1, wrong 0, "),
    "another form": (MATH | {"question": ASKS_HASHES}, None,
                     "right 0, wrong 0, empty 0, without its form 0: the prompt asks for #### ..., the "
                     "grader reads \\boxed{...}: change the prompt (data.instruction; a chat keeps"),
    "no answer but an explanation": (MATH | {"answer": "word " * 21}, None, "right 1, wrong 0, empty 0, "
                                     "without its form 0: its gold has 21 words, which no response will"),
    "own function": (MATH | {"question": ASKS_HASHES, "answer": "5"}, "of_hashes", "right 1, wrong 0, "),
    "own function, gold as a number": (MATH | {"question": ASKS_HASHES}, "of_hashes",
                                       "right 0, wrong 0, empty 0, without its form 0: its gold, which "
                                       "the function gets as int, written '#### 5', earns no more "
                                       "than a wrong answer"),
    "own function, equal": (MATH | {"question": [{"role": "user", "content": "2 + 3?"}]}, "always_one",
                            "right 1, wrong 1, empty 1: its gold, which the function gets as int, "
                            "written '5', earns no more than a wrong answer"),
    "program": (CODE, None, "right 1, wrong 0, empty 0"),
    "function": (CODE | {"tests": {"inputs": [[2, 3]], "outputs": [5], "function": "add"}}, None, "right 1"),
    "negative": (MATH, "by_length", "right -9, wrong -11, empty 0, without its form -8"),
}  # fmt: skip
"""A row, its grader, and what is said of its first rewards."""


def fails_later(response, answer):
    return 1 / (int(answer) - 7)


def fails_first(response, answer):
    return float(1 / (int(answer) - 1) > 0 and str(answer) in response)


def fails(response):
    raise KeyError(response)


def test_an_own_function_grades_further_rows_and_a_benchmark_is_read_whole(tokenizer, tmp_path):
    """A start meets the errors of a first harvest and of a first evaluation."""
    rows = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(9)]
    test = rows_in(tmp_path, [*rows, {"question": "?"}], "test.jsonl")

    def graded_by(name: str) -> PromptSource:
        return PromptSource(recipe(rows_in(tmp_path, rows, grader=f"{__name__}:{name}")), tokenizer, 0)

    scorer, prompts = Scorer(RewardRecipe(), tokenizer), graded_by("fails_later")
    none = {"evaluation": SimpleNamespace(benchmarks=[]), "environment": EnvironmentRecipe()}
    whole = SimpleNamespace(**none, reward=RewardRecipe())
    (first,) = first_rewards(whole, prompts, scorer, tokenizer)
    assert re.match(r"deepmath/rows.jsonl#6: .*:fails_later: ZeroDivisionError", first.cause)
    (first,) = first_rewards(whole, graded_by("fails_first"), scorer, tokenizer)
    assert first.rewards["right"] == 1, "of a later row"
    assert re.match(r"deepmath/rows.jsonl#0: .*:fails_first: ZeroDivisionError", first.cause)
    strict = Scorer(RewardRecipe(on_error="end"), tokenizer)
    with pytest.raises(ValueError, match=r"^deepmath/rows.jsonl#6: .*:fails_later: ZeroDivisionError"):
        first_rewards(whole, prompts, strict, tokenizer)
    weighed = SimpleNamespace(**none, reward=RewardRecipe(weights={"right": 1.0}))
    with pytest.raises(
        ValueError, match=r"expected rewards named right \(reward.weights\), found one unnamed"
    ):
        first_rewards(weighed, prompts, scorer, tokenizer)
    weighed.environment = EnvironmentRecipe(name="python")  # one that grades may name its rewards
    assert first_rewards(weighed, prompts, scorer, tokenizer)
    with pytest.raises(ValueError, match=r"^deepmath/rows.jsonl#0: .*:fails: KeyError"):
        first_rewards(whole, graded_by("fails"), scorer, tokenizer)
    whole.evaluation.benchmarks = [BenchmarkRecipe(name="b", path=test.path)]
    with pytest.raises(ValueError, match=r"benchmark b: .*test.jsonl: too few usable rows: 1 of .*"):
        first_rewards(whole, prompts, scorer, tokenizer)


@pytest.mark.parametrize("case", FIRST)
def test_first_rewards_name_the_cause_of_a_right_answer_that_earns_nothing(tokenizer, tmp_path, case):
    row, function, told = FIRST[case]
    of_it = rows_in(tmp_path, [row], grader=function and f"{__name__}:{function}")
    prompts = PromptSource(recipe(of_it), tokenizer, 0)
    scorer = Scorer(RewardRecipe(code_python=sys.executable), tokenizer)
    ((prompt,),) = prompts.samples(1)
    first = first_reward(prompt, scorer, tokenizer)
    scorer.close()
    prompts.close()
    assert str(first).partition("): ")[2].startswith(told)
    assert bool(first.cause) == any(why in told for why in ("earns no", "asks for", "its gold has"))
    assert "0 s each" not in str(first)
    assert ", 4.0 s each, one after another" in str(replace(first, seconds=4.0))
    refuse_unfit([first])
    if first.lowest < 0:
        with pytest.raises(ValueError, match=r"benchmarks: deepmath: avg@k and pass@k are of .*, found -9"):
            refuse_unfit([replace(first, of_benchmark=True)])


def test_files_of_several_splits_are_refused_and_hidden_and_other_files_are_not_read(tmp_path):
    for name in ("train/a.jsonl", "test/a.jsonl", ".copies/a.jsonl", "dataset_infos.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"question": name, "answer": 1}))
    with pytest.raises(ValueError, match=r"expected files of one split, found test, train: name it, split: "):
        open_source(source(tmp_path), Tally())
    assert [row.question for row in open_source(source(tmp_path, split="test"), Tally())] == ["test/a.jsonl"]
    for name in ("Train.jsonl", "Test.jsonl"):
        (tmp_path / "capitals").mkdir(exist_ok=True)
        (tmp_path / "capitals" / name).write_text(json.dumps({"question": name, "answer": 1}))
    with pytest.raises(ValueError, match=r"expected files of one split, found test, train: "):
        open_source(source(tmp_path / "capitals"), Tally())
    pq.write_table(pa.table({"question": ["another"], "answer": ["1"]}), tmp_path / "train/b.parquet")
    (tmp_path / "train/c.csv").write_text("question,answer")
    (tmp_path / "train/d.jsonl").symlink_to("nowhere")
    tally = Tally()
    assert len(open_source(source(tmp_path / "train"), tally)) == 2
    assert tally.notes == ["not read: c.csv, d.jsonl"]
    with pytest.raises(ValueError, match=r"config and split choose among a folder's files, found .*a.json"):
        open_source(source(tmp_path / "train/a.jsonl", split="train"), Tally())
    (tmp_path / "zipped").mkdir()
    (tmp_path / "zipped/a.jsonl.gz").write_text("")
    with pytest.raises(ValueError, match=r"zipped: expected files named .* or \*.json, found a.jsonl.gz"):
        open_source(source(tmp_path / "zipped"), Tally())


def test_each_row_has_the_columns_of_its_own_layout(tmp_path):
    rows = [{"id": 1}] * 150 + [
        {"question": "a?", "answer": 1},
        {"problem": "b?", "label": 2},
        {"prompt": USER, "reward_model": {"ground_truth": "5"}},
        {"question": "", "prompt": "c?", "messages": USER, "answer": 3, "gold": {"value": 5}},
        {"instruction": "d?", "answer": 4},
    ]
    tally = Tally()
    read = open_source(rows_in(tmp_path, rows), tally)
    assert [(row.question, row.gold) for row in read] == [("a?", "1"), ("b?", "2"), ("2 + 3?", "5")]
    assert tally.dropped == {"missing_column": 151, "two_questions": 1}
    assert "prompt and messages differ" in tally.first["two_questions"]
    named = {"question": "messages", "answer": "gold.value"}
    (read,) = open_source(rows_in(tmp_path, rows[-2:], columns=named), Tally())
    assert (read.question, read.gold, read.messages) == ("2 + 3?", "5", tuple(USER)), "columns come first"
    (read,) = open_source(rows_in(tmp_path, rows[-2:], columns={"question": "instruction"}), Tally())
    assert (read.question, read.instruction) == ("d?", None), "a column is read once"


def test_thinking_switch_reaches_the_template(tokenizer, tmp_path):
    file = write_deepmath(tmp_path / "train-0.parquet", sums(1))
    plain = PromptSource(recipe(source(file)), tokenizer, 0).next(1)[0].token_ids
    off = PromptSource(recipe(source(file), enable_thinking=False), tokenizer, 0).next(1)[0].token_ids
    assert off == plain + tokenizer.encode("<think>\n\n</think>\n\n")


def test_an_epoch_has_every_row_once_and_the_next_is_shuffled_anew(tokenizer, tmp_path):
    file = write_deepmath(tmp_path / "train-0.parquet", sums(30))
    prompts = PromptSource(recipe(source(file)), tokenizer, seed=1)
    first, second = prompts.next(30), prompts.next(30)
    assert {prompt.question for prompt in first} == {row[0] for row in sums(30)}
    assert {prompt.question for prompt in second} == {row[0] for row in sums(30)}
    assert [prompt.question for prompt in first] != [prompt.question for prompt in second]
    assert len({prompt.prompt_id for prompt in first + second}) == 60


def test_without_shuffling_the_order_is_that_of_the_files(tokenizer, tmp_path):
    write_deepmath(tmp_path / "data" / "train-00000-of-00002.parquet", sums(3))
    write_deepmath(tmp_path / "data" / "train-00001-of-00002.parquet", sums(3, start=3))
    prompts = PromptSource(recipe(source(tmp_path), shuffle=False), tokenizer, seed=0).next(6)
    assert [prompt.question for prompt in prompts] == [row[0] for row in sums(6)]
    assert prompts[4].prompt_id == "deepmath/data/train-00001-of-00002.parquet#1"


@pytest.mark.slow  # starts five pools of graders
def test_resume_continues_exactly_across_epochs_and_drops(tokenizer, tmp_path):
    rows = [*sums(17), ("bad gold?", "\\frac{", 1.0)]
    first = write_deepmath(tmp_path / "a" / "train-0.parquet", rows)
    second = write_deepmath(tmp_path / "b" / "train-0.parquet", sums(5, start=50))
    data = recipe(source(first, "one", weight=2.0), source(second, "two"))
    whole = PromptSource(data, tokenizer, seed=3)
    expected = whole.next(60)
    whole.close()
    prompts = PromptSource(data, tokenizer, seed=3)
    seen = []
    for n in (8, 33, 19):
        seen += prompts.next(n)
        state = json.loads(json.dumps(prompts.state_dict()))
        prompts.close()
        prompts = PromptSource(data, tokenizer, seed=3)
        prompts.load_state_dict(state)
    assert seen == expected
    assert prompts.state_dict() == whole.state_dict()
    assert counted(prompts, "one") == (17, {"unparseable_gold": 1})


def test_resume_on_other_data_is_refused(tokenizer, tmp_path):
    file = write_deepmath(tmp_path / "train-0.parquet", sums(4))
    state = PromptSource(recipe(source(file)), tokenizer, 0).state_dict()
    write_deepmath(file, sums(5))
    with pytest.raises(
        ValueError, match=r"parquet: expected 4 rows, .*, found 5: put its files back, or begin"
    ):
        PromptSource(recipe(source(file)), tokenizer, 0).load_state_dict(state)
    with pytest.raises(ValueError, match="seed 0"):
        PromptSource(recipe(source(file)), tokenizer, 1).load_state_dict(state)


def test_mixture_follows_the_weights(tokenizer, tmp_path):
    first = write_deepmath(tmp_path / "a" / "train-0.parquet", sums(20))
    second = write_deepmath(tmp_path / "b" / "train-0.parquet", sums(20, start=50))
    data = recipe(source(first, "one", weight=3.0), source(second, "two", weight=1.0))
    drawn = Counter(prompt.source for prompt in PromptSource(data, tokenizer, 0).next(800))
    assert 560 < drawn["one"] < 640  # 600 expected, standard deviation 12


def test_rows_left_out_are_counted_by_reason(tokenizer, tmp_path):
    rows = [
        ("What is 1 + 1?", "2", 3.0),
        ("What is 1 + 1?", "2", 3.0),
        ("What is 2 + 2?", "4", 9.0),
        (None, "4", 3.0),
        ("   ", "4", 3.0),
        ("What is 3 + 3?", "6", None),
        ("Is it unparseable?", "\\frac{", 3.0),
        ("Long " * 500, "5", 3.0),
        ("What is 4 + 4, of benchmark fame?", "8", 3.0),
    ]
    file = write_deepmath(tmp_path / "train-0.parquet", rows)
    listed = tmp_path / "exclude.txt"
    listed.write_text('"What is 4 + 4,\\nof benchmark fame?"\n')
    data = recipe(source(file, max_difficulty=5.0, exclude=str(listed)), max_prompt_length=200)
    prompts = PromptSource(data, tokenizer, 0)
    assert {prompt.question for prompt in prompts.next(4)} == {"What is 1 + 1?"}
    reasons = "difficulty duplicate empty_field excluded no_difficulty too_long unparseable_gold wrong_type"
    assert counted(prompts) == (1, dict.fromkeys(reasons.split(), 1))
    prompts.close()


def test_a_number_that_pandas_does_not_have_is_no_difficulty(tmp_path):
    table = pa.table(
        {"question": ["1 + 1?", "2 + 2?"], "answer": ["2", "4"], "difficulty": [0.5, float("nan")]}
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    assert [row.difficulty for row in open_source(source(tmp_path / "rows.parquet"), Tally())] == [0.5, None]
    bounded, tally = source(tmp_path / "rows.parquet", min_difficulty=0.1), Tally()
    assert len(open_source(bounded, tally)) == 1
    assert tally.dropped == {"no_difficulty": 1}


def test_a_chats_system_turn_hides_no_question_from_exclusion_and_overlap(tmp_path):
    system = {"role": "system", "content": "Think."}
    told = 'What is 4 + 4? Let\'s think step by step and output the final answer after "####".'
    row = {"prompt": [system, {"role": "user", "content": told}], "answer": 8}
    other = {"prompt": [system, {"role": "user", "content": "What is 5 + 4?"}], "answer": 9}
    train = rows_in(tmp_path, [row, other], "train.jsonl")
    test = rows_in(tmp_path, [{"question": "What is 4 + 4?", "answer": 8}], "test.jsonl")
    (found,) = read_overlaps(recipe(train), [held_out(Path(test.path))])
    assert "holds 1 of the 1 questions of benchmark b" in found
    (listed := tmp_path / "exclude.txt").write_text("What is 4 + 4?\n")
    (kept,) = open_source(train.model_copy(update={"exclude": str(listed)}), Tally())
    assert kept.asked == "What is 5 + 4?"


def test_a_list_of_questions_is_no_list_of_records(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "What is 4 + 4?", "answer": 8}\n')
    with pytest.raises(
        ValueError, match=r"mine.jsonl: line 1: expected text or a JSON string: found a record"
    ):
        list(read_questions(tmp_path / "mine.jsonl"))
    for text in ('["What is 4 + 4?", "x"]', '{ "question": "What is 4 + 4?"}', '[{"question": "a"}]'):
        (tmp_path / "mine.json").write_text(text)
        with pytest.raises(ValueError, match=r"mine.json: line 1: .* found a record or a list"):
            list(read_questions(tmp_path / "mine.json"))
    (tmp_path / "mine.txt").write_text('\ufeff"What is\\n5?"\r\n{1, 2}: how many subsets?\n[1, 2] is what?\n')
    expected = ["What is\n5?", "{1, 2}: how many subsets?", "[1, 2] is what?"]
    assert [*read_questions(tmp_path / "mine.txt")] == expected


def test_rows_left_out_are_totalled_when_read_and_after_the_first_epoch(tokenizer, tmp_path, caplog):
    rows = [*sums(5), *sums(2), ("Long " * 500, "5", 3.0), (None, "4", 3.0)]
    file = write_deepmath(tmp_path / "train-0.parquet", rows)
    prompts = PromptSource(recipe(source(file), max_prompt_length=200), tokenizer, 0)
    assert "data source deepmath: 3 of 9 rows are left out: 2 duplicate, 1 wrong_type" in caplog.text
    prompts.next(5)
    assert "after its first epoch" not in caplog.text
    prompts.next(10)
    expected = "after its first epoch 4 of 9 rows are left out: 2 duplicate, 1 wrong_type, 1 too_long"
    assert caplog.text.count(expected) == 1


UNUSABLE = {
    "column": ([{"task": "a?", "reply": "1"}] * 2,
     "2 missing_column; the first missing_column is FILE#0: expected 'question' or one of problem, "
     "prompt, messages, conversations, input, query, found ['task', 'reply']; data.sources[].columns takes"),
    "no answer": ([{"question": 1, "answer": 1}, {"question": "a?"}, {"question": "b?"}],
     "FILE#1: expected answer, which other rows have, found none in this one"),
    "no reply": ([{"messages": CHAT[:2]}], "FILE#0: expected 'answer' or one of final_answer, "),
    "null": ([{"question": "a?", "answer": None}], "FILE#0: answer: expected text, found null"),
    "a megabyte": ([{"question": "long " * 200_000, "answer": 1}], "1,000,000 characters; raise data"),
    "long": ([{"question": "long " * 99, "answer": 1}], " tokens, data.max_prompt_length is 20"),
    "a chat that is rendered already": (
        [{"prompt": "<|im_start|>user\n2 + 3?<|im_end|>", "answer": 5}],
        "'<|im_start|>user\\n2 + 3?<|im_end|>': a chat is a list of turns, not their text"),
    "nothing": ([], "rows.jsonl: no usable row: the files hold no row"),
}  # fmt: skip
"""The error names the first row of the most frequent reason."""


@pytest.mark.parametrize("case", UNUSABLE)
def test_rows_that_are_all_unusable_are_an_error_that_says_why(tokenizer, tmp_path, case):
    rows, message = UNUSABLE[case]
    read = rows_in(tmp_path, rows)
    with pytest.raises(ValueError, match=re.escape(message.replace("FILE", f"{read.path}: rows.jsonl"))):
        PromptSource(recipe(read, max_prompt_length=20, shuffle=False), tokenizer, 0).next(1)


GOOD, LONG = {"question": "a?", "answer": 1}, {"question": "long " * 300, "answer": 1}
FEW = {
    "faults of reading": ([GOOD, *({"question": f"{n}?"} for n in range(2))], {},
     "too few usable rows: 2 of 3 rows are left out: 2 missing_column; the first missing_column is "),
    "length": ([GOOD, LONG, LONG | {"question": "far " * 300}], {},
     "2 too_long; the first too_long is deepmath/rows.jsonl#1: "),
    "both, and half of each": (
        [GOOD, LONG, *({"question": f"{n}?"} for n in range(2))], {}, "4 rows are left out: 2 missing_c"),
    "half": ([GOOD, LONG], {}, ""),
    "equal questions are no fault": ([GOOD] * 9, {}, ""),
    "what the recipe leaves out is no fault": (
        [GOOD | {"difficulty": 1}, *(GOOD | {"question": f"{n}?", "difficulty": 5} for n in range(9))],
        {"max_difficulty": 2}, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", FEW)
def test_a_source_of_which_faults_leave_out_more_than_half_is_no_good_source(tokenizer, tmp_path, case):
    rows, keys, message = FEW[case]
    prompts = PromptSource(recipe(rows_in(tmp_path, rows, **keys), max_prompt_length=200), tokenizer, 0)
    if message:
        with pytest.raises(ValueError, match=re.escape(message)):
            prompts.describe(100)
    else:
        assert prompts.describe(100)


def test_a_parquet_file_under_a_reader_of_json_is_refused(tokenizer, tmp_path):
    file = tmp_path / "train-0.parquet"
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), file)
    dates = {"since": "2025-02-01", "until": "2025-05-31"}
    benchmark = BenchmarkRecipe(name="b", reader="livecodebench", path=str(file), **dates)
    with pytest.raises(ValueError, match=r"parquet: expected .jsonl, found a parquet file: name"):
        read_benchmark(benchmark, recipe(source(file)), tokenizer)


@pytest.mark.parametrize(("reader", "rows", "message"), [
    ({"reader": "jsonl"}, [{"question": "1+1?"}, {"question": "1+2?", "answer": ""}],
     r"2 of 2 rows are left out: .*; the first \w+ is .*rows.jsonl: rows.jsonl#\d: .*"
     r"; evaluation.benchmarks\[\].columns takes other names"),
    ({"reader": "livecodebench", "since": "2025-02-01", "until": "2025-05-31"},
     [{"contest_date": "2024-08-03T00:00:00"}],
     r"1 of 1 rows are left out: 1 date; the first date is .*: 2024-08-03 is not in 2025-02-01..2025-05-31$"),
])  # fmt: skip
def test_a_benchmark_without_usable_rows_says_why(tokenizer, tmp_path, reader, rows, message):
    benchmark = BenchmarkRecipe(name="b", path=rows_in(tmp_path, rows).path, **reader)
    with pytest.raises(ValueError, match=rf"^benchmark b: .*rows.jsonl: no usable row: {message}"):
        read_benchmark(benchmark, recipe(source(tmp_path)), tokenizer)


def test_jsonl_rows_carry_their_own_grader(tokenizer, tmp_path):
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    lines = [
        {"question": "What is 1 + 1?", "answer": 2},
        {"question": "Write it.", "grader": "code", "tests": tests, "instruction": "In Python."},
        {"question": "No answer here."},
        {"question": "Bad grader", "grader": "oracle", "answer": "x"},
        {"question": ["wrong"], "answer": "x"},
        ["not a record"],
    ]
    prompts = PromptSource(recipe(rows_in(tmp_path, lines), shuffle=False), tokenizer, 0)
    kept = prompts.next(2)
    assert [prompt.grader for prompt in kept] == ["math", "code"]
    assert kept[0].gold == "2"
    assert json.loads(kept[1].gold)["outputs"] == ["2\n"]
    assert "In Python." in tokenizer.decode(kept[1].token_ids)
    faults = ("missing_column", "unknown_grader", "bad_messages", "wrong_type")
    assert counted(prompts) == (2, dict.fromkeys(faults, 1))


@pytest.mark.parametrize("columns", [("problem", "answer", "id"), ("question", "answer"), ("problem_idx",)])
def test_aime_files_of_every_kind_give_integers(tokenizer, tmp_path, columns):
    if columns == ("problem_idx",):
        table = pa.table({"problem_idx": [1, 2], "problem": ["p", "q"], "answer": [70, 5]})
        pq.write_table(table, tmp_path / "test.parquet")
    else:
        for number, answer in enumerate(["070", "5"]):
            record = dict.fromkeys(columns, f"text {number}") | {"answer": answer}
            (tmp_path / f"aime2025-{number}.jsonl").write_text(json.dumps(record) + "\n")
    for reader in BENCHMARKS if columns == ("problem_idx",) else ("aime25",):
        benchmark = BenchmarkRecipe(name="b", reader=reader, path=str(tmp_path))
        prompts = read_benchmark(benchmark, recipe(source(tmp_path)), tokenizer)
        assert [prompt.gold for prompt in prompts] == ["70", "5"]
        assert prompts[0].source == "b"


@pytest.mark.parametrize(("answer", "gold"), [
    (r"336^\circ", "336"),  # II-5 of 2025
    ("336°", "336"),
    (r"$70^{\circ}$", "70"),
    (r"\boxed{070}", "70"),
    ("70 degrees", "70"),
    (r"81\text{ cm}^2", "81"),
    (70.0, "70"),
    ("000", "0"),
    ("70.", "70"),
    ("1,000", None),
    ("-5", None),
    ("70.5", None),
    (r"\frac{1}{2}", None),
    ("70, 71", None),
    ("60_8", None),
    (r"50\%", None),
    ("", None),
])  # fmt: skip
def test_an_aime_gold_may_have_a_unit_or_zeros_but_no_other_value(tmp_path, answer, gold):
    file, tally = tmp_path / "aime.jsonl", Tally()
    file.write_text(json.dumps({"problem": "p", "answer": answer}) + "\n")
    assert [problem.gold for problem in read_aime(file, tally)] == ([gold] if gold else [])
    assert tally.dropped == ({} if gold else {"not_an_aime_answer" if answer else "empty_field": 1})


def test_a_benchmark_with_an_unusable_row_is_refused(tokenizer, tmp_path):
    file = tmp_path / "aime.jsonl"
    file.write_text('{"problem": "a", "answer": "1"}\n{"problem": "b", "answer": "x+1"}\n')
    benchmark = BenchmarkRecipe(name="aime25", reader="aime25", path=str(file))
    with pytest.raises(ValueError, match="not_an_aime_answer"):
        read_benchmark(benchmark, recipe(source(file)), tokenizer)


def test_a_benchmark_with_long_questions_names_the_longest_and_the_key_to_raise(tokenizer, tmp_path):
    rows = [*sums(3), ("Long " * 100, "5", 1.0), ("Longer " * 200, "5", 1.0)]
    file = write_deepmath(tmp_path / "test.parquet", rows)
    benchmark, data = BenchmarkRecipe(name="b", path=str(file)), recipe(source(file), max_prompt_length=100)
    expected = r"benchmark b: .*2 of 5 questions .*test.parquet#4 has \d+ tokens: set data"
    with pytest.raises(ValueError, match=expected) as long:
        read_benchmark(benchmark, data, tokenizer)
    key, _, value = str(long.value).rpartition("set ")[2].partition("=")
    assert key == "data.max_prompt_length"
    enough = data.model_copy(update={"max_prompt_length": int(value)})
    assert len(read_benchmark(benchmark, enough, tokenizer)) == 5


@pytest.mark.parametrize(("given", "added"), [
    ({"instruction": ""}, ""), ({"instruction": None}, "Box it."), ({}, "Box it."),
])  # fmt: skip
def test_an_empty_instruction_replaces_the_recipes(tokenizer, tmp_path, given, added):
    read = rows_in(tmp_path, [{"question": "What is 1 + 1?", "answer": 2} | given])
    (prompt,) = PromptSource(recipe(read, instruction="Box it."), tokenizer, 0).next(1)
    assert ("Box it." in tokenizer.decode(prompt.token_ids)) == bool(added)


def held_out(path: Path, name: str = "b", **keys) -> BenchmarkRecipe:
    return BenchmarkRecipe(name=name, path=str(path), **keys)


def test_benchmark_questions_in_the_training_data_are_counted(tokenizer, tmp_path):
    """Copies may differ in white space and formula marks; a sum of other numbers is another question."""
    formulas = [("Compute $1 + 2$.", "3", 1.0), ("Compute $1-2$.", "-1", 1.0)]
    train = write_deepmath(tmp_path / "train.parquet", [*sums(20), ("Compute  \\(1+2\\).", "3", 1.0)])
    test = write_deepmath(tmp_path / "test.parquet", [*sums(4, start=18), *formulas])
    clean = write_deepmath(tmp_path / "clean.parquet", sums(4, start=50))
    prompts = PromptSource(recipe(source(train, "mixed"), source(clean, "clean")), tokenizer, 0)
    (found,) = prompts.overlaps([held_out(test)])
    assert found.startswith("data source mixed holds 3 of the 6 questions of benchmark b: ")
    assert prompts.overlaps([held_out(clean, limit=2)]) == [
        "data source clean holds 2 of the 2 questions of benchmark b: its accuracy is one of training; "
        "leave them out (data.sources[].exclude)"
    ]
    assert prompts.overlaps([]) == []


def test_benchmarks_are_compared_whole_and_in_part(tmp_path):
    """Most words of a question in another wording count; the end that AIME's problems share does not."""
    end = "can be written as m/n, where m and n are relatively prime positive integers. Find m + n."
    asked = "A rabbit on a circle of ten stones jumps by two or three stones, and the chance to return " + end
    train = [f"A box holds red and blue balls, and the chance of two red balls {end}", f"Hard: {asked}"]
    data = recipe(rows_in(tmp_path, [{"question": q, "answer": 1} for q in train], "train.jsonl"))
    questions = (asked, f"Fair dice are thrown until their sum is odd, and the chance {end}")
    test = rows_in(tmp_path, [{"problem": q, "answer": 1} for q in questions], "test.jsonl")
    (found,) = read_overlaps(data, [held_out(Path(test.path), reader="aime26")])
    assert "holds 0 of the 2 questions of benchmark b and most words of 1 more: " in found


def test_excluded_questions_are_not_counted_as_overlap(tmp_path):
    train = write_deepmath(tmp_path / "train" / "a.parquet", sums(3))
    copy = tmp_path / "test.parquet"
    copy.write_bytes(train.read_bytes())
    data = recipe(source(train.parent))
    (found,) = read_overlaps(data, [held_out(copy)])
    assert "holds 3 of the 3" in found
    excluded = tmp_path / "exclude.txt"
    excluded.write_text("".join(f"{question}\n" for question, *_ in sums(2)))
    (found,) = read_overlaps(recipe(source(train.parent, exclude=str(excluded))), [held_out(copy)])
    assert "holds 1 of the 3" in found
    assert read_overlaps(recipe(source(train, exclude=str(excluded))), [held_out(copy, limit=2)]) == []


def test_benchmark_limit_takes_the_first(tokenizer, tmp_path):
    file = write_deepmath(tmp_path / "test.parquet", sums(10))
    benchmark = BenchmarkRecipe(name="held-out", path=str(file), limit=4)
    prompts = read_benchmark(benchmark, recipe(source(file)), tokenizer)
    assert [prompt.question for prompt in prompts] == [row[0] for row in sums(4)]
