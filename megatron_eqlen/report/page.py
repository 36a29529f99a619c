"""A run's page, made from the run folder's files alone: ``report.html``, or served and kept up to date.

recipe.yaml, metrics.jsonl, events.jsonl, evaluation/*.json, streams/ ──► sections of HTML ──► the page
                                                                                       └─────► its news

A section is made again only when the files behind it have changed.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_eqlen.files import step_number, write_text
from megatron_eqlen.processes.events import FILE as EVENTS
from megatron_eqlen.recipe.load import RECIPE, dump, load_run
from megatron_eqlen.report.charts import charts, facts, stages
from megatron_eqlen.report.drawing import timeline
from megatron_eqlen.report.evaluations import Evaluation, outcomes, read_evaluations
from megatron_eqlen.report.growing import Growing
from megatron_eqlen.report.metrics import FILE as METRICS
from megatron_eqlen.report.metrics import Records, read_metrics
from megatron_eqlen.report.recorded import Graded, Recorded, find_decoder, is_scored, recorded
from megatron_eqlen.report.run_state import RunState, read_state
from megatron_eqlen.report.status import page_rows, status
from megatron_eqlen.report.template import environment
from megatron_eqlen.rollout.record.arrow_log import is_closed
from megatron_eqlen.rollout.record.recorder import OPEN, OPEN_FILES
from megatron_eqlen.types import RolloutKey

POLL, POLL_HIDDEN = 2.0, 15.0
"""Seconds between two requests of a served page, and of one in a hidden tab."""
STEPS = 2
"""Number of newest graded steps whose rollouts are shown, besides the first step."""

Stamp = tuple[tuple[str, int, int], ...]
"""Name, size and modification time of each file: a section with an unchanged stamp is unchanged."""


@dataclass(frozen=True)
class Section:
    stamp: Stamp | None
    """None: the section is made for each request."""
    version: str
    html: str


def write_page(run: Path) -> Path:
    """Write ``report.html`` into the folder ``run`` and return its path.

    Metrics, evaluations and streams may be missing. Raises ValueError if the folder holds no recipe, or
    naming the file that cannot be read.
    """
    path = run / "report.html"
    write_text(path, Page(run, live=False).html())
    return path


class Page:
    """The page of the run in ``folder``. Several threads may use it at once.

    ``live``: a server answers the page's requests. Raises ValueError if ``folder`` holds no run.
    """

    def __init__(self, folder: Path, live: bool) -> None:
        self.folder, self.streams, self.live = folder, folder / "streams", live
        self.recipe = load_run(folder)
        self.decoder = find_decoder(self.recipe.model)
        self._environment = environment()
        self._macros: Any = self._environment.get_template("sections.html.jinja").module
        self._made: dict[str, Section] = {}
        self._steps: dict[str, tuple[Stamp, Recorded]] = {}
        self._state = RunState()
        self._growing: Growing | None = None
        """The newest harvest that is running, or was cut off."""
        self._lock = threading.Lock()

    def html(self) -> str:
        with self._lock:
            return self._environment.get_template("page.html.jinja").render(
                title=f"{self.recipe.name} · {self.recipe.method} · seed {self.recipe.seed}",
                recipe=self.recipe,
                sections=self._sections(),
                poll=(POLL, POLL_HIDDEN) if self.live else None,
            )

    def news(self, known: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Return ``version`` and ``html``, by section name, of the sections whose version is not the
        ``known`` one."""
        with self._lock:
            sections = self._sections()
        return {
            name: {"version": section.version, "html": section.html}
            for name, section in sections.items()
            if known.get(name) != section.version
        }

    def rollout(self, step: str, key: RolloutKey) -> str:
        """Return one rollout of a step's folder with all of its text. Raises ValueError if there is none."""
        with self._lock:
            return self._macros.one(step, self._step(self._folder(step)).view(key, self.decoder.decode))

    def graded(self, step: str, verdict: str) -> str:
        """Return the responses of a step with this verdict."""
        with self._lock:
            found = self._step(self._folder(step)).graded(with_golds=True)
            return self._macros.graded(
                step, verdict, [response for response in found if response.grade.verdict == verdict]
            )

    # ---- sections -----------------------------------------------------------------------------------

    def _sections(self) -> dict[str, Section]:
        """Return the sections in the order of the page."""
        macros = self._macros
        recipe = _stamp([self.folder / RECIPE])
        metrics = _stamp([self.folder / METRICS])
        evaluated = metrics + _stamp(sorted((self.folder / "evaluation").glob("*.json")))
        shown = self._shown()
        rollouts = _stamp([file for folder in shown for file in sorted(folder.glob("*.arrow"))])
        harvest = self._harvest()
        growing = _stamp(sorted(harvest.folder.glob("*.arrow"))) if harvest else ()
        makers: dict[str, tuple[Stamp | None, Callable[[], str]]] = {
            "now": (None, self._now),
            "growing": (growing, lambda: macros.growing(harvest.look() if harvest else None)),
            "numbers": (evaluated + recipe, self._numbers),
            "charts": (evaluated, lambda: macros.charts(charts(self._records(), self._evaluated()))),
            "stages": (metrics + _stamp([self.folder / EVENTS]), self._stages),
            "evaluations": (evaluated, lambda: macros.evaluations(self._evaluated())),
            "rollouts": (rollouts, lambda: self._rollouts(shown)),
            "verdicts": (rollouts, lambda: self._verdicts(shown)),
            "slowest": (rollouts, lambda: self._slowest(shown)),
            "details": (metrics + recipe, self._details),
        }
        return {name: self._section(name, *how) for name, how in makers.items()}

    def _section(self, name: str, stamp: Stamp | None, make: Callable[[], str]) -> Section:
        made = self._made.get(name)
        if made is None or stamp is None or made.stamp != stamp:
            html = make()
            made = Section(stamp, hashlib.blake2b(html.encode(), digest_size=8).hexdigest(), html)
            self._made[name] = made
        return made

    def _records(self) -> Records:
        return read_metrics(self.folder)

    def _evaluated(self) -> list[Evaluation]:
        records = self._records()
        return read_evaluations(self.folder / "evaluation", records[-1]["step"] if records else 0)

    def _now(self) -> str:
        self._state = read_state(self.folder, self._state)
        found = status(self.folder, self._state)
        return self._macros.state(found, page_rows(found, self.live))

    def _numbers(self) -> str:
        budget = load_run(self.folder).budget  # a run that is resumed later may have another
        return self._macros.numbers(outcomes(self._evaluated()), facts(self._records(), budget))

    def _stages(self) -> str:
        records = self._records()
        self._state, drawn = read_state(self.folder, self._state), stages(records)
        under_way = _step_under_way(records, self._state) if self.live else []
        return self._macros.stages(*timeline([*self._state.steps, *under_way]), [drawn] if drawn else [])

    def _details(self) -> str:
        records = self._records()
        return self._macros.details(dump(load_run(self.folder)), records[-1] if records else None)

    def _rollouts(self, folders: list[Path]) -> str:
        steps = [(step, step.views(self.decoder.decode)) for step in map(self._step, folders)]
        return self._macros.rollouts(self.recipe.sampling, steps, self.decoder.note)

    def _verdicts(self, folders: list[Path]) -> str:
        steps = [(step, _counted(step.graded())) for step in map(self._step, folders)]
        return self._macros.verdicts(steps, self.live)

    def _slowest(self, folders: list[Path]) -> str:
        return self._macros.slowest([(step, step.slowest()) for step in map(self._step, folders)], self.live)

    def _harvest(self) -> Growing | None:
        """Return the newest harvest that has not ended, if tokens of it are recorded."""
        found = self.streams.glob(f"step-[0-9]*/{OPEN_FILES}")
        running = [
            path.parent for path in found if not is_closed(path.with_name(path.name.removeprefix(OPEN)))
        ]
        newest = max(running, default=None)
        if newest is None or not self.decoder.eos_token_ids:
            self._growing = None
        elif self._growing is None or self._growing.folder != newest:
            self._growing = Growing(newest, self.recipe, self.decoder)
        return self._growing

    # ---- steps --------------------------------------------------------------------------------------

    def _shown(self) -> list[Path]:
        """Return the newest steps that are harvested and graded, the newest first, then the first one."""
        newest = list(islice(filter(is_scored, recorded(self.streams, newest_first=True)), STEPS))
        first = list(islice(filter(is_scored, recorded(self.streams)), 1))
        return list(dict.fromkeys([*newest, *first]))

    def _step(self, folder: Path) -> Recorded:
        """Return a recorded step. A few steps are cached until their files change."""
        stamp = _stamp(sorted(folder.glob("*.arrow")))
        before = self._steps.pop(folder.name, None)
        step = before[1] if before and before[0] == stamp else Recorded(folder, self.recipe)
        self._steps[folder.name] = stamp, step
        for name in list(self._steps)[: -2 * (STEPS + 1)]:
            del self._steps[name]
        return step

    def _folder(self, step: str) -> Path:
        folder = self.streams / step
        if step_number(step) is None or not folder.is_dir():
            raise ValueError(f"{self.streams}: expected the name of a recorded step, found {step!r}")
        return folder


def _step_under_way(records: Records, state: RunState) -> Records:
    """Return a record of the stages so far of the step in progress, or of the step at which the run ended;
    empty between two steps."""
    done, seen = records[-1]["step"] if records else 0, state.sign_of_life
    going = [{"stage": stage, "began": since, "ended": seen} for since, stage in state.stages]
    return [{"step": done + 1, "time": seen, "spans": [*state.spans, *going]}]


def _counted(graded: list[Graded]) -> list[tuple[str, int]]:
    return Counter(response.grade.verdict for response in graded).most_common()


def _stamp(files: list[Path]) -> Stamp:
    found = []
    for file in files:
        try:
            stat = file.stat()
        except FileNotFoundError:
            continue
        found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return tuple(found)
