"""Runs a command in a fork of the zygote, with processes of its own and one writable folder.

    zygote ──fork──► namespaces ──fork──► process 1: unpack, watch, kill, pack ──fork──► command

A folder is a tar archive. It is unpacked into a file system in memory, whose size and number of files the
kernel limits; a few folders of the machine stand beside it, read-only. When the command ends, every process
that it left is killed before the folder is packed, so no process lives from one command to the next, and
nothing on the machine ever follows a link or a name that a command made.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import tarfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from megatron_eqlen.files import removed, scratch
from megatron_eqlen.graders.sandbox import kernel
from megatron_eqlen.graders.sandbox.kernel import mount, restrict_mount
from megatron_eqlen.graders.sandbox.program import NOBODY, become, limit
from megatron_eqlen.graders.sandbox.seccomp import build_command_filter, machine_calls, restrict_system_calls

OUTPUT, ARCHIVE, REQUEST, REPORT = 1, 2, 3, 4
"""File descriptors of what is printed, of the folder before and after, of the request and of the report."""
FOLDER = "/work"
"""Where a command finds the folder, and is started."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = (
    *("alternatives", "ld.so.cache", "localtime", "mime.types", "nsswitch.conf", "protocols", "services"),
    *("ssl/certs", "ssl/openssl.cnf", "java", "perl", "python3", "R"),
)
"""Files below /etc."""
DEVICES = ("null", "zero", "full", "random", "urandom")
OTHER_ENTRIES = 1000
"""Files beside the folder's: places where the machine's folders are mounted."""
PAGE, LATEST = 4096, (1 << 32) - 1
"""Bytes that the shortest file takes; the latest time of a file, in seconds since 1970."""
USER = 1000
"""The user id that a command sees."""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TZ": "UTC",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
codecs.lookup("ascii")  # which tarfile needs when the machine's files are out of reach
SHARED = re.compile(r"(\w+)-(\w+) \S+ (\w+) \S+ (\d+) +/dev/zero \(deleted\)")
"""Memory that processes share without a file, in ``/proc/*/maps``: begin, end, offset and inode."""
WATCH_SECONDS = 0.02
PACK_SECONDS = 60.0
"""Seconds beyond a command's own in which its folder must be unpacked and packed."""


@dataclass(frozen=True)
class CommandLimits:
    """Limits of a command and all processes that it starts."""

    seconds: float = 60.0
    """On the clock."""
    memory_mb: int = 1024
    """Limit of all processes together, without the folder."""
    processes: int = 64
    """Processes and threads at once."""
    folder_mb: int = 256
    """Limit of the folder and ``/tmp`` together, which lie in memory."""
    files: int = 20_000
    output_bytes: int = 1 << 16
    """Bytes that are kept of what is printed: its beginning and end."""

    @property
    def wall_seconds(self) -> float:
        return self.seconds + PACK_SECONDS


class FolderError(Exception):
    """The folder that a command left cannot be kept."""


@contextlib.contextmanager
def refusing(told: int) -> Iterator[None]:
    """Tell the zygote why nothing could be started, and exit."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - told to the parent, who raises it
        os.write(told, f"cannot isolate: {type(error).__name__}: {error}"[:500].encode())
        os._exit(1)


def run(limits: CommandLimits, told: int, zygote: int) -> NoReturn:
    """Run the command of REQUEST; exit."""
    with open(REQUEST, "rb", closefd=False) as file:
        request = json.load(file)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # no handler: process 1 then ignores what a command sends
    if request["container"]:
        kernel.die_with(zygote)
        _run_container(request, limits, told)
    owner = _new_namespaces()
    kernel.die_with(zygote)  # after the change of rights, which would reset it
    if (first := os.fork()) == 0:
        _run_as_first_process(request, limits, owner, told)
    os.close(told)
    os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])))


def _new_namespaces() -> int:
    """Leave the machine's mounts, network and processes. Return the user id that the folder belongs to."""
    spaces = kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_HOST
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # root of a container without CAP_SYS_ADMIN
            kernel.unshare(spaces)
            return NOBODY
        # Root without the right to make namespaces: a user namespace of nobody's own gives it.
        become(NOBODY)
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(spaces | kernel.NEW_USER)
    _map_ids(0, user, group)
    return 0


def _map_ids(inside: int, user: int, group: int) -> None:
    kernel.prctl(kernel.SET_DUMPABLE, 1)  # else /proc/self belongs to root
    maps = {"setgroups": "deny", "uid_map": f"{inside} {user} 1", "gid_map": f"{inside} {group} 1"}
    for name, text in maps.items():
        Path(f"/proc/self/{name}").write_text(text, encoding="ascii")


