"""Agents of others: real OpenAI clients against the endpoint, in a real harvest."""

import json
import os
import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter

import openai
import pytest

from megatron_eqlen.environments.endpoint import LONGEST, Endpoint, Episode, as_message
from megatron_eqlen.environments.load import conversations
from megatron_eqlen.environments.tool_calls import ToolCall, as_text
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.recipe import EnvironmentRecipe
from megatron_eqlen.record.partial import HarvestProgress, PartialRollout
from megatron_eqlen.types import Delta
from recipes.verifiers_tasks import VerifiersTask
from tests.kit import ROOT, verifiers_stub
from tests.kit.length_bias import QUESTION
from tests.kit.processes import within
from tests.pure.test_environments import TEMPLATES, tokenizer_with
from tests.pure.test_forks import recipe

HERE = "tests.pure.test_agents"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = 'so\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
INDEPENDENT = recipe(sampling="independent", objective="grpo")
SINGLE_PAIRS = recipe(sampling="equal_length", objective="grpo", max_pairs=1)
FIRST = [{"role": "user", "content": "q"}]


def client(base_url, **options):
    return openai.OpenAI(base_url=base_url, api_key="any", **options)


def ask(base_url, messages, **options):
    return client(base_url).chat.completions.create(model="policy", messages=messages, **options).choices[0]


def talks(base_url, prompt, seed, turns=2, word="more"):
    """Hands each turn back as it came, says ``word`` until there are ``turns``, and rewards the length."""
    messages = [*FIRST]
    for turn in range(turns):
        messages += [{"role": "user", "content": word}] if turn else []
        messages.append(ask(base_url, messages, temperature=0.3).message)
    return len(messages) / 10


def varies(base_url, prompt, seed):
    """Talks for two turns and for three, with a longer word, in turn."""
    varies.count += 1
    return talks(base_url, prompt, seed, *((3, "more of it, and more") if varies.count % 2 else (2, "more")))


varies.count = 0


def answers_out_of_order(order):
    """Return what a template is told of two tools' results, which come in ``order`` (None: without ids)."""
    episode, tools = Episode(), [{"function": {"name": name}} for name in ("first", "second")]
    body = {"messages": [{"role": "user", "content": "q"}], "tools": tools}
    told = []

    def ask():
        message = episode.ask(body)
        ids = [call["id"] for call in message["tool_calls"]]
        results = [
            {"role": "tool", "content": str(n)} | ({"tool_call_id": ids[n]} if order else {})
            for n in order or (0, 1)
        ]
        told.append([*body["messages"], message, *results])

    thread = threading.Thread(target=ask)
    thread.start()
    assert episode.asked() == body["messages"]
    episode.answer("".join(as_text(ToolCall(name, {})) for name in ("first", "second")))
    thread.join()
    threading.Thread(target=lambda: episode.ask(body | {"messages": told[0]}), daemon=True).start()
    found = episode.asked()
    episode.answer("done")
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0), None])
def test_a_tools_result_has_the_name_of_the_call_that_it_answers(order):
    names = ["first", "second"]
    expected = [{"role": "tool", "content": str(n), "name": names[n]} for n in order or (0, 1)]
    assert answers_out_of_order(order) == expected


def test_arguments_that_nest_without_end_are_other_ones_and_an_id_that_is_no_text_is_one():
    episode, called = Episode(), as_message(CALL, 0, tools=True)
    episode.turns.append(called)
    assert episode.ask({"messages": FIRST, "tools": [TOOL]}) == called
    other = json.loads(json.dumps(called))
    other["tool_calls"][0]["function"]["arguments"] = "[" * 100_000
    answer = {"role": "tool", "content": "7", "tool_call_id": {"id": []}}
    with pytest.raises(ValueError, match=r"messages\[1\]: expected a conversation that goes on as it was"):
        episode.ask({"messages": [*FIRST, other, answer], "tools": [TOOL]})
    body = {"messages": [*FIRST, called, answer], "tools": [TOOL]}
    threading.Thread(target=lambda: episode.ask(body), daemon=True).start()
    assert episode.asked() == [{"role": "tool", "content": "7", "name": "add"}]


