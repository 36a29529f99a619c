"""Rollouts that a harvest has not finished, as far as they are recorded.

open-*.arrow ─► tokens by track ─► harvesters, as the harvest itself has them ─► parts, open tracks
the same of the step before, if this one resumes its rollouts
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from megatron_eqlen.files import step_name, step_number
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.recorded import Decoder
from megatron_eqlen.report.rollouts import RolloutView, Unknown, open_segment, view
from megatron_eqlen.rollout.record.arrow_log import pieces, placed
from megatron_eqlen.rollout.record.format import END, PROMPT, SEGMENTS, TRACK
from megatron_eqlen.rollout.record.reader import step_files
from megatron_eqlen.rollout.record.recorder import OPEN_FILES
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.harvester import Harvester
from megatron_eqlen.sampling.kind import LabeledSegment, plural
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Prompt, RolloutKey

SHOWN = 3
"""Number of a harvest's rollouts on the page."""

COLUMNS = ("role", "prompt_id", "index", "outcome", "question")
"""Columns of a record that are read."""

TrackKey = tuple[str, int, int]
"""(prompt_id, index of the rollout, number of the track)."""

TokensByTrack = dict[TrackKey, "array[int]"]
"""Token ids of each track."""


@dataclass(frozen=True)
class Grown:
    """A harvest at one moment."""

    step: int
    """Number of the step, counted from 1."""
    complete: int
    """Number of complete rollouts; rollouts that have not begun are not counted."""
    suspended: int
    """Number of rollouts suspended for the next step (``rollout.carry_over``), by ranks whose harvest has
    ended."""
    growing: int
    tokens: int
    """Number of tokens of growing rollouts so far."""
    carried_tokens: int
    """Number of these tokens that earlier steps generated."""
    views: list[RolloutView]
    """Views of a few growing rollouts."""


class Growing:
    """The harvest in a step's ``folder``. Each look reads its files from where the last one ended."""

    def __init__(self, folder: Path, recipe: Recipe, decoder: Decoder) -> None:
        self.folder, self._recipe, self._decoder = folder, recipe, decoder
        number = step_number(folder.name)
        assert number is not None, folder
        self.number = number
        self._open: dict[Path, _Tracks] = {}
        self._record = _Record()
        self._carried: TokensByTrack = {}
        if recipe.rollout.carry_over and number:
            self._resume_from(folder.with_name(step_name(number - 1)))

    def _resume_from(self, before: Path) -> None:
        """Read the partial rollouts of the step before and their questions, which this step does not record
        before one of its rollouts ends."""
        of_before = _Record()
        of_before.read(before)
        for path in before.glob(OPEN_FILES):
            tracks = _Tracks(path)
            tracks.read(())
            for key, found in tracks.tokens.items():
                if key[:2] in of_before.suspended:
                    self._carried[key] = max(self._carried.get(key, found), found, key=len)
        self._record.questions |= of_before.questions

    def look(self) -> Grown:
        record = self._record
        record.read(self.folder)
        ended = record.complete | record.suspended
        tokens = dict(self._carried)
        for path in sorted(self.folder.glob(OPEN_FILES)):
            tracks = self._open.setdefault(path, _Tracks(path))
            tracks.read(ended)
            for key, found in tracks.tokens.items():
                tokens[key] = max(tokens.get(key, found), found, key=len)
        tokens = {key: found for key, found in tokens.items() if key[:2] not in ended}
        keys = list(dict.fromkeys(key[:2] for key in tokens))
        of_each_prompt: dict[str, RolloutKey] = {}
        for key in keys:
            of_each_prompt.setdefault(key[0], key)
        shown = [
            self._view(harvester, record.questions.get(harvester.prompt.prompt_id, ""))
            for harvester in self._harvesters(list(of_each_prompt.values()), tokens)
        ]
        return Grown(
            self.number + 1,
            len(record.complete),
            len(record.suspended),
            len(keys),
            sum(map(len, tokens.values())),
            sum(len(self._carried.get(key, ())) for key in tokens),
            shown,
        )

    def _harvesters(self, keys: Sequence[RolloutKey], tokens: TokensByTrack) -> Iterator[Harvester]:
        """Yield harvesters of a few of ``keys``, advanced to their tracks' tokens. Their drawing does not
        depend on the seed."""
        found, make = 0, KINDS[self._recipe.sampling].harvesters
        for prompt_id, index in keys:
            prompt = Prompt(prompt_id, [], "", "", "")
            harvester = make([prompt], self._recipe, self._decoder.eos_token_ids, 0)[index]
            grow(harvester, tokens)
            if not harvester.complete:  # its record is a moment late
                found += 1
                yield harvester
            if found == SHOWN:
                return

    def _view(self, harvester: Harvester, question: str) -> RolloutView:
        prompt = replace(harvester.prompt, question=question)
        rollout = replace(harvester.rollout(0), prompt=prompt)
        opened = [
            open_segment(
                LabeledSegment(f"track {track.number + 1}", track.segment(start), inherited),
                self._decoder.decode,
            )
            for track, start in harvester.open_tracks()
            for inherited in [np.array([*track.context, *track.token_ids[:start]], np.int32)]
        ]
        seen = view(rollout, self._decoder.decode, Unknown())
        key = harvester.prompt.prompt_id, harvester.index
        carried = sum(len(found) for track, found in self._carried.items() if track[:2] == key)
        earlier = f", {plural(carried, 'token')} from earlier steps" if carried else ""
        title = f"rollout {harvester.index}, {plural(len(opened), 'open track')}{earlier}"
        return replace(seen, title=title, opened=opened)


