"""The live page: it follows the run's files, sends only changed sections, and answers this machine alone."""

from __future__ import annotations

import http.client
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import quote

import pytest

from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.report.metrics import MetricsWriter
from megatron_eqlen.report.run_folder import RunFolder
from megatron_eqlen.report.server import Handler, LiveServer
from megatron_eqlen.rollout.record.recorder import record
from tests.kit.report_runs import Harvesting, example_stream, make_tokenizer, recipe, write_run

PROMPT = "sums/a.parquet#1"


class Browser:
    """Sends the requests of the page's script."""

    def __init__(self, run: Path, port: int) -> None:
        self.run, self.port = run, port
        self.known: dict[str, str] = {}
        self.sections: dict[str, str] = {}

    def get(self, where: str, host: str = "localhost") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", where, headers={"Host": f"{host}:{self.port}"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def poll(self) -> set[str]:
        """Return the sections that were sent."""
        status, text = self.get(
            "/news?" + "&".join(f"{name}={version}" for name, version in self.known.items())
        )
        assert status == 200, text
        news = json.loads(text)
        self.known |= {name: section["version"] for name, section in news.items()}
        self.sections |= {name: section["html"] for name, section in news.items()}
        return {*news} - {"now"}

    def step(self, number: int) -> None:
        """Let the run take a step."""
        writer = MetricsWriter(self.run, number)
        stages = {"time/harvest": 3.0, "time/train": 1.0, "time/step": 4.0}
        writer.write(number + 1, {"reward/mean": 0.5, **stages})
        writer.close()

    def harvest(self, number: int) -> None:
        record(self.run / "streams" / f"step-{number:08d}" / "rank-0.arrow", [example_stream()])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return folder


