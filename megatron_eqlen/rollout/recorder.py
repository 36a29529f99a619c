"""Rollouts on disk, one JSON line each, written as they complete.

    {"type": "header", "version": 2}
    {"type": "prompt", "prompt_id": "deepmath/a.parquet#17", ...}     before the first rollout that answers it
    {"type": "equal_length", "prompt": "deepmath/a.parquet#17", ...}

A line is handed to the operating system whole, in one write, so a process killed at any moment leaves at
most one torn last line; reading drops it, and so does the next ``Recorder`` of the same file before it
appends. Numbers are written so that they read back identically.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from megatron_eqlen.files import replaced, unused
from megatron_eqlen.sampling import KINDS, kind_of
from megatron_eqlen.types import Prompt, Rollout, rollout_key, training_order

VERSION = 2
"""Version of the format. Files of version 1 have no header, and hold ids of prompts but not the prompts."""

FILES = "rank-*.jsonl"
"""Files in a step's folder, one for each rank that records."""

logger = logging.getLogger(__name__)


class Recorder:
    """Appends rollouts to ``path``; makes the folder, and continues a file that a crash left behind."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 (closed by close)
        lines = _whole_lines(self.path, self.file)
        self.file.truncate(sum(map(len, lines)))
        self.prompts = set(_Dump(self.path, lines).prompts) if lines else set()
        """Ids of the prompts that the file holds."""
        if not lines:
            self._append({"type": "header", "version": VERSION})

    def write(self, rollout: Rollout) -> None:
        """Append one rollout, with the grades it has by now, after its prompt."""
        if rollout.prompt_id not in self.prompts:
            self._append({"type": "prompt"} | asdict(rollout.prompt))
            self.prompts.add(rollout.prompt_id)
        self._append(to_json(rollout))

    def close(self) -> None:
        """Wait until everything is on the disk (a crash of the machine, not only of the process)."""
        os.fsync(self.file.fileno())
        self.file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, record: dict[str, Any]) -> None:
        line = memoryview(json.dumps(record).encode() + b"\n")
        while line:  # a full disk raises; a signal may shorten a write
            line = line[self.file.write(line) :]


def read_dump(path: str | Path) -> list[Rollout]:
    """The rollouts of a file, in the order they were written. A torn last line is dropped with a warning.

    Raises ValueError with file and line for anything else that is not a rollout, and for a file of another
    version of the format.
    """
    path = Path(path)
    with path.open("rb") as file:
        return _Dump(path, _whole_lines(path, file)).rollouts


def record_grades(path: Path, graded: Iterable[Rollout]) -> None:
    """Replace the raw records by graded rollouts, atomically: a crash leaves the old file or the new one."""
    rollouts = {rollout_key(rollout): rollout for rollout in read_dump(path)}
    rollouts |= {rollout_key(rollout): rollout for rollout in graded}
    with replaced(path) as partial, Recorder(partial) as recorder:
        for rollout in rollouts.values():
            recorder.write(rollout)


def read_step(folder: Path) -> list[Rollout]:
    """The rollouts of a step's folder, whichever ranks recorded them, in training order; each once."""
    found: dict[tuple[str, int], Rollout] = {}
    for path in sorted(folder.glob(FILES)):
        for rollout in read_dump(path):
            found.setdefault(rollout_key(rollout), rollout)
    return sorted(found.values(), key=training_order)


def set_aside_stale(folder: Path, policy_version: int) -> None:
    """Rename a step's record if weights of another version generated it.

    So it is where a run has gone back to a checkpoint, and an update that was skipped before was taken now.
    """
    found = {rollout.policy_version for rollout in read_step(folder)}
    if found - {policy_version}:
        aside = unused(folder.with_name(f"stale-{folder.name}"))
        folder.rename(aside)
        logger.warning(
            "%s: generated with policy version %s, but this run is at %d: set aside as %s",
            folder,
            ", ".join(map(str, sorted(found))),
            policy_version,
            aside.name,
        )


def to_json(rollout: Rollout) -> dict[str, Any]:
    """The rollout under the name of its sampling kind, with its prompt's id in place of its prompt."""
    kind = kind_of(rollout)
    fields = _adapter(kind.rollout).dump_python(rollout, exclude={"prompt"})
    return {"type": kind.name, "prompt": rollout.prompt_id} | fields


def from_json(record: dict[str, Any], prompts: dict[str, Prompt]) -> Rollout:
    """The inverse of ``to_json``; ValueError or KeyError for a record that is not one."""
    kind = record["type"]
    if kind not in KINDS:
        raise ValueError(f"type: expected {', '.join(KINDS)}, found {kind!r}")
    fields = {name: value for name, value in record.items() if name != "type"}
    return _adapter(KINDS[kind].rollout).validate_python(fields | {"prompt": prompts[record["prompt"]]})


@cache
def _adapter(record: type) -> TypeAdapter:
    return TypeAdapter(record)


class _Dump:
    """Reads the lines of a file: header, prompts, rollouts."""

    def __init__(self, path: Path, lines: Iterable[bytes]) -> None:
        self.prompts: dict[str, Prompt] = {}
        self.rollouts: list[Rollout] = []
        for number, line in enumerate(lines, 1):
            try:
                self._take(json.loads(line), first=number == 1)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number}: expected a rollout, found {line[:80]!r} ({error})"
                ) from None

    def _take(self, record: dict[str, Any], first: bool) -> None:
        kind = record["type"]
        if (first, kind) == (True, "header") and record["version"] == VERSION:
            return
        if first:
            found = record["version"] if kind == "header" else 1
            raise ValueError(f"format: expected version {VERSION}, found {found}")
        if kind == "prompt":
            prompt = Prompt(**{name: value for name, value in record.items() if name != "type"})
            self.prompts[prompt.prompt_id] = prompt
        else:
            self.rollouts.append(from_json(record, self.prompts))


def _whole_lines(path: Path, file: BinaryIO) -> list[bytes]:
    """The lines of a file, without a torn last one."""
    file.seek(0)
    data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        logger.warning("%s: dropped a torn last line of %d bytes", path, len(data) - len(complete))
    return complete.splitlines(keepends=True)