def _run_as_first_process(request: dict[str, Any], limits: CommandLimits, owner: int, told: int) -> NoReturn:
    with refusing(told):
        kernel.prctl(kernel.SET_PDEATHSIG, signal.SIGKILL)
        _build_root(request["readable"], limits)
        folder, beside = FOLDER, frozenset[str]()
        if request["root"]:
            folder, beside = "/", _protect_machine()
        for path in ("/tmp", folder):
            os.makedirs(path, exist_ok=True)
            os.chown(path, owner, owner)
            if not request["root"]:
                # A mount of its own stays writable when the root becomes read-only.
                mount(path, path, flags=kernel.BIND | kernel.RECURSIVE)
        if not request["root"]:
            restrict_mount("/", kernel.READ_ONLY)
        with open(ARCHIVE, "rb", closefd=False) as file:
            unpack(file, folder, owner)
        kernel.prctl(kernel.SET_DUMPABLE, 0)  # a command can neither trace nor read this process
        printed, printing = os.pipe()
        if (command := os.fork()) == 0:
            _become_command(request, limits, owner)
            _execute(request["arguments"], {"HOME": "/tmp"} | ENVIRONMENT | request["environment"], printing)
    os.close(told)
    os.close(printing)
    _report(_watch(command, printed, limits, alone=True), folder, limits, beside)
    os._exit(0)


def _run_container(request: dict[str, Any], limits: CommandLimits, told: int) -> NoReturn:
    """Run the command in an existing container, with the folder on the machine's disk."""
    # Processes that the container's command leaves become children of this one, to be killed.
    kernel.prctl(kernel.SET_CHILD_SUBREAPER, 1)
    place = scratch("folder")
    os.mkdir(folder := f"{place}/work")
    with open(ARCHIVE, "rb", closefd=False) as file:
        unpack(file, folder, os.geteuid())
    printed, printing = os.pipe()
    if (command := os.fork()) == 0:
        os.chdir(folder)
        limit({resource.RLIMIT_FSIZE: limits.folder_mb << 20})
        # Of the resource limits only a file's size: the others are the container's.
        start = [part.replace("{folder}", folder) for part in request["container"]]
        _execute([*start, *request["arguments"]], ENVIRONMENT | request["environment"], printing)
    os.close(told)
    os.close(printing)
    _report(_watch(command, printed, limits, alone=False), folder, limits)
    removed(place)
    os._exit(0)


def _report(report: dict[str, Any], folder: str, limits: CommandLimits, beside: Collection[str] = ()) -> None:
    report |= {"left_out": 0, "unkept": None}
    try:
        # The folder afterwards replaces the one before in the same memory file.
        os.ftruncate(ARCHIVE, 0)
        os.lseek(ARCHIVE, 0, os.SEEK_SET)
        if os.path.islink(folder):
            raise FolderError("it is a link")
        # The command may have taken its own rights to the folder away.
        os.chmod(folder, 0o755)
        with open(ARCHIVE, "wb", closefd=False) as file:
            report["left_out"] = pack(folder, file, limits.folder_mb << 20, beside, opens=True)
    except (OSError, RecursionError, FolderError) as error:
        report["unkept"] = f"{type(error).__name__}: {error}".replace(f"{folder}/", "")[:300]
    os.write(REPORT, json.dumps(report).encode())


