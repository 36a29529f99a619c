"""The gate before a server: who is obeyed, and what is passed on to vLLM."""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from megatron_eqlen.engines.server import __main__ as starter
from megatron_eqlen.engines.server import gate, requests
from megatron_eqlen.engines.server.gate import (
    CALLS,
    DISOWN,
    FINISH,
    KEY,
    LONGEST,
    OWN,
    OWNED,
    PAUSE,
    RESUME,
    RPC,
    START,
    TRAINER,
    UPDATE,
    Gate,
)  # fmt: skip
from tests.kit.recipes import SMALL

GENERATE = "/inference/v1/generate"


@pytest.fixture
def ask(monkeypatch):
    """Return a function that sends a request through a gate to an app that succeeds; it returns status and
    text."""
    monkeypatch.setenv(KEY, "key")

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": (await receive())["body"]})

    made = Gate(app)

    def ask(path: str, body: bytes = b"", trainer: str = "first") -> tuple[int, str]:
        answer: dict = {}
        headers = [(b"authorization", b"Bearer key")]
        headers += [(TRAINER.encode(), trainer.encode(errors="surrogateescape"))] if trainer else []
        half = len(body) // 2
        messages = [{"body": body[:half], "more_body": True}, {"body": body[half:], "more_body": False}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            answer.update(message)

        asyncio.run(made({"type": "http", "path": path, "headers": headers}, receive, send))
        return answer["status"], answer["body"].decode()

    return ask


def test_a_server_obeys_one_trainer_until_it_leaves_or_falls_silent(ask, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(gate.time, "monotonic", lambda: now[0])
    call = json.dumps(CALLS[0]).encode()
    assert ask(OWN) == (200, "{}")
    for path in OWNED:
        assert ask(path, call, "second") == (409, json.dumps({"error": "used by first"}))
        assert ask(path, call, "")[0] == 400
    assert ask(GENERATE, b"{}", "") == (200, "{}"), "anybody with the secret may generate"
    now[0] += gate.LEASE - 1
    assert ask(PAUSE)[0] == 200
    now[0] += gate.LEASE - 1
    assert ask(OWN, b"", "second")[0] == 409
    now[0] += 2
    assert ask(OWN, b"", "second")[0] == 200
    assert ask(DISOWN, b"", "second")[0] == 200
    assert [ask(path, b"", "no UTF-8: \udcff")[0] for path in (OWN, DISOWN)] == [200, 200]
    assert ask(OWN)[0] == 200


def test_nothing_is_generated_while_weights_are_replaced_which_a_pause_precedes(ask):
    assert ask(START)[0] == 409
    assert [ask(path)[0] for path in (UPDATE, FINISH, PAUSE, UPDATE)] == [409, 409, 200, 409]
    assert [ask(path)[0] for path in (START, START, UPDATE, RESUME, GENERATE)] == [200, 409, 200, 409, 409]
    assert [ask(path)[0] for path in (FINISH, GENERATE, RESUME, START)] == [200, 200, 200, 409]
    assert [ask(path)[0] for path in (PAUSE, START)] == [200, 200]
    setup, weights = (json.dumps(call).encode() for call in CALLS)
    assert (ask(RPC, weights)[0], ask(GENERATE)[0]) == (200, 409), "to ask for their name ends nothing"
    assert ask(RPC, setup)[0] == 200, "a later trainer ends what was left open"
    assert [ask(path)[0] for path in (RESUME, GENERATE)] == [200, 200]


@pytest.mark.parametrize(("body", "status"), [
    (b"[" * 100_000, 400),
    (b"\xff", 400),
    (b"{", 400),
    (rb'{"request_id": "\ud800"}', 400),
    (b" " * (LONGEST + 1), 413),
])  # fmt: skip
def test_what_is_no_json_or_too_long_does_not_reach_vllm(ask, body, status):
    for path in (GENERATE, RPC, "/update_weights"):
        assert ask(path, body)[0] == status


@pytest.mark.parametrize("body", [
    {"method": "reload_weights", "args": []}, {"method": "eqlen_setup", "args": [1]}, [],
    {"method": "eqlen_setup", "args": [], "timeout": "x"}, {"method": ["eqlen_setup"], "args": []},
])  # fmt: skip
def test_only_two_methods_are_called_and_without_arguments(ask, body):
    assert ask(RPC, json.dumps(body).encode())[0] == 403


@pytest.fixture
def connect(monkeypatch) -> Iterator[tuple[str, int]]:
    """Yield the address of a gate that listens."""
    monkeypatch.setenv(KEY, "key")
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Gate(None), lifespan="off", log_level="critical", **requests.SETTINGS)
    server = uvicorn.Server(config)
    serving = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    serving.start()
    yield listening.getsockname()
    server.should_exit = True
    serving.join()


@pytest.mark.parametrize(("head", "status"), [
    (b"", b""),
    (b"POST /own HTTP/1.1\r\nA: b", b""),
    (b"POST /own HTTP/1.1\r\nA: " + b"b" * 2**23, b"400"),
    (b"POST /" + b"own" * 2**22, b"400"),
    (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 2**20, b"400"),
    (b"POST /own HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n", b"401"),
    (b"GET /own HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", b"401"),
])  # fmt: skip
def test_who_has_no_secret_keeps_neither_memory_nor_a_connection(connect, monkeypatch, head, status):
    """The server ends the connection, whatever is still to come."""
    monkeypatch.setattr(requests, "SILENCE", 0.2)
    with socket.create_connection(connect, timeout=20) as link:
        answer = b""
        try:
            link.sendall(head)
            while part := link.recv(4096):
                answer += part
        except ConnectionError:  # it has closed while more came
            assert len(head) > 2**20
            return
        assert answer[9:12] == status


def test_a_server_takes_keys_of_the_recipe_before_and_behind_its_options(monkeypatch):
    monkeypatch.setenv(KEY, "key")
    asked = []
    monkeypatch.setattr(starter, "load", lambda *words: asked.append(words) or sys.exit())
    for words in (["seed=3", "--port", "1", "steps=2"], ["--port", "1", "seed=3", "steps=2"]):
        monkeypatch.setattr(sys, "argv", ["server", "recipe.yaml", *words])
        with pytest.raises(SystemExit):
            starter.main()
    assert asked == [("recipe.yaml", ["seed=3", "steps=2"])] * 2


def test_a_server_refuses_options_that_its_engine_lacks(monkeypatch, tmp_path):
    (tmp_path / "r.yaml").write_text(json.dumps(SMALL | {"model": {"path": str(tmp_path)}}))
    monkeypatch.setenv(KEY, "key")
    monkeypatch.setattr(sys, "argv", ["server", str(tmp_path / "r.yaml"), "rollout.vllm.brand_new=1"])
    with pytest.raises(ValueError, match=r"^rollout\.vllm\.brand_new: the engine has no such option"):
        starter.main()
