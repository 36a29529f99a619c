"""Rollouts that a harvest has not finished: what its journals say of their tracks, as far as they have come.

journal-*.arrow ─► tokens by track ─► harvesters, as the harvest itself has them ─► parts, open tracks
suspended-*.arrow of the step before, where this one goes on with its rollouts
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_eqlen.files import step_name
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.recorded import Decoder
from megatron_eqlen.report.rollouts import RolloutView, Unknown, open_segment, view
from megatron_eqlen.rollout import journal
from megatron_eqlen.rollout.arrow_log import batches, pieces, placed
from megatron_eqlen.rollout.record_format import END, PROMPT, SEGMENTS
from megatron_eqlen.rollout.record_reader import step_files
from megatron_eqlen.rollout.recorder import JOURNALS, SUSPENDED
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.kind import Harvester
from megatron_eqlen.sampling.picture import Placed, count
from megatron_eqlen.sampling.track import rollout_of
from megatron_eqlen.types import Elsewhere, Prompt, RolloutKey, Segment

SHOWN = 3
"""Rollouts of a harvest on the page."""

Tokens = dict[str, array]
"""Token ids by the track's name."""


@dataclass(frozen=True)
class Grown:
    """A harvest at one moment."""

    step: int
    """Counted from 1."""
    complete: int
    """Rollouts; those that have not begun are in no number."""
    growing: int
    tokens: int
    """Of those that grow, so far."""
    views: list[RolloutView]
    """Of a few of them."""


class Growing:
    """The harvest in a step's ``folder``. Journals are read on from where they were read last."""

    def __init__(self, folder: Path, recipe: Recipe, decoder: Decoder) -> None:
        self.folder, self._recipe, self._decoder = folder, recipe, decoder
        self.number = int(folder.name.removeprefix("step-"))
        self._journals: dict[Path, _Tracks] = {}
        before = folder.with_name(step_name(self.number - 1)) if self.number else folder
        carried = before.glob(SUSPENDED) if recipe.rollout.carry_over and self.number else ()
        self._carried: Tokens = {}
        for path in carried:
            tracks = _Tracks(path)
            tracks.read(())
            self._carried |= tracks.tokens

    def look(self) -> Grown:
        complete, questions = self._recorded()
        tokens = dict(self._carried)
        for path in sorted(self.folder.glob(JOURNALS)):
            tracks = self._journals.setdefault(path, _Tracks(path))
            tracks.read(complete)
            for name, found in tracks.tokens.items():
                before = self._carried.get(name)
                whole = before + found if before else found  # a copy, and there may be many
                tokens[name] = max(tokens.get(name, whole), whole, key=len)
        tokens = {name: found for name, found in tokens.items() if rollout_of(name) not in complete}
        keys = list(dict.fromkeys(map(rollout_of, tokens)))
        of_each_prompt: dict[str, RolloutKey] = {}
        for key in keys:
            of_each_prompt.setdefault(key[0], key)
        shown = [
            self._view(harvester, questions.get(harvester.prompt.prompt_id, ""))
            for harvester in self._harvesters(list(of_each_prompt.values()), tokens)
        ]
        total = sum(map(len, tokens.values()))
        return Grown(self.number + 1, len(complete), len(keys), total, shown)

    def _recorded(self) -> tuple[set[RolloutKey], dict[str, str]]:
        """Rollouts that are complete, and the questions of those prompts that are recorded: that have one."""
        complete: set[RolloutKey] = set()
        questions: dict[str, str] = {}
        for path in step_files(self.folder):
            for batch in batches(path, SEGMENTS, ["role", "prompt_id", "index", "question"]):
                for row in batch.to_pylist():
                    if row["role"] == END:
                        complete.add((row["prompt_id"], row["index"]))
                    elif row["role"] == PROMPT:
                        questions[row["prompt_id"]] = row["question"]
        return complete, questions

    def _harvesters(self, keys: Sequence[RolloutKey], tokens: Mapping[str, array]) -> Iterator[Harvester]:
        """Of a few of ``keys``, where their tracks' tokens bring them. What they draw does not depend on the
        seed."""
        found, make = 0, KINDS[self._recipe.sampling].harvesters
        for prompt_id, index in keys:
            prompt = Prompt(prompt_id, [], "", "", "")
            harvester = make([prompt], self._recipe, self._decoder.eos_token_ids, 0)[index]
            grow(harvester, tokens)
            if not harvester.complete:  # its record is a moment behind
                found += 1
                yield harvester
            if found == SHOWN:
                return

    def _view(self, harvester: Harvester, question: str) -> RolloutView:
        prompt = replace(harvester.prompt, question=question)
        rollout = replace(harvester.rollout(0), prompt=prompt)
        opened = [
            open_segment(
                Placed(f"track {int(track.name.rpartition('/')[2]) + 1}", track.segment(start), inherited),
                self._decoder.decode,
            )
            for track, start in harvester.open_tracks()
            for inherited in [np.array([*track.context, *track.token_ids[:start]], np.int32)]
        ]
        seen = view(rollout, self._decoder.decode, Unknown())
        title = f"rollout {harvester.index}, {count(len(opened), 'open track')}"
        return replace(seen, title=title, opened=opened)


def grow(harvester: Harvester, tokens: Mapping[str, array]) -> None:
    """Give a new harvester's tracks the ``tokens`` that they have, as the harvest did."""
    launched = harvester.start()
    while launched:
        for track in launched:
            track.whole = False
            if known := tokens.get(track.name):
                token_ids = np.frombuffer(known, np.int32)
                track.resume(Segment(token_ids, Elsewhere.of(token_ids)))
        launched = harvester.advance()


class _Tracks:
    """The tokens that a growing file holds of each track."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens: Tokens = {}
        self._newest: int | None = None
        """Where the newest batch begins that was read."""

    def read(self, complete: Iterable[RolloutKey]) -> None:
        """Read what is new, and forget what belongs to ``complete`` rollouts."""
        columns = ["track", "token_ids"]
        for place, batch in placed(self.path, journal.SCHEMA, columns, since=self._newest):
            if place == self._newest:
                continue
            self._newest = place
            names = batch["track"].to_pylist()
            for name, piece in zip(names, pieces(batch["token_ids"]), strict=True):
                self.tokens.setdefault(name, array("i")).frombytes(piece.tobytes())
        gone = set(complete)
        self.tokens = {name: found for name, found in self.tokens.items() if rollout_of(name) not in gone}
