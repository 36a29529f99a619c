"""The live page of a run: sections of HTML, each made again when the files behind it have changed."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_eqlen.files import step_folders, step_number
from megatron_eqlen.recipe_load import RECIPE, dump, load_run
from megatron_eqlen.report import worst
from megatron_eqlen.report.curves import charts, facts, last_steps, stages
from megatron_eqlen.report.drawing import draw
from megatron_eqlen.report.evaluations import outcomes, read_evaluations
from megatron_eqlen.report.growing import Growing
from megatron_eqlen.report.metrics import FILE as METRICS
from megatron_eqlen.report.metrics import SPANS, read_metrics
from megatron_eqlen.report.recorded import Graded, Recorded, find_decoder, is_scored, recorded
from megatron_eqlen.report.rollouts import CONTEXT_TOKENS
from megatron_eqlen.report.state import FILE as STATE
from megatron_eqlen.report.state import State, read_state
from megatron_eqlen.report.status import screen_rows, status
from megatron_eqlen.report.template import template
from megatron_eqlen.rollout.recorder import JOURNALS
from megatron_eqlen.types import RolloutKey, WorstToken

POLL, POLL_HIDDEN = 2.0, 15.0
"""Seconds between two questions of a page, and of one that nobody sees."""
STEPS = 2
"""The newest scored steps, whose rollouts are shown."""
WORST = 6

Stamp = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of each file: a section whose stamp is the same is the same."""


@dataclass(frozen=True)
class Section:
    stamp: Stamp | None
    """None: it is made each time."""
    version: str
    html: str


