"""Atomic writes of files and folders, and the names of steps on disk.

    write_text(path, text), write_json(path, data)    replace a file
    read_json(path)                                   read a JSON file
    shallow_json(data)                                read JSON from an untrusted source
    replaced(path)                                    replace a file that other code writes
    new_folder(path)                                  create a folder under a new name
    scratch(kind)                                     create a temporary folder of this process

All reach the disk before they get their names: a killed process leaves the old file and ``.NAME*.partial``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_FAULTS = (*DISK_FULL, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
"""Errors of a write that do not name its file."""

LATEST = "latest"
"""File in a folder of checkpoints that names the checkpoint in force."""

ABANDONED = 60.0
"""Seconds without a write after which a partial file is nobody's."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def scratch(kind: str) -> str:
    """Make ``/tmp/eqlen-KIND-*``, locked until this process ends, and remove such folders without a lock.
    Raises OSError where less than 1 MiB is free: ranks that meet at a torn file would wait without end."""
    for left in glob.glob(f"{tempfile.gettempdir()}/eqlen-{kind}-*"):
        if (lock := _lock(left)) is not None:
            removed(left)
            os.close(lock)
    made = tempfile.mkdtemp(prefix=f"eqlen-{kind}-")
    if (room := shutil.disk_usage(made)).total and room.free < 1 << 20:  # ramfs counts nothing
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tempfile.gettempdir())
    # another process may take it for one that was left, before it is locked
    # The lock's descriptor stays open on purpose: the lock ends with this process.
    return made if _lock(made) is not None and os.path.exists(made) else scratch(kind)


def removed(folder: str) -> None:
    """Remove a folder that others wrote, however deep it is, and what has no rights. Follow no link."""
    script = 'rm -rf "$0" || { chmod -R u+rwx "$0"; rm -rf "$0"; }'
    subprocess.run(["sh", "-c", script, folder], stderr=subprocess.DEVNULL, check=False)


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder's files over those of ``target``, which can be written to: archives are read-only."""
    for folder, _, names in os.walk(source, followlinks=True):
        (there := target / Path(folder).relative_to(source)).mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(file := Path(folder, name), there / name)
            (there / name).chmod(file.stat().st_mode | 0o200)


def _lock(folder: str) -> int | None:
    """Return the descriptor that locks a folder; None if it cannot be locked."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None


def is_lfs_pointer(file: Path) -> bool:
    """Return True for the text that stands for a large file in a repository cloned without Git LFS."""
    with file.open("rb") as opened:
        return opened.read(len(LFS_POINTER)) == LFS_POINTER


def step_name(step: int) -> str:
    """Return ``step-00000012``, which sorts by name as by number."""
    return f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """Return the step's number from its name; None for any other name."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


def step_folders(parent: Path) -> list[tuple[int, Path]]:
    """Return (number, folder) of the steps in ``parent``, in order."""
    if not parent.is_dir():
        return []
    with os.scandir(parent) as entries:
        named = [(step_number(entry.name), entry.name) for entry in entries if entry.is_dir()]
    return sorted((number, parent / name) for number, name in named if number is not None)


def streams_of(run: Path) -> Path:
    """Return the folder of the steps that a run or ``eqlen harvest`` has recorded."""
    return run / "streams" if (run / "streams").is_dir() else run


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, atomically."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` to ``path`` as indented JSON, atomically."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def read_json(file: Path) -> Any:
    """Return the content of a JSON file. Raises ValueError with the file's name and the reason."""
    text = read_text(file)
    try:
        # A clone without Git LFS has a text of three lines in place of a large file.
        if text.encode().startswith(LFS_POINTER):
            raise ValueError("a pointer of Git LFS: run git lfs pull there")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None


def at_once(name: str, flags: int) -> int:
    """Open a file, or a pipe without waiting for its other end: an ``opener``."""
    return os.open(name, flags | os.O_NONBLOCK, 0o666)


def opened(path: Path) -> BufferedReader:
    """Open a file for its bytes. Raises ValueError for a pipe or a device, whose end may never come."""
    file = open(path, "rb", opener=at_once)  # noqa: SIM115 (closed by the caller)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path}: expected a file, found a pipe or a device")
    return file


