"""Rows of chats as demonstrations: which tokens are trained, and which rows and keys are refused."""

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_eqlen.data.demonstrations import training_prompts
from megatron_eqlen.data.layouts import find_layout
from megatron_eqlen.data.rows import DEMONSTRATION
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.job import Job
from megatron_eqlen.recipe import RecipeError
from tests.kit.demonstrations import CHATS, drawn, messages, supervised, write_rows, write_tokenizer
from tests.kit.sentencepiece_maker import write_llama_tokenizer

USER, REPLY = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello!"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    return path


def test_the_assistants_turns_are_trained_to_their_end_and_nothing_else(folder, tmp_path):
    """Transformers' mask of the assistant's tokens, from marks in the template, is the reference."""
    plain = [chat for chat in CHATS if "<|" not in str(chat)]
    write_rows(tmp_path / "rows.jsonl", [{"messages": messages(chat)} for chat in plain])
    reference = AutoTokenizer.from_pretrained(folder)
    for chat, row in zip(plain, drawn(supervised(folder, tmp_path / "rows.jsonl"), len(plain)), strict=True):
        options = {"return_assistant_tokens_mask": True, "return_dict": True}
        expected = reference.apply_chat_template(messages(chat), **options)
        ids = [*row.token_ids, *row.response.token_ids.tolist()]
        assert ids == expected["input_ids"][: len(ids)], "after the last turn's end nothing is left"
        trained = [False] * len(row.token_ids) + row.response.is_generated.tolist()
        assert trained == [bool(flag) for flag in expected["assistant_masks"][: len(ids)]]
        assert sum(expected["assistant_masks"]) == row.response.generated


@pytest.mark.parametrize("old", [False, True])
def test_turns_of_a_tokenizer_that_begins_texts_with_a_space_are_those_of_the_whole_chat(tmp_path, old):
    """Each of the later pieces of a chat begins where a text goes on."""
    folder = tmp_path / "model"
    write_llama_tokenizer(folder, [content for chat in CHATS for _, content in chat] * 4, old)
    said = "m.content + '<|im_end|>' if m.role == 'assistant' else '[I]' + m.content + '[/I]'"
    template = "{% for m in messages %}{{ " + said + " }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    chat = messages([*CHATS[1][:2], ("assistant", " Hello!"), *CHATS[1][3:]])
    write_rows(tmp_path / "rows.jsonl", [{"messages": chat}])
    (row,) = drawn(supervised(folder, tmp_path / "rows.jsonl"), 1)
    tokenizer = load_tokenizer(folder)
    assert row.token_ids == tokenizer.encode(tokenizer.render_chat(chat[:2]))
    whole = tokenizer.backend.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert [*row.token_ids, *row.response.token_ids.tolist()] == whole
    trained = row.response.token_ids[row.response.is_generated]
    assert tokenizer.backend.decode(trained) == "Hello!<|im_end|>2<|im_end|>"


def test_a_turn_ends_where_the_generation_config_says_and_never_within_its_text(folder, tmp_path):
    """The tokenizer's configuration names another token as the end; the system prompt is inserted."""
    tokenizer, chat = load_tokenizer(folder), CHATS[1]
    write_rows(tmp_path / "rows.jsonl", [{"messages": messages(chat)}, {"messages": messages(CHATS[0])}])
    row, other = drawn(supervised(folder, tmp_path / "rows.jsonl"), 2)
    (end,) = tokenizer.eos_token_ids
    assert tokenizer.pieces_of([end]) == ["<|im_end|>"]
    trained = row.response.token_ids[row.response.is_generated].tolist()
    assert [token == end for token in trained].count(True) == 2, "that in the text is text"
    assert row.response.token_ids[-1] == end
    assert "system\nYou are a helpful assistant." in tokenizer.decode(other.token_ids)


QUESTION_AND_ANSWER = {"question": "Hi.", "answer": "Hello!"}