async def calls(base_url, prompt, seed):
    """Asynchronous, with tools, and a stream."""
    session = openai.AsyncOpenAI(base_url=base_url, api_key="any")
    reply = await session.chat.completions.create(model="m", messages=FIRST, tools=[TOOL])
    turn = reply.choices[0]
    assert turn.finish_reason == "tool_calls"
    (call,) = turn.message.tool_calls
    assert reply.usage.total_tokens == 0, "clients that add it up find a number"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    results = [{"role": "tool", "tool_call_id": call.id, "content": word} for word in ("one", "two")]
    messages = [*FIRST, turn.message, *results]
    stream = await session.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True)
    chunks = [chunk async for chunk in stream]
    return 1.0 if chunks[0].choices[0].delta.tool_calls else 0.5


def retries(base_url, prompt, seed):
    """Gives up an answer before it is there, and asks again; also after it."""
    impatient = client(base_url, timeout=0.1, max_retries=50)
    first = impatient.chat.completions.create(model="m", messages=FIRST).choices[0].message
    return float(first == ask(base_url, FIRST).message)


def edits(base_url, prompt, seed):
    """Changes history, asks twice at once, asks for what there is not; then goes on as it should."""
    turn = ask(base_url, FIRST).message
    more = {"role": "user", "content": "more"}
    edited = {"role": "assistant", "content": "I never said that."}
    bad = [
        [*FIRST, edited, more],
        [{"role": "system", "content": "Be brief."}, *FIRST, turn, more],
        [{"role": "user", "content": "another"}],
        [*FIRST, turn, edited, more],
        [*FIRST, turn],
        [*FIRST, {"role": "assistant", "tool_calls": [{"id": "call_0"}]}, more],
    ]
    for messages in bad:
        with pytest.raises(openai.BadRequestError, match="messages"):
            ask(base_url, messages)
    with pytest.raises(openai.BadRequestError, match="n: expected 1"):
        ask(base_url, FIRST, n=2)

    def answered(word):
        try:
            ask(base_url, [*FIRST, turn, {"role": "user", "content": word}])
        except openai.BadRequestError:
            return 0.0
        return 1.0

    with ThreadPoolExecutor() as pool:
        return sum(pool.map(answered, ["more", "other"]))


def insists(base_url, prompt, seed):
    ask(base_url, FIRST)
    ask(base_url, [{"role": "user", "content": "another"}])


def crashes(base_url, prompt, seed):
    ask(base_url, FIRST)
    raise OSError("disk full")


def hangs(base_url, prompt, seed):
    ask(base_url, FIRST)
    time.sleep(5)


def idles(base_url, prompt, seed):
    return 1.0


def strays(base_url, prompt, seed):
    ask(base_url, [{"role": "system", "content": "Be brief."}, *FIRST])


def endless(base_url, prompt, seed):
    messages = [*FIRST]
    try:
        while True:
            messages += [ask(base_url, messages).message, {"role": "user", "content": "more"}]
    except openai.BadRequestError as error:
        return 0.25 if "the response has ended" in str(error) else 0.5


@dataclass
class Speaking:
    """An engine that gives a request's next turn, a few tokens a step."""

    tokenizer: object
    text: str
    seconds: float = 0.0
    policy_version, max_model_len, max_num_seqs, vocab_size = 0, 999, 99, 999
    left: dict = field(default_factory=dict)
    drawn: list = field(default_factory=list)

    def submit(self, request):
        turn = [
            *self.tokenizer.encode(f"{self.text} {request.seed % 97}" if "{" not in self.text else self.text)
        ]
        self.left[request.request_id] = [*turn, *self.tokenizer.encode("<|im_end|>")][: request.max_tokens]
        self.drawn.append(self.left[request.request_id])

    def step(self):
        time.sleep(self.seconds)
        return [self._next(name) for name in list(self.left)]

    def _next(self, name):
        tokens, self.left[name] = self.left[name][:7], self.left[name][7:]
        if not self.left[name]:
            del self.left[name]
        return Delta(name, tokens, {"logprobs": [0.0] * len(tokens)})

    def abort(self, request_ids):
        for name in request_ids:
            self.left.pop(name, None)

    def metrics(self):
        return {}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_with(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["plain"])


@pytest.fixture(autouse=True)
def endpoint():
    yield
    VerifiersTask.end()


