"""The live page in a real browser follows a run without being loaded again, and opens texts on a click."""

from __future__ import annotations

import threading

import pytest

from megatron_eqlen.report import page
from megatron_eqlen.report.metrics import MetricsWriter
from megatron_eqlen.report.server import LiveServer
from tests.kit.browser import Browser, program
from tests.kit.report_runs import Harvesting, make_tokenizer, recipe, write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(program() is None, reason="no chromium (tools/test --install-system-packages)"),
]


def test_a_run_is_waited_for_and_followed_from_its_first_harvest_to_a_text(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "POLL", 0.05)
    (tmp_path / "model").mkdir()
    tokenizer = make_tokenizer(tmp_path / "model")
    end, made = min(tokenizer.eos_token_ids), recipe(tmp_path / "model")
    run = tmp_path / "run"
    with LiveServer(run, port=0) as server, Browser(tmp_path / "chromium") as browser:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        browser.open(server.address)
        assert browser.shows(f"Waiting for {run}")
        write_run(run, made)
        assert browser.shows("not started", "#now")

        stream = Harvesting(run, 0, made, tokenizer.eos_token_ids)
        stream.feed(1, *tokenizer.encode("seven eight nine"))
        assert browser.shows("Harvest of step 1", "#growing")
        assert browser.becomes("document.querySelectorAll('#growing svg rect.open').length == 2")
        stream.feed(0, *tokenizer.encode("ten"), end)
        assert browser.shows("Pair 1", "#growing")
        stream.feed(2, *tokenizer.encode("nine ten"))
        assert browser.shows("track 3", "#growing")
        assert browser.shows("nine ten", "#growing")
        assert browser.becomes("document.querySelectorAll('#growing svg line.end').length == 1")

        stream.end()
        assert browser.shows("correct 1", "#verdicts")
        assert browser.becomes("document.querySelector('#growing').innerText == ''")
        writer = MetricsWriter(run)
        writer.write(1, {"reward/mean": 0.5, "time/train": 2.0, "time/step": 4.0})
        assert browser.shows("1 of 20 steps", "#now")
        assert browser.becomes("document.querySelectorAll('#charts canvas').length > 0")

        browser.value("document.querySelector('#rollouts details').open = false")
        writer.write(2, {"reward/mean": 0.6, "time/train": 2.0, "time/step": 4.0})
        writer.close()
        assert browser.shows("2 of 20 steps", "#now")
        assert not browser.value("document.querySelector('#rollouts details').open"), (
            "what was closed stays so"
        )

        browser.click("#verdicts a")
        assert browser.shows("1 responses with verdict correct", "dialog")
        browser.click("dialog a")
        assert browser.shows("inherits 0", "dialog[open]")
        browser.click("#close")
        assert not browser.value("document.querySelector('dialog').open")

        server.shutdown()
        server.server_close()
        assert browser.shows("not up to date", "#lost")
        assert browser.errors == []