@pytest.mark.parametrize("row", [
    QUESTION_AND_ANSWER,
    {"messages": [USER], "answer": "Hello!"},
    {"messages": [USER, REPLY], "answer": "another"},
    # OpenR1-Math: the bare answer is no response
    {"problem": "Hi.", "solution": "Say it.", "answer": "another", "messages": [USER, REPLY]},
    {"prompt": [USER], "messages": [USER, REPLY]},
    {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello!"}]},
])  # fmt: skip
def test_the_response_is_the_chats_own_before_a_column_of_answers(folder, tmp_path, row):
    write_rows(tmp_path / "rows.jsonl", [row])
    recipe = supervised(folder, tmp_path / "rows.jsonl")
    data = recipe.data.model_copy(update={"instruction_role": "none"})
    (made,) = drawn(recipe.model_copy(update={"data": data}), 1)
    assert load_tokenizer(folder).decode(made.response.token_ids) == "Hello!"


def test_what_is_told_of_a_response_in_a_chat_is_that_nothing_beside_it_is_read():
    row = {"problem": "Hi.", "answer": "another", "messages": [USER, REPLY]}
    told = find_layout(Path("rows.jsonl"), [row], {}, DEMONSTRATION).note
    assert told == "question from messages (a chat, as it stands); not read: answer"


def test_a_column_of_answers_is_refused_where_chats_have_the_response_and_read_where_one_has_none():
    row, columns = {"answer": "another", "messages": [USER, REPLY]}, {"answer": "answer"}
    with pytest.raises(
        ValueError, match="columns: answer: answer has no effect: the chat ends with the resp"
    ):
        find_layout(Path("rows.jsonl"), [row], columns, DEMONSTRATION)
    find_layout(Path("rows.jsonl"), [row, row | {"messages": [USER]}], columns, DEMONSTRATION)


@pytest.mark.parametrize(("row", "fault"), [
    ({"messages": [USER]}, "no_response is .*rows.jsonl#0: expected turns that end with the assistant's"),
    ({"messages": [USER, REPLY, USER]}, "no_response is .*rows.jsonl#0"),
    ({"messages": [REPLY]}, "bad_messages is .*rows.jsonl#0"),
    ({"messages": [USER, REPLY | {"content": "1 " * 200}]},
     "long_row is rows/rows.jsonl#0: 4.. tokens, a row or the model's context has 120"),
    ({"messages": [USER, REPLY, USER, REPLY | {"content": ""}]}, "no_response is .*turn 3: expected words"),
    ({"messages": [USER, REPLY | {"content": " \n"}, USER, REPLY]}, "no_response is .*turn 1: expected"),
    ({"messages": [USER, REPLY | {"reasoning": "so"}]},
     "unrendered_key is rows/rows.jsonl#0: assistant: reasoning: the chat template leaves it out"),
])  # fmt: skip
def test_a_row_that_cannot_be_imitated_is_named(folder, tmp_path, row, fault):
    write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ValueError, match=fault):
        drawn(supervised(folder, tmp_path / "rows.jsonl"), 1)


def test_a_row_longer_than_the_models_context_is_named_however_long_rows_are_packed(folder, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"messages": messages(CHATS[2])}])
    recipe = supervised(folder, tmp_path / "rows.jsonl")
    (row,) = drawn(recipe, 1)
    length = len(row.token_ids) + len(row.response)
    assert length < recipe.packing.max_tokens_per_row
    drawn(recipe, 1, positions=length)
    with pytest.raises(ValueError, match=f"#0: {length} tokens, .*the model's context has {length - 1}"):
        drawn(recipe, 1, positions=length - 1)


@pytest.mark.parametrize(("change", "fault"), [
    (("{{- '<|im_start|>' + message.role", "{{- loop.revindex ~ '<|im_start|>' + message.role"),
     "writes the turns before turn 1 in another way once it follows"),
    (("message.content + '<|im_end|>' }}{%- endgeneration", "message.content }}{%- endgeneration"),
     "ends the assistant's turn with an end of sequence"),
    (("{%- for", "{%- if messages|length > 1 %}{{ raise_exception('one turn') }}{%- endif %}{%- for"),
     "refused_by_template is rows/rows.jsonl#0: .*one turn"),
    (("message.content + '<|im_end|>' }}", "message.content.split('</think>')[-1] + '<|im_end|>' }}"),
     "unrendered_key is rows/rows.jsonl#0: assistant: content: 'So.'"),  # DeepSeek-R1's distilled models'
])  # fmt: skip
def test_a_template_that_changes_turns_is_refused_with_the_row(folder, tmp_path, change, fault):
    write_tokenizer(tmp_path / "model")
    template = (tmp_path / "model/chat_template.jinja").read_text()
    assert change[0] in template
    (tmp_path / "model/chat_template.jinja").write_text(template.replace(*change))
    reply = REPLY | {"content": "<think>So.</think>Hello!"}
    write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, reply]}])
    with pytest.raises(ValueError, match=f"rows.jsonl#0.*{fault}|{fault}"):
        drawn(supervised(tmp_path / "model", tmp_path / "rows.jsonl"), 1)