def _build_root(readable: list[str], limits: CommandLimits) -> None:
    """Mount a root of its own, with read-only folders of the machine."""
    # What is mounted from here on stays in this namespace.
    mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    # Where their links lead, while the machine's root is there; a folder before what is in it.
    real = sorted((os.path.normpath(path), os.path.realpath(path)) for path in readable)
    size = f"size={limits.folder_mb}m,nr_inodes={limits.files + OTHER_ENTRIES},mode=755"
    # The new root is a file system in memory, whose size the kernel limits.
    mount("tmpfs", "/tmp", "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, size)
    os.mkdir("/tmp/old")
    # The machine's root moves to /old, until its folders are shown and it is unmounted.
    pivot = kernel.libc.syscall(machine_calls().pivot_root, b"/tmp", b"/tmp/old")
    kernel.checked(pivot, "pivot_root")
    os.chdir("/")
    # Folders of the machine, at their own places, read-only.
    for path in (*SYSTEM, *(f"/etc/{name}" for name in SETTINGS)):
        _show(path)
    for path, place in real:
        _show(os.path.realpath(path), place)  # a folder that is shown may have a link there
    os.makedirs("/dev")
    for name in DEVICES:
        # A device is mounted on an empty file, since a user namespace cannot make one.
        os.close(os.open(f"/dev/{name}", os.O_CREAT))
        mount(f"/old/dev/{name}", f"/dev/{name}", flags=kernel.BIND)
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/tmp"}
    for name, target in links.items():
        os.symlink(target, f"/dev/{name}")
    os.makedirs("/etc", exist_ok=True)
    # Programs look up the name of their user.
    for name, text in (("passwd", f"agent:x:{USER}:{USER}::/tmp:/bin/sh\n"), ("group", f"agent:x:{USER}:\n")):
        Path(f"/etc/{name}").write_text(text, encoding="ascii")
    os.mkdir("/proc")
    # Of the new process namespace: only the command's own processes are in it.
    mount("proc", "/proc", "proc", kernel.NO_SUID | kernel.NO_DEVICES)
    kernel.checked(kernel.libc.umount2(b"/old", kernel.DETACH), "umount of the machine's root")
    os.rmdir("/old")
    socket.sethostname("workspace")


def _protect_machine() -> frozenset[str]:
    """Make read-only what the machine has in the root. Return the names there."""
    for path in (beside := [f"/{name}" for name in os.listdir("/")]):
        if os.path.isdir(path) and not (os.path.islink(path) or os.path.ismount(path)):
            mount(path, path, flags=kernel.BIND | kernel.RECURSIVE)
            restrict_mount(path, kernel.READ_ONLY)
    return frozenset(path[1:] for path in beside)


def _show(path: str, place: str | None = None) -> None:
    """Mount ``place`` of the machine at ``path``, read-only. None: its own, if any; links stay links."""
    old = f"/old{place or path}"
    if place is None and not os.path.lexists(old):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if place is None and os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT))
    mount(old, path, flags=kernel.BIND | kernel.RECURSIVE)
    restrict_mount(path, kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES, recursive=True)


def _become_command(request: dict[str, Any], limits: CommandLimits, owner: int) -> None:
    os.setsid()
    os.umask(0o022)
    if owner:
        become(owner)  # it holds no right over process 1
    kernel.unshare(kernel.NEW_USER)  # in which the kernel counts its processes alone
    _map_ids(USER, owner, owner)
    limit(
        {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_DATA: limits.memory_mb << 20,
            resource.RLIMIT_NOFILE: 1024,
            resource.RLIMIT_NPROC: limits.processes,
            resource.RLIMIT_FSIZE: limits.folder_mb << 20,
            resource.RLIMIT_MEMLOCK: 0,
        }
    )
    kernel.drop_capabilities()
    os.chdir("/" if request["root"] else FOLDER)
    restrict_system_calls(build_command_filter(machine_calls()))


def _execute(command: list[str], environment: Mapping[str, str], printing: int) -> NoReturn:
    """Become the program, which prints to ``printing``; status 127 if there is none."""
    os.dup2(printing, 1)
    os.dup2(printing, 2)
    os.closerange(3, 1 << 12)
    try:
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:
        os.write(2, f"{command[0]}: {getattr(error, 'strerror', error)}\n".encode(errors="replace"))
        os._exit(127)