def played(tokenizer, function, count=1, progress=None, engine=None, settings=INDEPENDENT, **section):
    """Return rollouts, metrics and the engine of ``count`` prompts; each has two completions or tracks."""
    limits = {"timeout": 20.0, "max_given_tokens": 512}
    agent = {"name": "agent", "options": {"function": f"{HERE}:{function}"} | section.pop("tools", {})}
    rollout = settings.rollout.model_copy(update={"max_response_length": 300})
    section = EnvironmentRecipe(**agent | limits | section)
    settings = settings.model_copy(update={"environment": section, "rollout": rollout})
    ids = tokenizer.encode(tokenizer.render_chat(FIRST))
    prompts = [replace(QUESTION, prompt_id=f"q{number}", token_ids=ids) for number in range(count)]
    engine = engine or Speaking(tokenizer, "hm\n</think>\n\n I say")
    plan = HarvestPlan(
        prompts, settings, tokenizer.eos_token_ids, seed=0, progress=progress or HarvestProgress(),
        conversations=conversations(settings, tokenizer),
    )  # fmt: skip
    rollouts, metrics = harvest(engine, plan)
    return rollouts, metrics, engine


def generated(rollouts):
    """Return the generated turns of all parts."""
    turns = []
    for part in (part for rollout in rollouts for part in rollout.parts):
        tokens = zip(part.tokens.is_generated, part.token_ids.tolist(), strict=True)
        turns += [[token for _, token in turn] for own, turn in groupby(tokens, itemgetter(0)) if own]
    return sorted(turns)


def test_what_is_trained_is_what_was_generated_and_the_agent_reads_it_without_thinking(tokenizer, caplog):
    rollouts, metrics, engine = played(tokenizer, "talks", count=3)
    assert generated(rollouts) == sorted(engine.drawn)
    assert (len(engine.drawn), metrics["environment/turns"]) == (12, 12)
    for rollout in rollouts:
        for part in rollout.parts:
            assert (part.grade.reward, part.finish_reason) == (0.4, "stop")
            said = tokenizer.backend.decode(part.token_ids)
            assert said.count("<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nhm") == 1
            assert said.count("I say") == 2  # no turn is given back
    assert caplog.text.count("requests of agents: temperature: ignored, the recipe decides") == 1


def test_a_single_pair_of_an_agent_has_as_many_generated_tokens_on_both_sides(tokenizer):
    (stream,), _, _ = played(tokenizer, "varies", settings=SINGLE_PAIRS)
    assert not stream.unscored()
    first, second = (part.tokens for part in stream.parts[:2])
    assert [part.role for part in stream.parts[:2]] == ["a", "b"]
    assert first.generated == second.generated < len(first) < len(second)
    assert stream.parts[0].grade.reward == pytest.approx(0.4)