def test_a_resumed_source_draws_the_same_demonstrations(folder, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"messages": messages(chat)} for chat in CHATS])
    recipe = supervised(folder, tmp_path / "rows.jsonl")
    whole, resumed = (training_prompts(recipe, 10_000, load_tokenizer(folder)) for _ in range(2))
    whole.next(2)
    resumed.load_state_dict(whole.state_dict())
    assert [row.prompt_id for row in resumed.next(4)] == [row.prompt_id for row in whole.next(4)]


BENCHMARK = {"benchmarks": [{"name": "b", "reader": "jsonl", "path": "none"}]}


@pytest.mark.parametrize(("changes", "key"), [
    ({"sampling": "tree"}, "sampling: tree"),
    ({"group_size": 4}, "group_size: 4"),
    ({"loss": {"clip_ratio_low": 0.2}}, "loss.clip_ratio_low: 0.2"),
    ({"loss": {"rollout_is": "token"}}, "loss.rollout_is: token"),
    ({"teacher": {"path": "none"}}, "teacher.path: none"),
    ({"environment": {"name": "python"}}, "environment.name: python"),
    ({"rollout": {"temperature": 1.0}}, "rollout.temperature: 1.0"),
    ({"reward": {"timeout": 2.0}}, "reward.timeout: 2.0"),
    ({"evaluation": BENCHMARK, "packing": {}, "rollout": {"tokens_per_step": 9}},
     "rollout.tokens_per_step: 9"),
    ({"data": {"sources": [{"name": "s", "path": "none", "grader": "math"}]}}, "sources.0.grader: math"),
    ({"packing": {"layout": "expanded"}}, "packing.layout: expanded"),
    ({"report": {"keep_streams": 1}}, "report.keep_streams: 1"),
])  # fmt: skip
def test_a_key_without_effect_is_refused(changes, key):
    with pytest.raises(RecipeError, match=rf"{re.escape(key)} has no effect with objective: sft"):
        supervised("none", "none", **changes)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum-norm", "delta-l"])
def test_an_average_by_the_longest_sampled_response_is_refused(mode):
    """Else ``rollout.max_response_length``, a key of the engine, would scale the loss."""
    with pytest.raises(RecipeError, match=f"{mode} divides by rollout.max_response_length"):
        supervised("none", "none", loss={"loss_agg_mode": mode})


def test_engine_settings_stay_where_benchmarks_are_switched_off():
    recipe = supervised("none", "none", evaluation={"benchmarks": []}, rollout={"temperature": 1.0})
    assert not recipe.generates


def test_a_reader_of_questions_is_refused():
    data = {"sources": [{"name": "s", "reader": "prepared", "path": "none"}]}
    with pytest.raises(RecipeError, match=r"sources.0.reader: objective: sft .*prepared"):
        supervised("none", "none", data=data)


def test_keys_that_act_are_taken():
    changes = {"loss": {"minibatches": 2, "epochs": 2, "kl_coef": 0.1}, "lora": {"rank": 4}}
    data = {"sources": [{"name": "s", "path": "none"}], "prompts_per_step": 4}
    recipe = supervised("none", "none", data=data, **changes)
    assert (recipe.loss.kl_coef, recipe.sampling, Job(recipe).objective.name) == (0.1, "independent", "sft")
    rollout = {"temperature": 0.5, "max_response_length": 8}
    data["max_prompt_length"] = 9
    evaluated = supervised("none", "none", evaluation=BENCHMARK, rollout=rollout, data=data)
    assert (evaluated.trained_temperature, evaluated.rollout.temperature) == (1.0, 0.5)
    assert supervised("none", "none").loss.kl_coef == 0, "no reference weights by default"
