"""A workspace: files that commands read and change, in the sandbox for commands.

    template ──pack──► folder ──command──► folder ──command──► folder ──► grade
                                  └──fork──► the same folder, another future

No process lives between two commands, so the folder, a tar that is never changed, is the whole state, and a
fork copies nothing: both environments hold the same tar until one of them runs a command.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from functools import cache, lru_cache
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from megatron_eqlen.environments.environment import Environment, require_limits
from megatron_eqlen.environments.tool_calls import ToolEnvironment, tool
from megatron_eqlen.files import naming, opened, scratch
from megatron_eqlen.graders.sandbox import client
from megatron_eqlen.graders.sandbox.client import CommandEnd, SandboxPool, folder_files
from megatron_eqlen.graders.sandbox.command import CommandLimits, FolderError
from megatron_eqlen.graders.sandbox.probe import NO_COMMANDS, PYTHON, commands_refused
from megatron_eqlen.graders.sandbox.program import Isolation
from megatron_eqlen.recipe.contents import commit, repository
from megatron_eqlen.recipe.plugins import load_object
from megatron_eqlen.types import Grade, Prompt

KEY = "environment.options"
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1" && wc -c < "$1"'
LINES = 400
"""Lines that ``read`` shows without being asked for more or fewer."""
GRADES = "test", "expected", "function"
TEMPLATES = "template", "hidden", "expected"
LIMITS = "timeout", "memory_mb", "processes", "folder_mb", "files", "longest_output"
NUMBERS = count()
"""Numbers of folders and of forks; none is given twice."""
DAMAGED = EOFError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError
"""Errors of archives, besides OSError and TarError."""


class PackedFolder:
    """A folder in a file of its own, which goes with the last environment that holds it."""

    def __init__(self, path: Path, temporary: bool = True) -> None:
        self.path = path
        if temporary:
            weakref.finalize(self, path.unlink, missing_ok=True)

    def __deepcopy__(self, memo: Any) -> PackedFolder:
        return self  # nothing changes it

    def read(self) -> bytes:
        """Return the tar. A path alone would not keep the file."""
        return self.path.read_bytes()

    @classmethod
    def of(cls, content: bytes) -> PackedFolder:
        """Write a folder below the temporary directory. Raises OSError, of a full disk for instance."""
        kept = cls(Path(_scratch(), f"{next(NUMBERS)}.tar"))
        with naming(kept.path):
            kept.path.write_bytes(content)
        return kept


class Workspace(ToolEnvironment):
    """Runs commands in a folder. A turn without a call ends the response."""

    def __init__(
        self,
        prompt: Prompt,
        seed: int,
        template: str,
        test: str | None = None,
        hidden: str | None = None,
        expected: str | None = None,
        function: str | None = None,
        timeout: float = 20.0,
        memory_mb: int = 1024,
        processes: int = 64,
        folder_mb: int = 256,
        files: int = 20_000,
        longest_output: int = 4000,
        readable: list[str] | None = None,
        variables: dict[str, str] | None = None,
        command: list[str] | None = None,
        root: bool = False,
        reward: str | None = None,
    ) -> None:
        """``template``: a folder, an archive (tar, zip), or ``repository@commit`` of Git. The response is
        graded by one of ``test``, a command whose status 0 is reward 1; ``expected``, a template whose files
        must be in the folder; ``function``, the import path of ``f(files, prompt)``, which returns a reward
        and gets bytes by path. None: the prompt's grader grades the last turn. ``hidden``: a template whose
        files are laid over the folder before ``test``. In these, ``{gold}`` is the prompt's gold.

        ``timeout``: seconds of a command. ``readable``: places of this machine that commands see, too.
        ``variables``: of their environment. ``command``: start of a command that runs another in a container,
        with ``{folder}`` for the folder: the sandbox then only limits time, output and sizes. ``root``: the
        folder is the root of what commands see, which start as ``/root/.profile`` says, the test as that of
        ``hidden`` or ``template``. ``reward``: a file of the folder in which ``test`` leaves it, a number.
        """
        self.prompt, self.seed = prompt, seed
        self.limits = CommandLimits(timeout, memory_mb, processes, folder_mb, files, longest_output)
        start = [shutil.which(command[0]) or command[0], *command[1:]] if command else []
        self.setting = client.Command((), "", variables or {}, readable or [], start, root)
        self.grading = {"test": test, "expected": expected, "function": function}
        self.hidden, self.reward, self.calls = hidden, reward, 0
        # The template stays known: its profile starts the test, whatever the policy made of its own.
        self.folder = self.template = self._template(template)

    @tool
    def run(self, command: str) -> str:
        """Run a shell command in the folder. Returns what it prints."""
        return self._said(self.execute(["bash", "-c", command]))

    @tool
    def read(self, path: str, first: int = 1, lines: int = LINES) -> str:
        """Return lines of a file, from the line ``first`` on."""
        return self._said(self.execute(["sed", "-n", f"{first},{first + lines - 1}p", "--", path]))

    @tool
    def write(self, path: str, text: str) -> str:
        """Write a file, new or in place of an old one. Returns its bytes."""
        return self._said(self.execute(["sh", "-c", WRITE, "sh", path], text))

    def execute(self, arguments: list[str], stdin: str = "", over: bytes | None = None) -> CommandEnd:
        """Run a program in the folder, or in the folder ``over``, which is not kept, with room beside it."""
        size = len(over or b"")
        # a page in memory is longer than a record of a tar
        room, files = self.limits.folder_mb + (size >> 18), self.limits.files + size // tarfile.BLOCKSIZE
        limits = replace(self.limits, folder_mb=room, files=files)
        before = self.folder.read() if over is None else over
        variables = {"EQLEN_SEED": str(self.draw()), **self.setting.environment}
        if self.setting.root:
            variables = {"HOME": "/root", **variables}
            if over is None:  # a test brings the profile that the policy did not write
                arguments = ["sh", "-lc", 'exec "$@"', "sh", *arguments]
        asked = replace(self.setting, arguments=arguments, stdin=stdin, environment=variables)
        end = _sandboxes().run(lambda sandbox: sandbox.command(asked, before, limits))
        self.folder_bytes += len(before) + len(end.folder)
        self.folder_seconds += end.packing_seconds
        if over is None and end.folder != before:
            self.folder = PackedFolder.of(end.folder)
        return end

    def draw(self) -> int:
        """Return the seed of the next command: of this line alone, the same when a run resumes."""
        self.calls += 1
        return random.Random(f"{self.seed}/{self.forked_as}/{self.calls - 1}").getrandbits(31)

    def _said(self, end: CommandEnd) -> str:
        # What the policy is told beside the program's output.
        notes = []
        if end.status == "time_limit":
            notes.append(f"stopped: more than {self.limits.seconds:g} s")
        elif end.status == "memory_limit":
            notes.append(f"stopped: more than {self.limits.memory_mb} MiB")
        elif end.code:
            notes.append(f"exit status {end.code}")
        if end.left_running:
            notes.append(f"{end.left_running} processes that it left were stopped")
        if end.left_out:
            notes.append(f"{end.left_out} sockets or devices are not kept")
        if end.unkept:
            notes.append(f"the folder is as it was before, because it cannot be kept: {end.unkept}")
        said = [end.output.rstrip("\n"), *(f"({note})" for note in notes)]
        return "\n".join(filter(None, said)) or "(no output)"

    def grade(self) -> Grade | float | None:
        test, expected, function = (self.grading[name] for name in GRADES)
        if test:
            above = self._template(self.hidden).read() if self.hidden else client.EMPTY_FOLDER
            # without a reward that the policy wrote
            before = laid_over(self.folder.read(), above, {self.reward} if self.reward else set())
            command = ["bash", "-c", test]
            if self.setting.root:  # the policy's own profile could end it with status 0
                profile = (folder_files(self.template.read()) | folder_files(above)).get("root/.profile", b"")
                command = ["sh", "-c", profile.decode() + '\nexec "$@"', "sh", *command]
            end = self.execute(command, over=before)
            ended, last = end.status == "ended", self._said(end)[-200:]
            reward = float(ended and end.code == 0)
            # The test's own number takes the place of its status.
            if self.reward and ended:
                content = folder_files(end.folder).get(self.reward, b"")
                try:
                    # a number, or JSON that has one, as Harbor's reward.json
                    reward = float(json.loads(content)["reward"] if b"{" in content else content)
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    found = f"{content[:80]!r}; the test printed {last!r}"
                    key = f"{KEY}.reward: {self.reward}"
                    raise ValueError(f"{key}: expected a number, found {found}") from None
            return Grade(reward, "passed" if reward else "failed", None, "workspace", end.seconds, last)
        files = folder_files(self.folder.read()) if expected or function else {}
        if expected:
            wanted = folder_files(self._template(expected).read())
            # Files that are missing or differ; others may lie beside them.
            wrong = [path for path, content in wanted.items() if files.get(path) != content]
            verdict, names = "wrong" if wrong else "correct", " ".join(wrong)[:200]
            return Grade(float(not wrong), verdict, None, "workspace", 0.0, names)
        return load_object(function, f"{KEY}.function")(files, self.prompt) if function else None

    def fork(self) -> Environment:
        other = super().fork()
        other.forked_as = (*self.forked_as, next(NUMBERS))
        other.folder_bytes, other.folder_seconds = 0, 0.0
        return other

    def save(self, place: Path) -> str:
        # Named by its content: equal folders of many lines are kept once.
        kept = place / f"{hashlib.sha256(self.folder.read()).hexdigest()}.tar"
        if not kept.exists():
            # Written under another name first: a killed process leaves no half folder under this one.
            whole = kept.with_suffix(f".{os.getpid()}-{id(self)}")
            try:
                shutil.copyfile(self.folder.path, whole)
                whole.rename(kept)
            finally:  # a full disk keeps no part of it
                whole.unlink(missing_ok=True)
        return json.dumps([kept.name, self.forked_as, self.calls])

    def load(self, text: str, place: Path) -> None:
        name, forks, self.calls, *_ = json.loads(text)
        self.folder, self.forked_as = PackedFolder(place / name, temporary=False), tuple(forks)
        if hashlib.sha256(self.folder.read()).hexdigest() != Path(name).stem:
            raise ValueError(f"{place / name}: expected the folder that was saved there, found another")

    def _template(self, name: str) -> PackedFolder:
        return packed_template(_with_gold(name, self.prompt.gold), self.limits.folder_mb, self.limits.files)

    @classmethod
    def start(cls, **options: Any) -> None:
        # Options that are wrong, contradict each other, or would have no effect.
        require_limits(options, *LIMITS)
        if len(given := [name for name in GRADES if options.get(name)]) > 1:
            raise ValueError(f"{KEY}: expected one of {', '.join(GRADES)}, found {' and '.join(given)}")
        for key in ("hidden", "reward"):
            if options.get(key) and not options.get("test"):
                raise ValueError(f"{KEY}.{key} acts only with {KEY}.test, found none")
        for key in ("root", "readable"):
            if options.get(key) and options.get("command"):
                raise ValueError(f"{KEY}.{key} acts only without {KEY}.command, whose container has its own")
        if (reward := options.get("reward")) and os.path.normpath(f"/a/{reward}") != f"/a/{reward}":
            raise ValueError(f"{KEY}.reward: expected a path in the folder, as logs/score, found {reward!r}")
        if options.get("function"):
            load_object(options["function"], f"{KEY}.function")
        if not options.get("command") and (refused := commands_refused()) is not None:
            raise ValueError(f"environment.name: workspace: {refused}: {NO_COMMANDS}; or give {KEY}.command")
        # Templates without a gold are the same for all prompts: packed here, errors show at once.
        for key in TEMPLATES:
            if (name := options.get(key)) and "{gold}" not in name:
                packed_template(name, options.get("folder_mb", 256), options.get("files", 20_000), key)
        # A first command in an empty folder: bash must start, and what it writes must stay.
        with tempfile.TemporaryDirectory() as empty:
            first = cls(Prompt("", [], "", "", ""), 0, **dict(options, template=empty))
        try:
            end = first.execute(["bash", "-c", "echo kept > file"])
        except (client.SandboxError, ValueError) as error:
            raise ValueError(f"{KEY}: {error}") from None
        said = " ".join(first._said(end).split())
        if end.status != "ended" or end.code:
            raise ValueError(f"{KEY}: expected that bash starts, found {said}")
        if folder_files(first.folder.read()).get("file") != b"kept\n":
            raise ValueError(f"{KEY}.command: expected that bash writes a file in {{folder}}, found {said}")

    @classmethod
    def end(cls) -> None:
        packed_template.cache_clear()
        if not os.listdir(place := _scratch()):  # else an environment that lives on has a folder there
            os.rmdir(place)
        for cached in (_sandboxes, _scratch):
            cached.cache_clear()


@cache
def _sandboxes() -> SandboxPool:
    return SandboxPool(lambda: client.Sandbox(Isolation(True, True, True), PYTHON))


@cache
def _scratch() -> str:
    """Return a directory for folders, which a later process removes if ``end`` does not."""
    return scratch("workspaces")


def require_templates(golds: Mapping[str, str], options: Mapping[str, Any]) -> int:
    """Return how many templates ``options`` name with ``{gold}``. Raises ValueError if one is missing."""
    keys = [key for key in TEMPLATES if "{gold}" in str(options.get(key))]
    named = {_with_gold(options[key], gold): (key, row) for gold, row in golds.items() for key in keys}
    if missing := [name for name in named if not (os.path.exists(name) or commit(name))]:
        key, row = named[missing[0]]
        found = f"none at {missing[0]} ({len(missing)} of {len(named)} are missing)"
        raise ValueError(f"{KEY}.{key}: {row}: expected a template, found {found}")
    return len(named)


def _with_gold(name: str, gold: str) -> str:
    """Return the template's name for a prompt. Raises ValueError for a gold that leads elsewhere."""
    # Golds come from data: none may reach a template outside the one that the recipe names.
    leads_out = gold.startswith("/") or ".." in PurePosixPath(gold).parts or not gold.isprintable()
    if "{gold}" in name and (not gold or leads_out):
        raise ValueError(f"{KEY}: {name}: expected a gold that names a template below it, found {gold!r}")
    return name.replace("{gold}", gold)


