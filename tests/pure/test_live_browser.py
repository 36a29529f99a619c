"""The page in a real browser: it follows a run without a reload, draws charts, fits its window."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_eqlen.report import page
from megatron_eqlen.report.metrics import MetricsWriter
from megatron_eqlen.report.page import write_page
from megatron_eqlen.report.server import LiveServer
from tests.kit.browser import PATIENCE, Browser, program
from tests.kit.processes import within
from tests.kit.report_runs import (
    Harvesting,
    example_stream,
    leave_a_span,
    make_tokenizer,
    prompt,
    recipe,
    write_run,
)

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


# ---- the page that was written --------------------------------------------------------------------------

CHART = "[...document.querySelectorAll('.chart')].find(one => one.innerText.startsWith('{}'))"
WATCH = "window.refused = []; addEventListener('securitypolicyviolation', one => refused.push(one.sample))"


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Iterator[Browser]:
    """Return the report of a run with long names, whose shares of pairs and of units are the same."""
    folder = tmp_path_factory.mktemp("written")
    make_tokenizer(folder / "model")
    long = replace(prompt(1), prompt_id=f"sums/{'x' * 80}.parquet#1", question="How many ways " * 20)
    asked = recipe(folder / "model")
    run = write_run(folder / "run", asked, {"step-00000000": [replace(example_stream(), prompt=long)]})
    shares = {"objective/skip_rate": 0.3, "objective/zero_advantage_fraction": 0.3}
    writer = MetricsWriter(run)
    for step in range(1, 21):
        leave_a_span(run, step, "train", 10.0 * step, 10.0 * step + 5)
        writer.write(step, {"reward/mean": 10.0 ** (step % 3), "time/train": 5.0, "time/step": 9.0, **shares})
    writer.close()
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        browser.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        browser.look(1300)
        browser.open(write_page(run).as_uri())
        assert browser.becomes("document.querySelectorAll('.chart canvas').length >= 3")
        yield browser
        assert browser.errors == []


def look(browser: Browser, width: int, dark: bool = False) -> None:
    """Set the window's size and colours, and wait until all charts are drawn for it."""
    browser.look(width, dark=dark)
    drawn = "figure => figure.plot?.width === figure.querySelector('.plot').clientWidth"
    wanted = f"innerWidth === {width} && [...document.querySelectorAll('.chart')].every({drawn})"
    assert browser.becomes(wanted)


def canvas(browser: Browser, title: str) -> str:
    return browser.value(CHART.format(title) + ".querySelector('canvas').toDataURL()")


@pytest.mark.parametrize("width", [1300, 420])
def test_nothing_is_cut_off(opened, width):
    """Every element with text lies within the window, and does not scroll in a box of its own."""
    look(opened, width)
    cut_off = """[...document.querySelectorAll('main, .card, .wide, dd, td, figure')]
        .filter(one => one.getBoundingClientRect().right > innerWidth
                       || one.scrollWidth > one.clientWidth + 1)
        .map(one => one.tagName + ' ' + one.className + ': ' + one.textContent.slice(0, 80))"""
    assert opened.value(cut_off) == []
    assert opened.value("document.documentElement.scrollWidth") <= width
    look(opened, 1300)


def test_lines_that_coincide_are_both_seen(opened):
    """The later line is dashed and narrower: pixels of both colours are on the canvas."""
    counted = opened.value(
        """(() => {
        const at = CHART.querySelector('canvas'), seen = {};
        const data = at.getContext('2d').getImageData(0, 0, at.width, at.height).data;
        for (let i = 0; i < data.length; i += 4) {
            const key = [data[i], data[i + 1], data[i + 2]].join();
            if (data[i + 3] > 250) seen[key] = (seen[key] ?? 0) + 1;
        }
        return seen;
    })()""".replace("CHART", CHART.format("Shares"))
    )
    first, second = "42,98,196", "208,122,28"  # --c0, --c1
    assert counted.get(first, 0) > 100
    assert counted.get(second, 0) > 100


@pytest.mark.parametrize("tool", ["smoothing", "log", "clock"])
def test_charts_are_smoothed_logarithmic_or_over_time_when_asked(opened, tool):
    before = canvas(opened, "Reward")
    change = "at.value = 0.9" if tool == "smoothing" else "at.checked = true"
    undo = "at.value = 0" if tool == "smoothing" else "at.checked = false"
    act = (
        "(() => {{ const at = document.getElementById('{}'); {}; at.dispatchEvent(new Event('input')); }})()"
    )
    opened.value(act.format(tool, change))
    assert canvas(opened, "Reward") != before
    opened.value(act.format(tool, undo))
    assert canvas(opened, "Reward") == before


def test_a_name_hides_its_line(opened):
    before = canvas(opened, "Shares")
    key = CHART.format("Shares") + ".querySelector('.legend button')"
    opened.value(f"{key}.click()")
    assert canvas(opened, "Shares") != before
    assert opened.value(f"{key}.getAttribute('aria-pressed')") == "false"
    opened.value(f"{key}.click()")


def test_a_dark_scheme_changes_the_page_and_its_charts(opened):
    before, ground = canvas(opened, "Reward"), "getComputedStyle(document.body).backgroundColor"
    light = opened.value(ground)
    look(opened, 1300, dark=True)
    assert opened.becomes(f"{ground} != '{light}'")
    assert within(PATIENCE, lambda: canvas(opened, "Reward") != before)
    look(opened, 1300)
    assert within(PATIENCE, lambda: canvas(opened, "Reward") == before)


def test_no_script_runs_but_the_page_s_own(opened):
    """The page's own style and script are never refused; injected ones are."""
    assert opened.value("refused") == []
    image = "<img src=x onerror='window.ran = 1'>"
    opened.value(f'document.body.insertAdjacentHTML("beforeend", "{image}")')
    assert opened.becomes("refused.length > 0")
    assert opened.value("window.ran") is None