def read_text(file: Path) -> str:
    """Return the content of a file in UTF-8. Raises ValueError with the file's name and the reason."""
    try:
        with opened(file) as text:
            return text.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8: {error}") from None
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def expecting(what: str, file: Path) -> Iterator[None]:
    """Raise ValueError that names ``file`` if the block fails because its content is not ``what``."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        # Inner code has named the file already.
        if str(file) in str(error):
            raise
        fault = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file}: expected {what}, found something else ({fault})") from None


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError of the block that names no file, as that of a failed write (a full disk)."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in DISK_FAULTS:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. It replaces ``path`` when the block ends, unless by an error."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with naming(path):
        # Eight characters are those of ``token_hex(4)`` in names of this function.
        remove_partial(path.parent, f"{glob.escape(path.name)}.????????")
        try:
            yield partial
            # Content before name: after a crash the name must not point at an empty file.
            sync(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        sync(path.parent)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder ``.NAME.partial`` to fill. It is renamed to ``path`` when the block ends; an
    error removes it. Raises ValueError if ``path`` exists, or if its ``.NAME.partial`` does."""
    path = path.absolute()
    # Refused before the work, and again after it: somebody may create it meanwhile.
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with naming(path):
        try:
            # The folder is the lock: of two writers one finds it there.
            partial.mkdir()
        except FileExistsError:
            left = f"or was killed and left {partial}: remove it then"
            raise ValueError(f"{path}: another process is writing it, {left}") from None
        try:
            yield partial
            # Folders too: the sync of a folder makes its list of names durable.
            for written in (*partial.rglob("*"), partial):
                sync(written)
            # ``rename`` would replace an empty folder without an error.
            refuse_existing(path)
            partial.rename(path)
            sync(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def remove_partial(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left of ``replaced``, and of ``new_folder`` that nobody is filling."""
    for partial in folder.glob(f".{name}.partial"):
        if partial.is_dir():
            shutil.rmtree(partial)
        elif time.time() - partial.lstat().st_mtime > ABANDONED:
            partial.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise ValueError(f"{path}: exists already; choose another output or remove it")


def refuse_unwritable(folder: Path) -> None:
    """Raise OSError unless ``folder`` is a folder, or can be created, and this process may write there."""
    # A folder that does not exist yet is created in the nearest parent that does.
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    wrong = 0
    if not there.is_dir():
        wrong = errno.ENOTDIR
    # ``os.access`` refuses a read-only file system, too, but not with this reason.
    elif os.statvfs(there).f_flag & os.ST_RDONLY:
        wrong = errno.EROFS
    elif not os.access(there, os.W_OK | os.X_OK):
        wrong = errno.EACCES
    if wrong:
        raise OSError(wrong, os.strerror(wrong), str(there))


def unused(path: Path, prefix: str = "") -> Path:
    """Return ``path``, or ``NAME-2``, ``NAME-3`` ... if the name, also after ``prefix``, is taken."""
    names = itertools.chain([path.name], (f"{path.stem}-{n}{path.suffix}" for n in itertools.count(2)))
    taken = {name.removeprefix(prefix) for name in os.listdir(path.parent)}
    return path.with_name(next(name for name in names if name not in taken))


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


DEEPEST = 64
# An opening bracket is 1 and a closing one -1, as signed bytes; their running sum is the depth.
_DEEPER = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_OTHERS = bytes({*range(256)} - {*b"[{]}"})


def shallow_json(data: bytes) -> Any:
    """Return the JSON in ``data``. Raises ValueError for what is none, for nesting at which parsers,
    comparisons and templates end in a RecursionError, and for half a surrogate pair, which no UTF-8 has."""
    text = data.decode()
    # Brackets in strings do not nest: ``{"a": "[[["}`` leaves ``{: }``. A string without its end goes whole.
    marks = re.sub(rb'"(?:[^"\\]|\\.)*+"?+', b"", data, flags=re.DOTALL)  # without strings
    opened = memoryview(marks.translate(_DEEPER, _OTHERS)).cast("b")
    if max(itertools.accumulate(opened), default=0) > DEEPEST:
        raise ValueError(f"JSON: expected at most {DEEPEST} lists and objects in each other, found more")
    read = json.loads(text)
    # Only an escape, such as "\ud83d" alone, can hold half a pair: decoding has refused raw ones.
    if rb"\ud" in data.lower():
        # UnicodeEncodeError, which is a ValueError.
        json.dumps(read, ensure_ascii=False).encode()
    return read