@lru_cache(maxsize=1024)
def packed_template(name: str, folder_mb: int, files: int, key: str = "template") -> PackedFolder:
    """Pack a folder, an archive, or a commit of a Git repository. Raises ValueError."""
    with tempfile.TemporaryDirectory() as place:
        try:
            if os.path.isdir(name):
                place = name
            elif (at := repository(name)) is not None:
                git, named = at
                # A commit that begins with a dash is no option.
                command = [*git, "archive", "--format=tar", "--end-of-options", named]
                archive = subprocess.run(command, capture_output=True, check=True).stdout
                _unpack(io.BytesIO(archive), place, folder_mb << 20)
            else:
                with opened(Path(name)) as file:
                    _unpack(file, place, folder_mb << 20)
            packed = client.pack_folder(place, folder_mb << 20)
        except (subprocess.CalledProcessError, OSError, FolderError, tarfile.TarError, *DAMAGED) as error:
            said = getattr(error, "stderr", b"").decode(errors="replace").strip() or error
            expected = f"a folder, an archive or repository@commit of at most {folder_mb} MiB (folder_mb)"
            raise ValueError(f"{KEY}.{key}: {name}: expected {expected}, found {said}") from None
    # Counted once packed, links and folders included.
    with tarfile.open(fileobj=io.BytesIO(packed)) as file:
        if (found := len(file.getmembers())) > files:
            raise ValueError(f"{KEY}.{key}: {name}: expected at most {files} files (files), found {found}")
    return PackedFolder.of(packed)


