"""A teacher on a vLLM server: its log-probs are a column of the tokens."""

import json
import os
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.engines.server.__main__ import server_command
from megatron_eqlen.engines.server.gate import authorization
from megatron_eqlen.engines.teacher_server import KEY, TeacherServer
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.job import load
from megatron_eqlen.processes.lifeline import named
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.tokens import Ragged, Tokens
from megatron_eqlen.types import Part, Prompt, Rollout, tokens_along
from tests.kit import jobs
from tests.kit.listeners import documented, listeners
from tests.kit.processes import are_gone, descendants, within
from tests.kit.rollouts import place
from tests.kit.servers import ENVIRON, free_ports, wait_until_up
from tests.kit.tiny_models import save_tiny
from tests.kit.train_runs import NO_EVALUATION, column, train

LONGEST = 48 + 101
"""Tokens that the server takes: of a prompt and a response."""


@pytest.fixture(scope="module")
def teacher(home, tmp_path_factory):
    """Yield folder, URL and process of a teacher of another family with the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    vocab_size = read_config(home / "base").vocab_size
    save_tiny(folder, "llama", num_hidden_layers=3, head_dim=32, vocab_size=vocab_size)
    for file in (home / "base").glob("*token*"):
        shutil.copy(file, folder)
    (port,) = free_ports(1)
    longer = [f"model.path={folder}", "rollout.max_response_length=101"]
    (_, _, _, *flags), environ = server_command(load(home / "recipe.yaml", longer), port, "127.0.0.1")
    flags.remove("--skip-tokenizer-init")
    secret = {"VLLM_API_KEY": "the teacher's, which rollout servers do not know"}
    process = jobs.start("-m", "tests.kit.forked_server", *flags, **named(), **ENVIRON, **environ, **secret)
    wait_until_up(url := f"http://127.0.0.1:{port}", process)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, *secret.values())
        yield folder, url, process
    process.kill()


def test_its_column_is_that_of_transformers_on_every_path_and_is_trained_and_replayed(home, teacher):
    folder, url, _ = teacher
    once = ("steps=1", NO_EVALUATION)
    taught = train(home, "taught", *once, f"teacher.url={url}")
    rollouts = read_step(taught / "streams/step-00000000")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert any(part.role == "a" for rollout in rollouts for part in rollout.parts)
    for rollout in rollouts:
        for part in rollout.parts:
            path = [*rollout.prompt.token_ids, *tokens_along(rollout.line(part.number))]
            with torch.no_grad():
                logprobs = model(torch.tensor([path[:-1]])).logits[0].log_softmax(-1)
            exact = logprobs.gather(-1, torch.tensor(path[1:])[:, None])[len(path) - 1 - len(part) :, 0]
            np.testing.assert_allclose(part.tokens["teacher"], exact, rtol=0, atol=1e-4)
    replay = (*once, "--replay", str(taught / "streams"))
    again = train(home, "again", *replay, "teacher.url=http://127.0.0.1:9")
    assert column(again, "loss/total") == column(taught, "loss/total")
    inside = train(home, "inside", *replay, f"teacher.path={folder}")
    for name in ("loss/teacher_kl", "loss/total", "train/grad_norm"):
        assert column(inside, name) == pytest.approx(column(taught, name), rel=1e-4, abs=1e-6)


class Unsteady(BaseHTTPRequestHandler):
    """A teacher that answers each path at its second request, with log-probs that name place and token."""

    asked: ClassVar[list[list[int]]] = []

    def do_POST(self):
        path = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        if path not in self.asked:
            self.asked.append(path)
            self.send_error(503)
            return
        told = [None, *({str(token): {"logprob": named_by(place, token)}, "0": {"logprob": -9.0}}
                        for place, token in enumerate(path[1:], 1))]  # fmt: skip
        body = json.dumps({"choices": [{"prompt_logprobs": told}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args): ...


def named_by(place: int, token: int) -> float:
    return -place - token / 128


def test_lines_that_lack_the_column_are_asked_again_until_they_have_it_and_others_keep_theirs(monkeypatch):
    """The shared part has it from an earlier step, and one of the ends; an environment gave two tokens."""
    monkeypatch.setattr("megatron_eqlen.engines.teacher_server.PAUSES", (0.0,))
    known = np.full(2, -0.5, np.float32)
    given = Ragged.of([(), (0,), (0,), ()])
    parts = [
        place(Part(Tokens.of([11, 12], [-1.0, -1.0], teacher=known)), "step", 0, -1),
        place(Part(Tokens.of([21, 22, 23, 24], np.zeros(4), given=given), "stop"), "step", 1, 0),
        place(Part(Tokens.of([31], np.zeros(1)), "length"), "step", 2, 0),
        place(Part(Tokens.of([41, 42], np.zeros(2), teacher=known), "stop"), "step", 3, 0),
    ]
    rollout = Rollout(Prompt("p", [1, 2, 3], "q", "math", "0"), 0, "tree", 0, parts)
    with ThreadingHTTPServer(("127.0.0.1", 0), Unsteady) as answering:
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        server = TeacherServer(f"http://127.0.0.1:{answering.server_port}", 10.0)
        server.fill([rollout])
        server.close()
        answering.shutdown()
    assert sorted(Unsteady.asked) == [[1, 2, 3, 11, 12, 21, 22, 23, 24], [1, 2, 3, 11, 12, 31]]
    found = [part.tokens["teacher"].tolist() for part in rollout.parts]
    ends = [[named_by(5 + at, token) for at, token in enumerate(ids)] for ids in ([21, 22, 23, 24], [31])]
    assert found == [[-0.5, -0.5], *ends, [-0.5, -0.5]]


def test_another_tokenizer_and_too_short_a_context_are_refused(home, teacher, tmp_path):
    folder, url, _ = teacher
    server = TeacherServer(url, 60.0)
    server.check(load_tokenizer(folder), LONGEST - 1)
    with pytest.raises(EngineError, match=r"teacher\.url: .* found HTTP 400 .*maximum"):
        server.check(load_tokenizer(folder), LONGEST + 1)
    shutil.copytree(home / "base", tmp_path / "other")
    stored = (tmp_path / "other/tokenizer.json").read_text()
    (tmp_path / "other/tokenizer.json").write_text(stored.replace('"<think>"', '"<ponder>"'))
    with pytest.raises(ValueError, match=r"expected the tokenizer of .*other, which makes"):
        server.check(load_tokenizer(tmp_path / "other"), 8)
    server.close()


def test_it_listens_where_the_page_says_and_does_not_know_the_rollout_servers_secret(teacher):
    _, url, process = teacher
    assert {address for address, _ in listeners(process.pid)} == documented()["server"]
    behind = [address for pid in descendants(process.pid) for address, _ in listeners(pid)]
    assert {*behind} == documented()["engine"]
    request = urllib.request.Request(f"{url}/v1/models", headers=authorization())
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request)


def test_a_server_whose_engine_has_died_ends_though_a_client_is_in_the_middle_of_a_request(teacher):
    """Such a client is a trainer whose node has lost power. This test is the last: it ends the teacher."""
    _, url, process = teacher
    place = urllib.parse.urlsplit(url)
    with socket.create_connection((place.hostname, place.port)) as client:
        secret = os.environ[KEY]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n"
        client.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
        for pid in (pids := descendants(process.pid)):
            os.kill(pid, signal.SIGKILL)
        assert within(60, lambda: process.poll() is not None)
    assert within(10, are_gone(pids))
