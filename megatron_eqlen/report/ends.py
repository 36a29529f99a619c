"""Records in a run's folder of how its tries ended: errors, hangs, and SLURM giving up."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_eqlen.processes.failures import FIRST, free_space
from megatron_eqlen.processes.hang import HANGS, INDEX
from megatron_eqlen.report.run_folder import CANCELLED, GIVEN_UP, STALLED


@dataclass(frozen=True)
class Hang:
    """A try that hung."""

    file: str
    """File to read first."""
    cause: str
    time: float
    """Time of the hang in seconds since 1970."""


@dataclass(frozen=True)
class EndRecord:
    first_error: str | None
    """The error that ended the newest try, in one line."""
    error_file: str | None
    hangs: list[Hang] = field(default_factory=list)
    """Hangs of all tries, the newest first."""
    hung: bool = False
    """True if the newest try hung."""
    given_up: str | None = None
    stalled_tries: int = 0
    cancelled: str | None = None
    """Notice that SLURM told the newest try to end, in one line."""


def read_end_record(folder: Path, since: float) -> EndRecord:
    """Read the records of the run in ``folder``, whose newest try began ``since`` (seconds since 1970)."""
    error, hangs = folder / FIRST, read_hangs(folder / HANGS)
    said = _text(error)
    if not said and error.exists():
        said = (
            f"an error that could not be written down, as on a full disk ({free_space(folder)} now); "
            f"the last lines of the run's output say it"
        )
    return EndRecord(
        said.splitlines()[0] if said else None,
        str(error) if said else None,
        hangs,
        bool(hangs) and hangs[0].time >= since,
        _text(folder / GIVEN_UP) or None,
        _count(folder / STALLED),
        _text(folder / CANCELLED) or None,
    )


def read_hangs(folder: Path) -> list[Hang]:
    """Read the hangs that tries recorded under ``folder``, the newest first. Tries that still run, or did not
    hang, have folders with empty files."""
    hangs = [hang for path in folder.glob("*") if path.is_dir() and (hang := _hang(path))]
    return sorted(hangs, key=lambda hang: -hang.time)


def _hang(folder: Path) -> Hang | None:
    index = folder / INDEX
    if text := _text(index):
        return Hang(str(index), text.splitlines()[0], index.stat().st_mtime)
    for stacks in sorted(folder.glob("rank-*.txt")):
        if _text(stacks):
            rank = stacks.stem.removeprefix("rank-")
            cause = f"no thread of rank {rank} could run Python: C code kept its lock"
            return Hang(str(stacks), cause, folder.stat().st_mtime)
    return None


def _count(path: Path) -> int:
    text = _text(path) or "0"
    if not text.isdecimal():
        raise ValueError(f"{path}: expected a number of tries, found {text[:80]!r}")
    return int(text)


def _text(path: Path) -> str:
    """Return the file's text, empty if there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