class LivePage:
    """Of the run in ``folder``. Several threads may ask. Raises ValueError where it is no run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.streams = folder, folder / "streams"
        self.recipe = load_run(folder)
        self.decoder = find_decoder(Path(self.recipe.model.path))
        self._parts: Any = template("live_parts.html.jinja", draw=draw).module
        self._made: dict[str, Section] = {}
        self._steps: dict[str, tuple[Stamp, Recorded]] = {}
        self._growing: Growing | None = None
        """The newest harvest that is under way, or was cut off."""
        self._lock = threading.Lock()

    def html(self) -> str:
        """The page itself, whose script asks for the sections."""
        page = template("live.html.jinja", draw=draw)
        return page.render(
            recipe=self.recipe,
            recipe_text=dump(self.recipe),
            sections=list(self._makers()),
            poll=(POLL, POLL_HIDDEN),
        )

    def news(self, known: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Name to ``version`` and ``html`` of the sections whose version is not the ``known`` one."""
        with self._lock:
            sections = {name: self._section(name, *how) for name, how in self._makers().items()}
        return {
            name: {"version": one.version, "html": one.html}
            for name, one in sections.items()
            if known.get(name) != one.version
        }

    def rollout(self, step: str, key: RolloutKey) -> str:
        """One rollout of a step's folder with all of its text. Raises ValueError where there is none."""
        with self._lock:
            return self._parts.one(step, self._step(self._folder(step)).view(key, self.decoder.decode))

    def graded(self, step: str, verdict: str) -> str:
        """The responses of a step with this verdict."""
        with self._lock:
            found = [one for one in self._step(self._folder(step)).graded() if one.grade.verdict == verdict]
            return self._parts.graded(step, verdict, found)

    def worst(self, step: str) -> str:
        """The token of a step about which trainer and engine disagree most, within its rollout."""
        folder = self._folder(step)
        token = worst.read(folder)
        if token is None:
            raise ValueError(f"{folder}: expected {worst.FILE} (training writes it), found none")
        with self._lock:
            seen = self._step(folder)
            rollout = worst.find(token, seen.rollouts, self.recipe).rollout
            view = seen.view((rollout.prompt_id, rollout.index), self.decoder.decode)  # reads its token ids
            place = worst.find(token, [rollout], self.recipe)
            around = [self.decoder.decode(ids) for ids in place.around(CONTEXT_TOKENS)]
            return self._parts.worst_token(step, token, place, around, view)

    # ---- sections -----------------------------------------------------------------------------------

    def _makers(self) -> dict[str, tuple[Stamp | None, Callable[[], str]]]:
        """In the order of the page: what each section is made of, and how."""
        metrics = _stamp([self.folder / METRICS])
        evaluated = metrics + _stamp(sorted((self.folder / "evaluation").glob("*.json")))
        newest = self._newest()
        rollouts = _stamp([file for folder in newest for file in sorted(folder.glob("*.arrow"))])
        harvest = self._harvest()
        growing = _stamp(sorted(harvest.folder.glob("*.arrow"))) if harvest else ()
        return {
            "now": (None, self._now),
            "growing": (growing, self._grown),
            "numbers": (evaluated + _stamp([self.folder / RECIPE]), self._numbers),
            "charts": (evaluated, self._charts),
            "stages": (metrics + _stamp([self.folder / STATE]), self._stages),
            "rollouts": (rollouts, lambda: self._rollouts(newest)),
            "verdicts": (rollouts, lambda: self._verdicts(newest)),
            "slowest": (rollouts, lambda: self._slowest(newest)),
            "worst": (metrics, self._worst),
            "evaluations": (evaluated, self._evaluations),
        }

    def _section(self, name: str, stamp: Stamp | None, make: Callable[[], str]) -> Section:
        made = self._made.get(name)
        if made is None or stamp is None or made.stamp != stamp:
            html = make()
            made = Section(stamp, hashlib.blake2b(html.encode(), digest_size=8).hexdigest(), html)
            self._made[name] = made
        return made

    def _now(self) -> str:
        found = status(self.folder)
        return self._parts.now(found, [(name, str(text)) for name, text in screen_rows(found)])

    def _grown(self) -> str:
        return self._parts.growing(self._growing.look() if self._growing else None)

    def _numbers(self) -> str:
        records = read_metrics(self.folder)
        budget = load_run(self.folder).budget  # a run that goes on later may have another
        return self._parts.numbers(outcomes(self._evaluated(records)), facts(records, budget))

    def _charts(self) -> str:
        records = read_metrics(self.folder)
        return self._parts.curves(charts(records, self._evaluated(records)))

    def _stages(self) -> str:
        records = read_metrics(self.folder)
        shown = [*records, *_step_under_way(records, read_state(self.folder))]
        drawn = [chart for chart in (last_steps(shown), stages(records)) if chart is not None]
        return self._parts.stages(drawn)

    def _evaluations(self) -> str:
        return self._parts.evaluated(self._evaluated(read_metrics(self.folder)))

    def _evaluated(self, records: list[dict[str, Any]]) -> Any:
        return read_evaluations(self.folder / "evaluation", records[-1]["step"] if records else 0)

    def _rollouts(self, folders: list[Path]) -> str:
        steps = [(step, step.views(self.decoder.decode)) for step in map(self._step, folders)]
        return self._parts.rollouts(self.recipe.sampling, steps, self.decoder.note)

    def _verdicts(self, folders: list[Path]) -> str:
        steps = [(step, _counted(step.graded())) for step in map(self._step, folders)]
        return self._parts.verdicts(steps)

    def _slowest(self, folders: list[Path]) -> str:
        return self._parts.slowest([(step, step.slowest()) for step in map(self._step, folders)])

    def _worst(self) -> str:
        found: list[tuple[WorstToken, str, int]] = []
        for number, folder in step_folders(self.streams):
            if (token := worst.read(folder)) is not None:
                found.append((token, folder.name, number))
        return self._parts.worst(sorted(found, reverse=True)[:WORST])

    def _harvest(self) -> Growing | None:
        """The newest harvest that has a journal, which goes with its end."""
        journals = self.streams.glob(f"step-[0-9]*/{JOURNALS}")
        newest = max((one.parent for one in journals), default=None)
        if newest is None or not self.decoder.eos_token_ids:
            self._growing = None
        elif self._growing is None or self._growing.folder != newest:
            self._growing = Growing(newest, self.recipe, self.decoder)
        return self._growing

    # ---- steps --------------------------------------------------------------------------------------

    def _newest(self) -> list[Path]:
        """The newest steps that are harvested and graded, the newest first."""
        return list(islice(filter(is_scored, recorded(self.streams, newest_first=True)), STEPS))

    def _step(self, folder: Path) -> Recorded:
        """Kept until its files change; of the steps that nobody has asked for lately only a few."""
        stamp = _stamp(sorted(folder.glob("*.arrow")))
        before = self._steps.pop(folder.name, None)
        step = before[1] if before and before[0] == stamp else Recorded(folder, self.recipe)
        self._steps[folder.name] = stamp, step
        for name in list(self._steps)[: -2 * STEPS]:
            del self._steps[name]
        return step

    def _folder(self, step: str) -> Path:
        folder = self.streams / step
        if step_number(step) is None or not folder.is_dir():
            raise ValueError(f"{self.streams}: expected the name of a recorded step, found {step!r}")
        return folder


def _step_under_way(records: list[dict[str, Any]], state: State | None) -> list[dict[str, Any]]:
    """A record of the stages so far of the step that a run is at, or was when it ended; none between two."""
    done = records[-1] if records else {"step": 0, "time": 0.0}
    if state is None or state.time < done["time"]:
        return []
    going = [{"stage": stage, "began": since, "ended": state.time} for since, stage in state.stages]
    return [{"step": done["step"] + 1, "time": state.time, SPANS: [*state.spans, *going]}]


def _counted(graded: list[Graded]) -> list[tuple[str, int]]:
    return Counter(one.grade.verdict for one in graded).most_common()


def _stamp(files: list[Path]) -> Stamp:
    found = []
    for file in files:
        try:
            stat = file.stat()
        except FileNotFoundError:
            continue
        found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return tuple(found)