def _unpack(file: BinaryIO, place: str, most_bytes: int) -> None:
    """Unpack a tar or zip, without devices. Raises FolderError for a longer one or a link in a zip."""
    if tarfile.is_tarfile(file):
        with tarfile.open(fileobj=file) as archive:
            _refuse_long((member.size for member in archive), most_bytes)
            archive.extractall(place, filter=_inside)
        return
    with zipfile.ZipFile(file) as zipped:
        _refuse_long((member.file_size for member in zipped.infolist()), most_bytes)
        for member in zipped.infolist():
            # The upper 16 bits are the Unix mode, of which the highest four are the type; 0o12 is a link.
            if (mode := member.external_attr >> 16) >> 12 == 0o12:
                raise FolderError(f"a link in a zip: {member.filename}")
            os.chmod(zipped.extract(member, place), mode & 0o777 or 0o755)


def _refuse_long(sizes: Iterable[int], most_bytes: int) -> None:
    if sum(sizes) > most_bytes:
        raise FolderError(f"its files are longer than {most_bytes >> 20} MiB")


def _inside(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
    if member.ischr() or member.isblk():  # which only root could make
        return None
    if member.islnk():
        tarfile.data_filter(member, place)  # refuses a file of the machine
    return tarfile.tar_filter(member, place)


def laid_over(folder: bytes, above: bytes, without: Set[str] = frozenset()) -> bytes:
    """Return ``folder`` with the files of ``above`` over its own; bytecode and ``without`` are left out."""
    written = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(folder)) as under,
        tarfile.open(fileobj=io.BytesIO(above)) as over,
        tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as both,
    ):
        # Paths that the upper tar or ``without`` takes.
        new = {member.name for member in over if not member.isdir()} | without
        folders = {member.name for member in over if member.isdir()}
        folders.update(str(parent) for name in new for parent in PurePosixPath(name).parents)
        # All others stay, but no file or link where the upper tar has a folder: a link would lead elsewhere.
        gone, old = {*new}, list[tarfile.TarInfo]()
        for member in under:  # a folder comes before what is in it
            place, name = os.path.split(member.name)
            # bytecode may say other things than the source beside it, which it stands for
            if member.name in gone or place in gone or name == "__pycache__":
                gone.add(member.name)
            elif member.isdir() or member.name not in folders:
                old.append(member)
        for archive, member in [*((under, member) for member in old), *((over, member) for member in over)]:
            content = archive.extractfile(member) if member.isreg() or member.islnk() else None
            data = content.read() if content else b""
            # The file that a hard link names may be gone: it gets the content itself.
            if member.islnk():
                member = member.replace(deep=False)
                member.type = tarfile.REGTYPE
            member.size = len(data)
            if archive is under and member.name in folders:  # the policy may have closed it
                member.mode = 0o755
            both.addfile(member, io.BytesIO(data))
    return written.getvalue()