def test_an_asynchronous_agent_gets_calls_of_tools_and_answers_several_at_once(tokenizer, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    tools = {"tools": str(tmp_path / "tools.json")}
    rollouts, _, engine = played(tokenizer, "calls", tools=tools, engine=Speaking(tokenizer, CALL))
    assert generated(rollouts) == sorted(engine.drawn)
    for part in rollouts[0].parts:
        assert part.grade.reward == 1.0
        assert "tool\none<|im_end|>\n<|im_start|>tool\ntwo" in tokenizer.backend.decode(part.token_ids)


def test_a_request_that_is_sent_again_gets_the_same_turn(tokenizer):
    engine = Speaking(tokenizer, "a turn that takes longer than a client waits", seconds=0.1)
    rollouts, metrics, engine = played(tokenizer, "retries", engine=engine)
    assert [part.grade.reward for part in rollouts[0].parts] == [1.0, 1.0]
    assert (len(engine.drawn), metrics["environment/refused"]) == (2, 0)


def test_a_request_that_does_not_continue_the_conversation_is_refused_and_counted(tokenizer):
    engine = Speaking(tokenizer, "hm", seconds=0.05)
    rollouts, metrics, engine = played(tokenizer, "edits", engine=engine)
    assert [part.grade.reward for part in rollouts[0].parts] == [1.0, 1.0]
    assert generated(rollouts) == sorted(engine.drawn)
    assert metrics["environment/refused"] == 2 * 8


FAILURES = {
    "insists": r"messages\[0\]: expected a conversation that goes on as it was",
    "crashes": "disk full",
    "hangs": r"no answer in 1 s \(environment.timeout\)",
    "idles": "the agent ended before its first request",
    "strays": "first request: expected the prompt, '.*user.*found '.*Be brief",
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_agent_that_fails_drops_its_rollout(tokenizer, name, caplog):
    (rollout,), *_ = played(tokenizer, name, timeout=1.0 if name == "hangs" else 20.0)
    assert rollout.unscored() == [*rollout.parts]
    assert re.search(FAILURES[name], caplog.text, re.DOTALL)


@pytest.mark.parametrize("name", ["endless", "talks"])
def test_an_agent_says_what_a_response_is_worth_that_a_limit_ends(tokenizer, name):
    """One that does not, has reward 0."""
    rollouts, metrics, _ = played(tokenizer, name, max_turns=1)
    assert [part.grade.reward for part in rollouts[0].parts] == [0.25 if name == "endless" else 0.0] * 2
    assert metrics["environment/cut"] == 2


def test_an_agent_goes_on_where_its_rollout_was_left(tokenizer):
    (whole,), _, _ = played(tokenizer, "talks")
    tracks = {part.number: part.tokens for part in whole.parts}
    cut = {number: tokens[: len(tokens) - 3] for number, tokens in tracks.items()}
    prompt = replace(QUESTION, prompt_id="q0", token_ids=tokenizer.encode(tokenizer.render_chat(FIRST)))

    class Finishing(Speaking):
        def submit(self, request):
            known = tracks[int(request.request_id.split("/")[2].split(":")[0])].token_ids.tolist()
            self.left[request.request_id] = known[len(request.token_ids) - len(prompt.token_ids) :]

    progress = HarvestProgress(partial=[PartialRollout(prompt, 0, cut)])
    (again,), metrics, _ = played(tokenizer, "talks", progress=progress, engine=Finishing(tokenizer, ""))
    assert [p.token_ids.tolist() for p in again.parts] == [p.token_ids.tolist() for p in whole.parts]
    assert [part.grade.reward for part in again.parts] == [0.4, 0.4]
    assert metrics["environment/replays"] == 2
    progress = HarvestProgress(partial=[PartialRollout(prompt, 0, cut)])
    (rollout,), *_ = played(tokenizer, "crashes", progress=progress, engine=Finishing(tokenizer, ""))
    assert rollout.unscored() == [*rollout.parts], "its requests differ"


PLAYS = {
    "plays": ("0.5", "{}", None),
    "fails": ("fails", "{}", "its environment failed: .*verifiers: ValueError.*no task"),
    "dies": ("dies", "{}", "^verifiers: the worker ended with status 3"),
    "does not start": ("0.5", '{"id": 1}', "^verifiers: the worker ended with status 4"),
}


@pytest.mark.parametrize("name", PLAYS)
def test_a_worker_in_another_virtual_environment_plays_episodes(tokenizer, tmp_path, monkeypatch, name):
    task, config, message = PLAYS[name]
    verifiers_stub.write(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("tests.pure.test_agents.QUESTION", replace(QUESTION, gold=json.dumps(task)))
    options = {"python": sys.executable, "config": config}
    ends = name in ("dies", "does not start")
    with pytest.raises(RuntimeError, match=message) if ends else nullcontext():
        (rollout,), *_ = played(tokenizer, "", name="recipes.verifiers_tasks:VerifiersTask", options=options)
        if message:
            assert all(re.search(message, part.grade.detail) for part in rollout.parts)
        else:
            assert [part.grade.reward for part in rollout.parts] == [0.5, 0.5]


def test_the_agent_of_the_page_plays(tokenizer, monkeypatch):
    *_, code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    monkeypatch.setitem(globals(), "play", names["play"])
    monkeypatch.setattr("tests.pure.test_agents.QUESTION", replace(QUESTION, question="q", gold="say 1"))
    rollouts, metrics, _ = played(tokenizer, "play")
    assert [part.grade.reward for part in rollouts[0].parts] == [0.0, 0.0]
    assert metrics["environment/turns"] == 6


def test_an_agent_whose_arguments_do_not_fit_is_refused(tokenizer):
    options = {"function": f"{HERE}:talks", "turn": 3}
    with pytest.raises(ValueError, match=r"talks.base_url, prompt, seed, .* keyword argument 'turn'"):
        played(tokenizer, "talks", options=options)


@pytest.mark.parametrize("said", ['{"tools": []}', '["add"]', '[{"name": "add", "inputSchema": {}}]'])
def test_schemas_of_another_form_are_refused_by_file(tokenizer, tmp_path, said):
    (tmp_path / "tools.json").write_text(said)
    found = re.escape(str(json.loads(said)).strip("[]"))
    with pytest.raises(ValueError, match=f"tools.json: expected a list as .*, found '?{found}"):
        played(tokenizer, "calls", tools={"tools": str(tmp_path / "tools.json")})


def test_text_that_is_no_call_stays_text():
    said = {"role": "assistant", "content": "b <tool_call>{</tool_call>", "reasoning_content": "a"}
    assert as_message("a\n</think>\n\nb <tool_call>{</tool_call>", 0, True) == said


@pytest.fixture
def opened():
    """Yield an endpoint with an episode that nobody plays, its path and the function that speaks to it."""
    endpoint = Endpoint()
    port, path = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/.*)", endpoint.open(Episode())).groups()

    def status(head: str, body: bytes = b"", path: str = f"{path}/chat/completions") -> int:
        """Send a request, and return its status; the answer must come though the body may not."""
        with socket.create_connection(("127.0.0.1", int(port)), timeout=10) as link:
            link.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
            return int(link.makefile("rb").readline().split()[1])

    yield endpoint, int(port), status
    endpoint.close()


NO_REQUESTS = {
    "deep": b"[" * 100_000,
    "no text": b"\xff",
    "no JSON": b"{",
    "half a surrogate pair": rb'{"messages": [], "\uDfff": 1}',
    "not an object": b"[]",
    "a number as content": b'{"messages": [{"role": "user", "content": 5}]}',
    "a number as tools": b'{"messages": [], "tools": 5}',
    "no calls": b'{"messages": [{"role": "assistant", "tool_calls": 5}]}',
}


@pytest.mark.parametrize("name", NO_REQUESTS)
def test_what_is_no_request_is_refused_without_a_traceback(opened, name, capfd):
    _, _, status = opened
    assert status(f"Content-Length: {len(NO_REQUESTS[name])}", NO_REQUESTS[name]) == 400
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("length", ["x", "-1", "", "1_0", "٣", str(LONGEST + 1), "9" * 5000])
def test_a_body_whose_length_is_unknown_or_too_long_is_not_read(opened, length, capfd):
    _, _, status = opened
    assert status(f"Content-Length: {length}") == 400
    assert status("Transfer-Encoding: chunked") == 400
    assert capfd.readouterr().err == ""


def test_an_agent_may_ask_which_models_there_are(opened):
    endpoint, port, _ = opened
    (key,) = endpoint.episodes
    models = client(f"http://127.0.0.1:{port}/rollout/{key}/v1").models
    assert [model.id for model in models.list()] == ["policy"]
    with pytest.raises(openai.NotFoundError, match="v1/models, found"):
        models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="the rollout has ended"):
        client(f"http://127.0.0.1:{port}/rollout/x/v1").models.list()


def test_the_body_of_a_question_for_models_is_no_request(opened):
    endpoint, port, _ = opened
    (key,) = endpoint.episodes
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = f"GET /rollout/{key}/v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 27\r\n\r\n"
        connection.sendall(head.encode() + b"DELETE / HTTP/1.1\r\nA: b\r\n\r\n")
        answers = connection.makefile("rb").read()
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert answers.count(b"HTTP/1.1") == 1


def test_who_has_no_key_is_refused_before_the_body_and_keeps_no_thread(opened, monkeypatch):
    endpoint, port, status = opened
    assert status("Content-Length: 400000000", path="/rollout/x/v1/chat/completions") == 404
    monkeypatch.setattr("megatron_eqlen.environments.endpoint.STRANGERS", 8)
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    assert within(20, lambda: len(endpoint.strangers) == 8 and threading.active_count() <= before + 9)
    assert status("Content-Length: 2", b"[]") == 400, "an agent is answered beside them"
    for link in silent:
        link.close()
    assert within(20, lambda: threading.active_count() <= before)