def _watch(command: int, printed: int, limits: CommandLimits, alone: bool) -> dict[str, Any]:
    """Wait for the command's end or limit; kill the rest; return the report. ``alone``: in a namespace."""
    began = due = time.monotonic()
    process = os.pidfd_open(command)
    kept, most, size = bytearray(), limits.output_bytes, 0
    status, code = "ended", None
    while code is None and status == "ended":
        # Output is read while the command runs: a full pipe would stop it.
        if printed in select.select([process, printed], [], [], WATCH_SECONDS)[0]:
            size += (more := _read(printed, kept, most))
            time.sleep(0 if more else WATCH_SECONDS)  # it has closed its output
        # All children are reaped: orphans of the command become children of this process.
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1]) if ended[0] == command else code
        now = time.monotonic()
        if code is None and now - began > limits.seconds:
            status = "time_limit"
        elif code is None and alone and now > due:
            status = "memory_limit" if _memory_mb(limits.memory_mb) > limits.memory_mb else status
            # to look at all pages takes long: most of the time is the command's
            due = time.monotonic() + 4 * (time.monotonic() - now)
    left = _running() - {1} if alone else children()
    left.discard(command if code is None else 0)
    if alone:
        # Process 1 is spared by its own signal: -1 means all other processes of the namespace.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    kill_children()
    while more := _read(printed, kept, most):
        size += more
    if left_out := size - len(kept):
        kept[most // 2 : most // 2] = f"\n... ({left_out} bytes left out)\n".encode()
    os.write(OUTPUT, kept)
    return {"status": status, "code": code, "seconds": time.monotonic() - began, "left_running": len(left)}


def _running() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def children() -> set[int]:
    """Return the processes that this one must wait for."""
    with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(map(int, file.read().split()))
    return set()


def kill_children() -> None:
    """Kill and reap every process that is left: what a killed one leaves becomes this one's child."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for number in (found := children()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            if os.waitpid(-1, 0 if found else os.WNOHANG)[0] == 0:
                return


def _memory_mb(most: int) -> float:
    """Return the memory of all processes, without files'. Only above ``most`` what they share counts once."""
    page, pages = resource.getpagesize(), dict[int, tuple[int, int]]()
    for number in _running() - {1}:
        with contextlib.suppress(OSError), open(f"/proc/{number}/statm", encoding="ascii") as file:
            size, resident, shared, _, _, private, _ = map(int, file.read().split())
            # its own, and what is mapped beside private memory: that may be shared without a file
            pages[number] = resident - shared, size - private
    if (bound := sum(map(sum, pages.values())) * page / (1 << 20)) <= most:
        return bound  # cheap: no page is looked at
    own, places = 0, dict[tuple[str, str], int]()
    for number, (resident, _) in pages.items():
        try:
            # a page of several processes, as after a fork, counts for each in part
            with open(f"/proc/{number}/smaps_rollup") as rollup, open(f"/proc/{number}/maps", "rb") as maps:
                own += sum(map(int, re.findall(r"Pss_Anon: +(\d+)", rollup.read()))) << 10
                for begin, end, *place in SHARED.findall(maps.read().decode(errors="replace")):
                    # a process may have unmapped some of it
                    places[*place] = max(places.get((*place,), 0), int(end, 16) - int(begin, 16))
        except PermissionError:  # root without the right to look at it
            own += resident * page
        except OSError:  # it has ended
            continue
    return (own + sum(places.values())) / (1 << 20)


def _read(source: int, kept: bytearray, most: int) -> int:
    """Append what a pipe gives to ``kept``; drop the middle beyond ``most`` bytes. Return the bytes read."""
    data = os.read(source, 1 << 16)
    kept += data
    # Half of what is kept is from the beginning, half from the end.
    del kept[most // 2 : max(0, len(kept) - most) + most // 2]
    return len(data)


def unpack(file: BinaryIO, folder: str, owner: int) -> None:
    """Unpack an archive that ``pack`` made; its files belong to ``owner``, if this process is root."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        mine = {"uid": owner, "gid": owner, "deep": False}
        archive.extraction_filter = lambda member, path: member.replace(**mine)  # type: ignore[method-assign]
        archive.extractall(folder, numeric_owner=True)


def pack(folder: str, file: BinaryIO, most: int, beside: Collection[str] = (), opens: bool = False) -> int:
    """Write the files below ``folder`` to an archive of at most ``most`` bytes, by name, but for those in it
    named ``beside``. Follow no link. Return the number of sockets and devices, which are left out. ``opens``:
    as a command left it: give this user rights to what has none, keep microseconds. Raises OSError,
    FolderError."""
    left_out, size, began = 0, 0, time.monotonic()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for place, folders, names in os.walk(folder, onerror=_raise):
            left = beside if place == folder else ()
            # Sorted, so that equal folders give equal archives.
            folders[:] = sorted(name for name in folders if name not in left)
            for name in sorted(folders + [name for name in names if name not in left]):
                path = os.path.join(place, name)
                info = archive.gettarinfo(path, os.path.relpath(path, folder))
                if info is None or (info.isdev() and not info.isfifo()):
                    left_out += 1
                    continue
                if opens and not (info.issym() or os.access(path, os.R_OK)):
                    os.chmod(path, 0o700)
                # Owners and set-user bits are the machine's, and would make equal folders differ.
                info.uid, info.gid, info.uname, info.gname = 0, 0, "", ""
                info.mode = info.mode & 0o777
                # a link's own time is not unpacked; microseconds tell ``make`` what a command wrote later
                changed = 0 if info.issym() else min(max(round(info.mtime, 6), 0), LATEST)
                info.mtime = changed if opens and changed % 1 else int(changed)
                # as much as it takes unpacked, and read: each hard link is a file to who lays folders over
                length = os.stat(path).st_size if info.islnk() else info.size
                size += -(-length // PAGE) * PAGE + PAGE * info.issym()
                if size > most:
                    raise FolderError(f"its files are longer than {most >> 20} MiB")
                if opens and time.monotonic() - began > PACK_SECONDS / 2:  # the sandbox is not broken
                    raise FolderError(f"to pack it takes longer than {PACK_SECONDS / 2:g} s")
                with open(path, "rb") if info.isreg() else contextlib.nullcontext() as content:
                    archive.addfile(info, content)
    return left_out


def _raise(error: OSError) -> NoReturn:
    raise error
