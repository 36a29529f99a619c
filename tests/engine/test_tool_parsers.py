"""Calls of tools in the form of the model's family, which vLLM's parsers read."""

import json

import pytest

from megatron_eqlen.environments.call_forms import reader
from megatron_eqlen.environments.tool_calls import ToolEnvironment, tool
from megatron_eqlen.hf.tokenizer import load_tokenizer
from tools.tokenizer_maker import write_hf_tokenizer

ARGUMENTS = "{% for k, v in call.function.arguments.items() %}"
FORMS = {
    "Qwen3.5": (
        "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
        + ARGUMENTS
        + "{{ '<parameter=' + k + '>\n' + v | string + '\n</parameter>\n' }}{% endfor %}"
        "{{ '</function>\n</tool_call>' }}",
        "<tool_call>\n<function=add>\n<parameter=numbers>\n[3, 4]\n</parameter>\n<parameter=unit>\n12\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "GLM-4.5": (
        "{{ '<tool_call>' + call.function.name + '\n' }}"
        + ARGUMENTS
        + "{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' + v | string + '</arg_value>\n' }}{% endfor %}"
        "{{ '</tool_call>' }}",
        "<tool_call>add\n<arg_key>numbers</arg_key>\n<arg_value>[3, 4]</arg_value>\n<arg_key>unit</arg_key>\n"
        "<arg_value>12</arg_value>\n</tool_call>",
    ),
    "Llama 4": (  # pythonic
        "{{ '[' + call.function.name + '(' }}"
        + ARGUMENTS
        + "{{ k + '=' + v | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ')]' }}",
        '[add(numbers=[3, 4], unit="12")]',
    ),
    "Kimi K2": (
        "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
        "{{ call.function.arguments | tojson }}{{ '<|tool_call_end|><|tool_calls_section_end|>' }}",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:5<|tool_call_argument_begin|>"
        '{"numbers": [3, 4], "unit": "12"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "Qwen3": (
        "{{ '<tool_call>"
        "\n' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
        "{{ '\n</tool_call>' }}",
        '<tool_call>{"name": "add", "arguments": {"numbers": [3, 4], "unit": "12"}}</tool_call>',
    ),
}
TEMPLATE = """{%% for t in tools or [] %%}{{ t | tojson }}{%% endfor %%}{%% for m in messages %%}
{{- '<|im_start|>' + m.role + '\n' + m.content }}{%% for call in m.tool_calls or [] %%}%s{%% endfor %%}
{{- '<|im_end|>\n' }}{%% endfor %%}{%% if add_generation_prompt %%}
{{- '<|im_start|>assistant\n%s' }}{%% endif %%}
"""


class Adder(ToolEnvironment):
    @tool
    def add(self, numbers: list[int], unit: str) -> str:
        """Add numbers."""
        return f"{sum(numbers)} {unit}"


def tokenizer_of(folder, form, opens=""):
    write_hf_tokenizer(folder, ["again 7"])
    (folder / "chat_template.jinja").write_text(TEMPLATE % (form, opens))
    return load_tokenizer(folder)


@pytest.mark.parametrize("family", FORMS)
def test_calls_are_read_in_the_form_that_the_template_writes(family, tmp_path):
    form, said = FORMS[family]
    tokenizer = tokenizer_of(tmp_path, form)
    read = reader(tokenizer, Adder.tools, None)

    def answer(text):
        return Adder(None, 0).step(read(tokenizer.encode(text)))

    alone = answer(f"<think>\n{said}\n</think>\n{said}")
    assert (alone.content, alone.keys["name"]) == ("7 12", "add")
    assert alone.keys.get("tool_call_id") == ("functions.add:5" if family == "Kimi K2" else None)
    both = f"{said[:-1]}, {said[1:]}" if family == "Llama 4" else f"{said}\n{said}"
    assert [each["name"] for each in answer(both).messages] == ["add", "add"]
    assert answer(f"<think>\n{said}").done
    assert all(answer(text).done for text in ("It is 7.", "[7, 8]", "It is [f(7)]."))
    broken = answer(said.replace("add", "subtract").replace("[3, 4]", "3, {"))
    assert broken.content.startswith("error: ")
    assert json.loads(read(tokenizer.encode(said)).partition("<tool_call>")[2].partition("</tool")[0])


@pytest.mark.parametrize(("form", "said"), [
    ("{{ '<|function_call|>' }}" + FORMS["Qwen3"][0].split("\n' }}")[1].split("{{ '\n")[0],  # GigaChat 3.1
     '<|function_call|>{"name": "add", "arguments": {"numbers": [3, 4], "unit": "<tool_call>"}}'),
    ("{{ '<|python_start|>' + m.content + '<|python_end|>' }}"
     "{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}",  # Llama 4
     '<|python_start|>So {1}.<|python_end|>{"name": "add", "parameters": {"numbers": [3, 4], "unit": "<tool_call>"}}'),  # noqa: E501
])  # fmt: skip
def test_a_call_alone_is_read_behind_what_the_template_writes_before_it(form, said, tmp_path):
    tokenizer = tokenizer_of(tmp_path, form)
    read = reader(tokenizer, Adder.tools, None)
    assert Adder(None, 0).step(read(tokenizer.encode(said))).content == "7 <tool_call>"
    call = said[said.index('{"') :]
    if "parameters" in said:  # Llama's stand one behind the other
        assert len(Adder(None, 0).step(read(tokenizer.encode(f"{said}{call};\n{call}"))).messages) == 3


def test_a_call_in_thinking_that_the_prompt_begins_is_not_run(tmp_path):
    form, said = FORMS["Qwen3"]
    tokenizer = tokenizer_of(tmp_path, form, opens="<think>\\n")
    read = reader(tokenizer, Adder.tools, None)
    assert Adder(None, 0).step(read(tokenizer.encode(said))).done
    assert not Adder(None, 0).step(read(tokenizer.encode(f"</think>{said}"))).done


@pytest.mark.parametrize(("form", "found"), [
    ("{{ '!' + call.function.name + '!' }}", r"in a form that vLLM parses, found .*!find_town!"),
    ("{{ '<|im_end|>' }}" + FORMS["Qwen3"][0], "found '' before the turn's end"),  # GigaChat 3
    ("", "found one that lists tools alone"),  # LFM2, Granite 3.3
    ("{{ call.function.missing.name }}", "lists tools alone.*template refuses the roles user, assistant"),
])  # fmt: skip
def test_a_template_with_calls_in_a_form_that_nothing_reads_is_refused(tmp_path, form, found):
    tokenizer = tokenizer_of(tmp_path, form)
    with pytest.raises(ValueError, match=found):
        reader(tokenizer, Adder.tools, None)
