"""Rollouts on disk, one JSON line each, written as they complete.

A line is handed to the operating system whole, in one write, so a process killed at any moment leaves at
most one torn last line; reading drops it, and so does the next ``Recorder`` of the same file before it
appends. Numbers are written so that they read back identically.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_eqlen.types import Grade, Group, Pair, Rollout, SampledTree, Segment, Stream

logger = logging.getLogger(__name__)


def rollout_key(rollout: Rollout) -> tuple[str, int]:
    """What a rollout is of: the prompt's id and the stream's number (0 for a group)."""
    return rollout.prompt_id, rollout.index if isinstance(rollout, Stream) else 0


class Recorder:
    """Appends rollouts to ``path``; makes the folder, and continues a file that a crash left behind."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 (closed by close)
        _drop_torn_line(self.path, self.file)

    def write(self, rollout: Rollout) -> None:
        """Append one rollout, with the grades it has by now."""
        line = memoryview(json.dumps(to_json(rollout)).encode() + b"\n")
        while line:  # a full disk raises; a signal may shorten a write
            line = line[self.file.write(line) :]

    def close(self) -> None:
        """Wait until everything is on the disk (a crash of the machine, not only of the process)."""
        os.fsync(self.file.fileno())
        self.file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_dump(path: str | Path) -> list[Rollout]:
    """The rollouts of a dump, in the order they were written. A torn last line is dropped with a
    warning. Raises ValueError with file and line for anything else that is not a rollout."""
    data = Path(path).read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        logger.warning("%s: dropped a torn last line of %d bytes", path, len(data) - len(complete))
    rollouts = []
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            rollouts.append(from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: expected a rollout, found {line[:80]!r} ({error})") from None
    return rollouts


def to_json(rollout: Rollout) -> dict[str, Any]:
    return {"type": type(rollout).__name__.lower()} | asdict(rollout)


def from_json(record: dict[str, Any]) -> Rollout:
    """The inverse of ``to_json``; ValueError for an unknown type, KeyError or TypeError for its fields."""
    fields = dict(record)
    kind = fields.pop("type")
    if kind == "group":
        fields["completions"] = [_segment(one) for one in fields["completions"]]
        return Group(**fields)
    if kind == "sampledtree":
        fields["steps"] = [_segment(one) for one in fields["steps"]]
        return SampledTree(**fields)
    if kind != "stream":
        raise ValueError(f"type: expected stream, group or sampledtree, found {kind!r}")
    fields["pairs"] = [Pair(_segment(pair["a"]), _segment(pair["b"])) for pair in fields["pairs"]]
    fields["tail"] = _segment(fields["tail"]) if fields["tail"] is not None else None
    return Stream(**fields)


def _segment(fields: dict[str, Any]) -> Segment:
    grade, mask = fields["grade"], fields.get("sampling_mask")
    return Segment(
        **fields
        | {
            "grade": Grade(**grade) if grade is not None else None,
            "sampling_mask": [tuple(kept) for kept in mask] if mask is not None else None,
        }
    )


def _drop_torn_line(path: Path, file: Any) -> None:
    file.seek(0)
    data = file.read()
    complete = data.rfind(b"\n") + 1
    if complete < len(data):
        logger.warning(
            "%s: dropped a torn last line of %d bytes before appending", path, len(data) - complete
        )
        file.truncate(complete)