@contextmanager
def browsing(run: Path) -> Iterator[Browser]:
    with LiveServer(run, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Browser(run, server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def browser(tmp_path, model) -> Iterator[Browser]:
    with browsing(write_run(tmp_path / "run", recipe(model))) as browser:
        yield browser


def test_a_page_waits_for_a_run_that_is_to_come(tmp_path, model):
    """Cases: no folder yet; the folder of a SLURM job that was submitted. The page waits until the run
    begins."""
    run = tmp_path / "run"
    made = recipe(model, run_dir=str(run))
    with browsing(run) as browser:
        status, page = browser.get("/")
        assert status == 200
        assert f"Waiting for {run}" in page
        assert '<meta http-equiv="refresh"' in page
        assert browser.get("/news")[0] == 404
        run.mkdir()
        assert "Waiting for" in browser.get("/")[1]
        RunFolder(made).submitted("12", made)
        assert '<section id="now"' in browser.get("/")[1]
        browser.poll()
        assert "not started" in browser.sections["now"]
        assert "SLURM job 12 has not started" in browser.sections["now"]
        RunFolder(made).open(made)
        browser.poll()
        assert "SLURM job 12" not in browser.sections["now"]


def test_the_page_has_a_place_for_every_section_and_needs_nothing_from_elsewhere(browser):
    status, page = browser.get("/")
    assert status == 200
    browser.poll()
    assert set(re.findall(r'<section id="(\w+)"', page)) == set(browser.sections)
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert not re.search(r"https?://", page.partition("<script")[0])


def test_only_what_has_changed_is_sent(browser, model):
    assert len(browser.poll()) > 5
    assert "not started" in browser.sections["now"]
    assert "No step's rollouts are recorded" in browser.sections["rollouts"]
    assert browser.poll() == set()
    browser.step(0)
    assert browser.poll() == {"numbers", "charts", "stages", "details"}
    assert "1 of 20 steps" in browser.sections["now"]
    write_run(browser.run, recipe(model, steps=70))
    assert browser.poll() == {"numbers", "details"}
    assert "1 of 70 steps" in browser.sections["numbers"]
    browser.harvest(1)
    assert browser.poll() == {"rollouts", "verdicts", "slowest"}
    assert "Step 2" in browser.sections["rollouts"]
    assert "Pair 2 · 2 tokens a side · inherits 2" in browser.sections["rollouts"]
    browser.harvest(2)
    browser.harvest(3)
    browser.poll()
    assert re.findall(r"Step \d+", browser.sections["rollouts"]) == ["Step 4", "Step 3", "Step 2"]


def test_a_harvest_is_shown_as_its_tracks_grow_and_fork(browser, model):
    """The stream is the worked example of types.py, with the tokenizer's end of sequence in place of 9."""
    tokenizer = load_tokenizer(model)
    end = min(tokenizer.eos_token_ids)
    stream = Harvesting(browser.run, 0, recipe(model), tokenizer.eos_token_ids)
    assert browser.poll() >= {"growing"}
    assert browser.sections["growing"] == ""
    stream.feed(1, 6, 7, 8)
    assert browser.poll() >= {"growing"}
    assert "0 rollouts complete · 1 grow, with 3 tokens" in browser.sections["growing"]
    assert boxes(browser.sections["growing"]) == [("track 1", "0 tokens"), ("track 2", "3 tokens")]
    stream.feed(0, 5, end)
    stream.feed(2, 4)
    browser.poll()
    assert boxes(browser.sections["growing"]) == [
        ("B1", "2 tokens"),
        ("track 2", "1 tokens"),
        ("A1", "2 tokens"),
        ("track 3", "1 tokens"),
    ]
    stream.end()
    assert browser.poll() >= {"growing", "rollouts", "verdicts"}
    assert browser.sections["growing"].strip() == ""
    assert "Step 1" in browser.sections["rollouts"]


def test_a_stream_of_an_earlier_step_is_shown_with_the_tokens_of_both(tmp_path, model):
    """The next step resumes the stream; other ranks of that step may have suspended theirs already."""
    rollout = {"max_response_length": 192, "carry_over": True, "tokens_per_step": 400}
    made = recipe(model, rollout=rollout, loss={"rollout_is": "token"})
    tokenizer = load_tokenizer(model)
    end = min(tokenizer.eos_token_ids)
    run = write_run(tmp_path / "run", made)
    with browsing(run) as browser:
        first = Harvesting(run, 0, made, tokenizer.eos_token_ids)
        first.feed(1, 6, 7, 8)
        first.feed(0, 5, end)
        first.feed(2, 4)
        first.suspend()
        browser.poll()
        assert browser.sections["growing"].strip() == ""
        second = Harvesting(run, 1, made, tokenizer.eos_token_ids, first.tracks)
        second.feed(1, 4)
        browser.poll()
        assert "What is 3 + 4?" in browser.sections["growing"], "though no rollout of its prompt has ended"
        suspended = replace(example_stream(), index=1, outcome="suspended")
        record(run / "streams/step-00000001/rank-1.arrow", [suspended])
        browser.poll()
        growing = browser.sections["growing"]
        assert "Harvest of step 2" in growing
        assert "0 rollouts complete · 1 suspended for the next step · 1 grow, with 7 tokens so far" in growing
        assert "tokens so far, 6 of them from earlier steps" in growing
        assert "rollout 0, 2 open tracks, 6 tokens from earlier steps" in growing
        assert boxes(growing) == [
            ("B1", "2 tokens"),
            ("track 2", "2 tokens"),
            ("A1", "2 tokens"),
            ("track 3", "1 tokens"),
        ]
        second.feed(2, end)  # after the token that it had: A2; B2 is then [8, 4]
        browser.poll()
        assert ("A2", "2 tokens") in boxes(browser.sections["growing"])
        assert ("B2", "2 tokens") in boxes(browser.sections["growing"])
        second.end()
        browser.poll()
        assert browser.sections["growing"].strip() == ""


def boxes(html: str) -> list[tuple[str, str]]:
    """Return the parts of a drawn rollout: (label, tokens)."""
    return re.findall(r"<title>([^:<]+): ([^<]+?)(?: 0.*| 1.*)?</title>", html)


def test_a_step_is_shown_when_it_is_graded(browser):
    browser.harvest(0)
    browser.harvest(1)
    (browser.run / "streams/step-00000001/grades-rank-0.arrow").unlink()
    browser.poll()
    assert re.findall(r"Step \d+", browser.sections["rollouts"]) == ["Step 1"]


def test_verdicts_lead_to_the_responses_and_those_to_their_text(browser, model):
    browser.harvest(0)
    browser.poll()
    (wrong,) = [link for link in links(browser.sections["verdicts"]) if "verdict=wrong" in link]
    _, graded = browser.get("/" + wrong)
    assert "2 responses with verdict wrong" in graded
    assert cells(graded)[2:4] == ["&lt;b&gt;8&lt;/b&gt;", "7"], "an answer is text, beside its gold one"
    status, text = browser.get("/" + links(graded)[0])
    assert status == 200
    assert "stream 0, 2 pairs, max pairs" in text
    assert "What is 3 + 4?" in text
    assert text.count('<mark class="') == 5, "two pairs and a tail"


def test_slowest_prompts_are_those_with_the_longest_paths(browser):
    """The worked example's longest path is B_1, B_2 and the tail."""
    browser.harvest(0)
    browser.poll()
    assert cells(browser.sections["slowest"])[2:4] == ["5", "9"]


def test_bad_questions_are_answered_with_what_was_expected(browser):
    browser.harvest(0)
    step = "step-00000000"
    for where, status, says in [
        ("/rollout?step=step-00000007&prompt=a&index=0", 404, "expected the name of a recorded step"),
        ("/rollout?step=../../etc&prompt=a&index=0", 404, "expected the name of a recorded step"),
        (f"/rollout?step={step}&prompt=a&index=0", 404, "expected rollout 0 of 'a', found none"),
        (f"/rollout?step={step}&prompt={quote(PROMPT)}&index=x", 404, "invalid literal"),
        (f"/rollout?step={step}", 400, "expected 'prompt' in the address"),
        (f"/graded?verdict=x&step=step-{'1' * 400}", 404, "File name too long"),
        ("/recipe.yaml", 404, "nothing here"),
    ]:
        assert browser.get(where)[0] == status, where
        assert says in browser.get(where)[1]


def test_a_browser_that_leaves_before_its_answer_is_no_error(browser, capsys, monkeypatch):
    """The browser's connection is reset, so the answer meets an error."""
    left = threading.Event()
    answer = Handler.do_GET
    monkeypatch.setattr(Handler, "do_GET", lambda self: (left.wait(20), answer(self)))
    with socket.create_connection(("127.0.0.1", browser.port)) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    left.set()
    assert browser.get("/")[0] == 200
    assert capsys.readouterr().err == ""


def test_every_answer_says_that_nothing_else_may_run_or_load(browser):
    """A served page has the policy in its header, any page in itself; other pages may not hold it in a frame
    either."""
    for where in ("/", "/news", "/nothing"):
        connection = http.client.HTTPConnection("127.0.0.1", browser.port, timeout=20)
        connection.request("GET", where, headers={"Host": "localhost"})
        said = connection.getresponse().getheader("Content-Security-Policy")
        connection.close()
        assert said.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in said
        assert said.endswith("; frame-ancestors 'none'")
    assert re.search(
        """<meta http-equiv="Content-Security-Policy" content="default-src""", browser.get("/")[1]
    )


def test_a_page_elsewhere_that_calls_itself_this_machine_gets_nothing(browser):
    assert browser.get("/", host="evil.example")[0] == 403
    assert browser.get("/", host="127.0.0.1")[0] == 200


@pytest.mark.parametrize("host", ["[", "[::1", "[]", "", "a[b"])
def test_a_malformed_host_is_refused_without_a_traceback(browser, capsys, host):
    """The malformed hosts include an address that is none."""
    for path, header in (("/", host), ("http://[/", "localhost")):
        request = f"GET {path} HTTP/1.1\r\nHost: {header}\r\nConnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", browser.port)) as connection:
            connection.sendall(request.encode())
            answer = connection.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.0 400 "), answer
    assert capsys.readouterr().err == ""


def test_a_port_in_use_and_a_folder_that_is_no_run_are_named(browser, tmp_path, capsys):
    run = str(browser.run)
    assert main(["report", run, "--serve", "--port", str(browser.port)]) == 2
    assert f"port {browser.port} of 127.0.0.1 is in use; name another" in capsys.readouterr().err
    assert main(["report", run, "--serve", "--port", "70000"]) == 2
    assert "port 70000 of 127.0.0.1 cannot be used" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--serve"]) == 2, "a folder of runs"
    assert "expected a run folder with a recipe.yaml" in capsys.readouterr().err
    assert main(["report", run, "--port", "1"]) == 2
    assert "--port: expected with --serve" in capsys.readouterr().err


def cells(html: str) -> list[str]:
    """Return the texts of a table's cells."""
    return [
        re.sub("<[^>]*>", "", cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", html, re.DOTALL)
    ]


def links(html: str) -> list[str]:
    return [unescape(link) for link in re.findall(r'href="([^"]+)" data-show', html)]
