"""Files and folders that appear whole or not at all, and the names of steps on disk.

    write_text(path, text), write_json(path, data)    a file in place of what was there
    read_json(path)                                   what a JSON file holds
    replaced(path)                                    the same for a file that something else writes
    new_folder(path)                                  a folder under a new name

All are flushed to disk before they get their final name. A process that is killed leaves the old file, or no
folder, and something called ``.NAME.*.partial``; ``new_folder`` and ``sweep`` remove what a killed
``new_folder`` left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_FAULTS = (*DISK_FULL, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
"""Errors of a write that do not say which file it was for."""

LATEST = "latest"
"""In a folder of checkpoints: the file that names the one in force."""

LOCK = ".{name}.eqlen-lock"
"""Lock file beside a folder that is being made: its maker holds the lock; the file holds the temporary
name."""


class CheckpointError(ValueError):
    """Weights or a checkpoint that cannot be read or written; the message names the file and the tensor."""


def step_name(step: int) -> str:
    """``step-00000012``: sorts by name as by number."""
    return f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """The inverse of ``step_name``; None for any other name."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


def step_folders(parent: Path) -> list[tuple[int, Path]]:
    """(number, folder) of the steps in ``parent``, in order."""
    named = ((step_number(path.name), path) for path in parent.glob("step-*") if path.is_dir())
    return sorted((number, path) for number, path in named if number is not None)


def write_text(path: Path, text: str) -> None:
    """Put a UTF-8 file in place of ``path``."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Put ``data`` in place of ``path`` as indented JSON."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def read_json(file: Path) -> Any:
    """Return the content of a JSON file. Raises ValueError with the file's name and the reason."""
    try:
        return json.loads(file.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def expecting(what: str, file: Path) -> Iterator[None]:
    """Raise ValueError that names ``file`` where the block finds in its content something else than
    ``what``."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file}: expected {what}, found something else ({found})") from None


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in an OSError of the block that names no file: a failed write, of a full disk for
    example, does not say where."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in DISK_FAULTS:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It replaces ``path`` when the block ends; after an error ``path`` is
    unchanged."""
    partial = path.with_name(_partial_name(path))
    with naming(path):
        try:
            yield partial
            sync(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        sync(path.parent)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill. It is renamed to ``path`` when the block ends; an error removes it.

    Until then no other process can make ``path``. Raises CheckpointError where ``path`` exists, or another
    process is making it.
    """
    path = path.absolute()
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), _claimed(path) as note:
        partial = path.with_name(_partial_name(path))
        _write_note(note, partial.name)
        partial.mkdir()
        try:
            yield partial
            sync_tree(partial)
            refuse_existing(path)
            partial.rename(path)
            sync(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the unfinished folders that killed processes left in ``folder``."""
    for lock in folder.glob(LOCK.format(name="*")):
        name = lock.name.removeprefix(".").removesuffix(".eqlen-lock")
        with contextlib.suppress(CheckpointError), _claimed(folder / name):
            pass


def refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise CheckpointError(f"{path}: exists already; choose another output or remove it")


def refuse_unwritable(folder: Path) -> None:
    """Raise OSError unless ``folder`` is a folder, or can be made, and this process may write there."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    wrong = 0
    if not there.is_dir():
        wrong = errno.ENOTDIR
    elif os.statvfs(there).f_flag & os.ST_RDONLY:
        wrong = errno.EROFS
    elif not os.access(there, os.W_OK | os.X_OK):
        wrong = errno.EACCES
    if wrong:
        raise OSError(wrong, os.strerror(wrong), str(there))


def unused(path: Path) -> Path:
    """``path``, or ``NAME-2``, ``NAME-3`` ... where that is taken."""
    names = itertools.chain([path.name], (f"{path.stem}-{n}{path.suffix}" for n in itertools.count(2)))
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until everything in ``folder`` is on disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[TextIO]:
    """Lock ``path`` against other processes until the block or this process ends, and remove what a killed
    holder left. Yields the lock file."""
    lock = path.with_name(LOCK.format(name=path.name))
    with _locked(lock, path) as note:
        try:
            _sweep(note, path)
            yield note
        finally:
            lock.unlink()  # while locked: a process that opened it too sees that it is gone


@contextlib.contextmanager
def _locked(lock: Path, path: Path) -> Iterator[TextIO]:
    while True:
        with open(lock, "a+", encoding="utf-8") as note:
            try:
                fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"{path}: another process is writing it") from None
            if lock.exists() and os.path.samestat(os.fstat(note.fileno()), lock.stat()):
                yield note
                return


def _sweep(note: TextIO, path: Path) -> None:
    note.seek(0)
    left = path.with_name(note.read().strip() or "nothing")
    if re.fullmatch(_partial_pattern(path), left.name) and left.is_dir() and not left.is_symlink():
        logger.warning("%s: removed, a process that was killed left it", left)
        shutil.rmtree(left)


def _write_note(note: TextIO, text: str) -> None:
    note.truncate(0)
    note.write(text)
    note.flush()


def _partial_name(path: Path) -> str:
    return f".{path.name}.{secrets.token_hex(4)}.partial"


def _partial_pattern(path: Path) -> str:
    return re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.partial"