def grow(harvester: Harvester, tokens: TokensByTrack) -> None:
    """Give a new harvester's tracks their ``tokens``, as the harvest did."""
    launched = harvester.start()
    while launched:
        for track in launched:
            track.keeps_columns = False
            if known := tokens.get((track.prompt_id, track.index, track.number)):
                track.resume(Tokens.of(np.frombuffer(known, np.int32)))
        launched = harvester.advance()


class _Tail:
    """A growing file of batches, of which each is read once."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns = path, columns
        self._newest: int | None = None
        """Place where the newest batch begins that was read."""

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the new batches."""
        for place, batch in placed(self._path, SEGMENTS, self._columns, since=self._newest):
            if place != self._newest:
                self._newest = place
                yield batch


class _Tracks:
    """The tokens that a file holds of each track of unfinished rollouts."""

    def __init__(self, path: Path) -> None:
        self.tokens: TokensByTrack = {}
        self._tail = _Tail(path, ["role", "prompt_id", "index", "number", "token_ids"])

    def read(self, ended: Iterable[RolloutKey]) -> None:
        """Read new tokens, and forget tracks of rollouts that have ``ended``."""
        for batch in self._tail.read():
            *of_rows, roles = (batch[name].to_pylist() for name in ("prompt_id", "index", "number", "role"))
            for key, role, piece in zip(
                zip(*of_rows, strict=True), roles, pieces(batch["token_ids"]), strict=True
            ):
                if role == TRACK:
                    self.tokens.setdefault(key, array("i")).frombytes(piece.tobytes())
        gone = set(ended)
        self.tokens = {key: found for key, found in self.tokens.items() if key[:2] not in gone}


class _Record:
    """Recorded rollouts of a step, as far as this view needs them."""

    def __init__(self) -> None:
        self.complete: set[RolloutKey] = set()
        self.suspended: set[RolloutKey] = set()
        self.questions: dict[str, str] = {}
        """Questions by the prompt's id."""
        self._tails: dict[Path, _Tail] = {}

    def read(self, folder: Path) -> None:
        """Read new rows."""
        for path in step_files(folder):
            tail = self._tails.setdefault(path, _Tail(path, COLUMNS))
            for batch in tail.read():
                for row in batch.to_pylist():
                    if row["role"] == PROMPT:
                        self.questions[row["prompt_id"]] = row["question"]
                    elif row["role"] == END:
                        ended = self.suspended if row["outcome"] == "suspended" else self.complete
                        ended.add((row["prompt_id"], row["index"]))
