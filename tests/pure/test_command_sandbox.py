"""Commands in the sandbox under attack: they have processes and one folder, and reach nothing else."""

import contextlib
import io
import os
import platform
import socket
import subprocess
import sys
import tarfile
import threading

import pytest

from megatron_eqlen.graders.sandbox import command as inside
from megatron_eqlen.graders.sandbox import kernel, probe, seccomp
from megatron_eqlen.graders.sandbox.client import (
    EMPTY_FOLDER,
    Command,
    CommandEnd,
    Sandbox,
    SandboxError,
    folder_files,
    pack_folder,
)
from megatron_eqlen.graders.sandbox.command import CommandLimits
from megatron_eqlen.graders.sandbox.program import Isolation, Limits
from tests.kit import ROOT
from tests.kit.processes import are_gone, descendants, within

SMALL = CommandLimits(seconds=8, memory_mb=256, processes=32, folder_mb=16, files=500, output_bytes=4000)
MIB = 1 << 20


@pytest.fixture(scope="module")
def sandbox():
    os.environ["SECRET_TOKEN"] = "the-parents-secret"
    with contextlib.closing(Sandbox(Isolation(True, True, True), sys.executable)) as made:
        yield made
    del os.environ["SECRET_TOKEN"]


def run(sandbox: Sandbox, script: str, folder=EMPTY_FOLDER, limits=SMALL, **command) -> CommandEnd:
    return sandbox.command(Command(["bash", "-c", script], **command), folder, limits)


def test_a_command_has_processes_pipes_and_a_folder_that_lasts(sandbox, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "numbers").write_text("3\n1\n2\n")
    folder = pack_folder(tmp_path)
    script = "sort data/numbers | head -n 2 > least; mkdir -p a/b && cd a && pwd; cat /dev/stdin"
    first = run(sandbox, script, folder)
    assert (first.status, first.code, first.output) == ("ended", 0, "/work/a\n")
    second = run(sandbox, "cat least; chmod +x least; exit 3", first.folder)
    assert (second.code, second.output) == (3, "1\n2\n")
    assert folder_files(second.folder) == {"data/numbers": b"3\n1\n2\n", "least": b"1\n2\n"}
    assert (tmp_path / "data" / "numbers").read_text() == "3\n1\n2\n"


def test_both_profiles_run_in_one_sandbox(sandbox):
    assert run(sandbox, "echo $((1 + 1))").output == "2\n"
    assert sandbox.run("print(1 + 1)", "", Limits(5, 20, 512)).stdout == "2\n"
    assert sandbox.run("import os\nos.fork()", "", Limits(5, 20, 512)).status == "runtime_error"


def test_arguments_stdin_environment_and_readable_places_arrive(sandbox, tmp_path):
    (tmp_path / "shown").write_text("seen")
    tmp_path.chmod(0o755)
    script = 'cat; echo "$WORD $1 $HOME"; cat "$2/shown"; : > "$2/new" || echo refused; env | grep -c SECRET'
    arguments = ["bash", "-c", script, "bash", "two words", str(tmp_path)]
    asked = Command(arguments, "héllo\n", {"WORD": "said"}, [str(tmp_path)])
    end = sandbox.command(asked, EMPTY_FOLDER, SMALL)
    assert end.output.startswith("héllo\nsaid two words /tmp\nseen")
    assert end.output.endswith("refused\n0\n")
    for readable, root in (("/nowhere", False), ("/work/x", False), ("/root/x", True), ("/tmp", True)):
        with pytest.raises(ValueError, match=f"this machine to read, outside /.*, found '{readable}'"):
            sandbox.command(Command(["true"], readable=[readable], root=root), EMPTY_FOLDER, SMALL)
    # behind links, which lead nowhere there
    (tmp_path / "home").symlink_to(tmp_path)
    (tmp_path / "venv").symlink_to("shown")
    places = [f"{tmp_path}/home/home/", f"{tmp_path}/home/venv"]
    asked = Command(["cat", f"{places[0]}/shown", places[1]], readable=places)
    assert sandbox.command(asked, EMPTY_FOLDER, SMALL).output == "seenseen"
    # behind links in another of them, in either order
    (tmp_path / "all").mkdir()
    (tmp_path / "all/up").symlink_to(tmp_path / "home")
    (tmp_path / "all/file").symlink_to("../venv")
    places = [f"{tmp_path}/all/up", f"{tmp_path}/all", f"{tmp_path}/all/file"]
    asked = Command(["cat", f"{places[0]}/shown", places[2]], readable=places)
    assert sandbox.command(asked, EMPTY_FOLDER, SMALL).output == "seenseen"
    missing = sandbox.command(Command(["no-such-program"]), EMPTY_FOLDER, SMALL)
    assert (missing.code, missing.output) == (127, "no-such-program: No such file or directory\n")


def test_a_folder_can_be_the_root_beside_places_of_the_machine(sandbox):
    def run_in(folder, script):
        end = run(sandbox, script, folder, root=True)
        return end.output, end.folder

    writes = "pwd; mkdir -p app /opt/x; echo 1 > app/a; echo 2 > /opt/x/b; echo 3 > /tmp/c; ln -s / app/up"
    printed, folder = run_in(EMPTY_FOLDER, writes)
    assert printed == "/\n"
    assert folder_files(folder) == {"app/a": b"1\n", "opt/x/b": b"2\n", "tmp/c": b"3\n"}
    machine = "usr etc dev proc bin"
    spoils = f"for f in {machine}; do : > /$f/x; mv /$f /app; done; rm -rf /app /usr /etc"
    _, spoilt = run_in(folder, f"(cat /app/up/opt/x/b; {spoils}) 2> /dev/null; ls -d /bin || : > bin")
    assert set(folder_files(spoilt)) <= {"opt/x/b", "tmp/c"}
    assert run_in(spoilt, f"cd /; ls -d {machine} && cat opt/x/b")[0].endswith("usr\n2\n")


def probe_calls(*lines: str) -> str:
    """Return a shell command that prints ``reached`` for each Python line that raises no OSError."""
    tried = "try:\n    {0}\n    print('reached', {0!r})\nexcept OSError:\n    pass\n"
    body = "".join(map(tried.format, lines))
    return f"python3 - <<'END'\nimport ctypes, os, resource, socket\nlibc = ctypes.CDLL(None)\n{body}END"


REFUSED = {
    "files of the machine": "cat /etc/shadow /root/.bashrc /home/*/.bashrc /proc/1/environ /proc/1/maps",
    "writing elsewhere": "for f in /x /etc/x /usr/x /dev/x /proc/sys/kernel/hostname; "
                         "do : > $f && echo reached; done; :",
    "device files": "mknod d c 1 3 && echo reached",
    "mounts": "mount -t tmpfs none /tmp && echo reached; mount -o remount,rw / && echo reached",
    "namespaces": "unshare -Ur id && echo reached; unshare -n id && echo reached",
    "other roots": "chroot / ls && echo reached",
    "root": "su -c id && echo reached; sudo -n id && echo reached",
    "signals to process 1": "kill -9 1 && echo reached; kill -STOP 1 && echo reached; true",
    "calls": probe_calls(
        "socket.socket(socket.AF_INET)", "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "os.memfd_create('hidden')", "os.setuid(0)",
        "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))", "os.listdir('/proc/1/fd')",
        "resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))", "os.listdir('/proc/1/root')",
        "open('/proc/1/oom_score_adj', 'w').write('1000')",
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", REFUSED)
@pytest.mark.parametrize("root", [False, True])
def test_a_command_reaches_nothing_outside(sandbox, attack, root):
    end = run(sandbox, REFUSED[attack].replace("/x ", "", root), root=root)  # the root is the folder then
    assert end.status == "ended"
    assert "reached" not in end.output
    assert "secret" not in end.output
    assert run(sandbox, "echo ok").output == "ok\n"


def test_refused_system_calls_fail_before_their_arguments_are_read(sandbox):
    numbers = seccomp.MACHINES[platform.machine()].refused | seccomp.REFUSED
    script = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {numbers}.items():\n    result = libc.syscall(number, -1, -1, -1, -1, -1, -1)\n"
        "    print(name, result, ctypes.get_errno(), flush=True)"
    )
    end = sandbox.command(Command(["python3", "-c", script]), EMPTY_FOLDER, SMALL)
    assert end.output == "".join(f"{name} -1 1\n" for name in numbers)


def test_a_setuid_program_gives_no_rights(sandbox):
    script = "cp $(command -v id) mine; chmod 4777 mine; ./mine -u; grep NoNewPrivs /proc/self/status"
    end = run(sandbox, script)
    assert end.output == "1000\nNoNewPrivs:\t1\n"
    with tarfile.open(fileobj=io.BytesIO(end.folder)) as archive:
        assert [member.mode for member in archive] == [0o777]


def test_a_command_sees_its_own_processes_and_no_network(sandbox):
    end = run(sandbox, "set -- /proc/[0-9]*; echo $#; grep -c : /proc/net/dev; hostname; id -un")
    assert end.output == "2\n1\nworkspace\nagent\n"


def test_an_abstract_socket_of_the_machine_is_out_of_reach(sandbox):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0eqlen-test-abstract")
        server.listen()
        line = "s = socket.socket(socket.AF_UNIX); s.connect('\\0eqlen-test-abstract')"
        assert "reached" not in run(sandbox, probe_calls(line)).output


FULL = "No space left on device"
LIMITED = {
    "200 processes": ("for i in $(seq 200); do sleep 60 & done", "time_limit",
                      "Resource temporarily unavailable"),
    "a fork bomb": ("f() { f | f & }; f; sleep 1; echo over", "ended", ""),
    "threads": ("python3 -c 'import threading, time\nfor n in range(99):\n"
                " threading.Thread(target=time.sleep, args=(9,), daemon=True).start()'",
                "ended", "can't start new thread"),
    "10 GB": ("dd if=/dev/zero of=big bs=1M count=10000", "ended", FULL),
    "10 GB in pieces": ("for i in $(seq 40); do dd if=/dev/zero of=f$i bs=1M count=1 status=none; done",
                        "ended", FULL),
    "10 GB that no name shows": (
        'python3 -c \'import os\nfor n in range(40):\n f = open("x", "wb"); os.unlink("x")\n'
        " os.dup(f.fileno()); f.write(bytes(1 << 20)); f.flush()'", "ended", FULL),
    "files": ("for i in $(seq 2000); do : > f$i || break; done", "ended", FULL),
    "memory of one process": ("python3 -c 'x = bytearray(1 << 30)'", "ended", "MemoryError"),
    "memory of many": ("for i in 1 2 3 4; do python3 -c 'import time; x = b\"x\" * (120 << 20); "
                       "time.sleep(6)' & done; wait", "memory_limit", ""),
    "memory beside its own": ("python3 -c 'import mmap, time; m = mmap.mmap(-1, 300 << 20); time.sleep(6)'",
                              "memory_limit", ""),
    "memory beside its own, of which a fork has a page": (
        "python3 -c 'import ctypes, mmap, os, time\nm = mmap.mmap(-1, 300 << 20)\n"
        "place = ctypes.addressof(ctypes.c_char.from_buffer(m))\nif not os.fork():\n"
        " ctypes.CDLL(None).munmap(ctypes.c_void_p(place + 4096), (300 << 20) - 4096)\n"
        "time.sleep(6)'", "memory_limit", ""),
    "memory that forks share": ("python3 -c 'import os, time\nx = b\"x\" * (120 << 20)\nfor n in 1, 2, 3:\n"
                                " os.fork() or (time.sleep(1), os._exit(0))\nos.wait()\nprint(len(x))'",
                                "ended", "125829120"),
    "time": ("sleep 60", "time_limit", ""),
    "endless output": ("yes", "time_limit", "bytes left out"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITED)
def test_limits_hold_and_the_next_command_works(sandbox, name):
    script, status, printed = LIMITED[name]
    slow = CommandLimits(**{**vars(SMALL), "seconds": 6.0 if status == "time_limit" else 60.0})
    end = run(sandbox, script, limits=slow)
    assert (end.status, printed in end.output) == (status, True), end
    assert len(end.output) < 2 * SMALL.output_bytes
    assert len(end.folder) < 2 * SMALL.folder_mb * MIB
    assert run(sandbox, "echo ok", end.folder).output == "ok\n"


def test_the_limit_of_time_is_the_clocks_alone(sandbox):
    """The kernel's, in seconds of all threads, would end four busy ones in a fourth of it."""
    assert run(sandbox, "ulimit -t").output == "unlimited\n"


MAPPED = """python3 -c '
import mmap, os, time
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
own = [mmap.mmap(-1, 4096, private, mmap.PROT_READ | n % 2 * mmap.PROT_WRITE) for n in range(40_000)]
more = mmap.mmap(-1, 1 << 30, private, mmap.PROT_READ)  # never written: no memory
began = time.monotonic()
used = lambda: sum(map(int, open("/proc/1/stat").read().split()[13:15])) / os.sysconf("SC_CLK_TCK")
before = used()
time.sleep(2)
print((used() - before) / (time.monotonic() - began))'"""


def test_to_count_memory_takes_a_small_part_of_a_processors_time(sandbox):
    end = run(sandbox, MAPPED)
    assert end.status == "ended", end
    assert float(end.output) < 0.45


def test_no_process_outlives_its_command(sandbox):
    marks = descendants(sandbox._zygote)
    more = "sleep 611 & setsid sleep 612 & (setsid nohup sleep 613 > /dev/null &) ; trap '' TERM"
    end = run(sandbox, f"{more}; echo started")
    assert (end.output, end.left_running) == ("started\n", 3)
    within(10, lambda: descendants(sandbox._zygote) <= marks or len(descendants(sandbox._zygote)) == 1)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listed.splitlines() if line.startswith("sleep 61")]


def test_a_command_dies_with_the_process_that_asked_for_it():
    made = Sandbox(Isolation(True, True, True), sys.executable)
    thread = threading.Thread(target=lambda: contextlib.suppress(SandboxError).__enter__() or _fails(made))
    thread.start()
    within(20, lambda: len(descendants(made._zygote)) >= 4)
    born = descendants(made._zygote)
    os.kill(made._zygote, 9)
    thread.join(30)
    assert within(10, are_gone(born))
    made.close()


def _fails(made: Sandbox) -> None:
    with contextlib.suppress(SandboxError):
        run(made, "setsid sleep 614 & sleep 614", limits=CommandLimits(seconds=100))


def test_links_names_and_odd_files_stay_in_the_folder(sandbox, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    script = f"""
    ln -s ../../../../{outside} up; ln -s {outside} absolute; ln -s / root; ln -s loop loop
    echo text > kept; mkdir d; ln kept d/hard; ln /etc/passwd linked; mkfifo pipe; mkdir -p "a b"
    printf x > $'new\\nline'; printf y > $'\\xff\\xfe'; printf z > -rf; : > 'a b/'$'\\t'
    python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'
    chmod 000 d; touch -d @99999999999999 kept; truncate -s 1M sparse
    for f in up absolute root{outside}; do echo changed > $f; done
    """
    end = run(sandbox, script)
    assert (end.status, end.unkept, end.left_out) == ("ended", None, 1)
    assert outside.read_text() == "untouched"
    script = "readlink up absolute root loop; ls -A | wc -l; cat -- $'new\\nline' $'\\xff\\xfe' -rf"
    again = run(sandbox, script, end.folder)
    assert again.output == f"../../../../{outside}\n{outside}\n/\nloop\n13\nxyz"
    more = "chmod 700 d; echo more >> d/hard; cat kept; [ -p pipe ] && echo pipe; touch -h -d @1 up"
    hard = run(sandbox, more, end.folder)
    assert hard.output == "text\nmore\npipe\n"
    assert pack_folder_of(hard.folder, tmp_path) == hard.folder


def pack_folder_of(folder: bytes, tmp_path) -> bytes:
    place = tmp_path / "unpacked"
    place.mkdir()
    inside.unpack(io.BytesIO(folder), str(place), os.geteuid())
    inside.pack(str(place), packed := io.BytesIO(), 1 << 30, opens=True)
    return packed.getvalue()


LONG = "FolderError: its files are longer than 16 MiB"
UNKEPT = {
    "sparse": ("for i in 1 2 3; do truncate -s 7M f$i; done", LONG),
    "many small": ("python3 -c 'for n in range(450): open(str(n), \"w\").truncate(37000)'", LONG),
    "deep": ('python3 -c \'import os\nfor n in range(40): os.mkdir("d" * 200); os.chdir("d" * 200)\'',
             "File name too long"),
    "hard links": ("head -c 3M /dev/zero > f; for n in 1 2 3 4 5; do ln f $n; done", LONG),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKEPT)
def test_a_folder_that_cannot_be_kept_is_the_one_before(sandbox, name):
    script, why = UNKEPT[name]
    before = run(sandbox, "echo before > file").folder
    end = run(sandbox, script, before)
    assert why in (end.unkept or ""), end
    assert end.folder == before


def test_a_folder_that_takes_too_long_to_pack_is_refused_before_the_sandbox_counts_as_broken(
    tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setattr(inside, "PACK_SECONDS", 0)
    with pytest.raises(inside.FolderError, match="to pack it takes longer than 0 s"):
        inside.pack(str(tmp_path), io.BytesIO(), 1 << 20, opens=True)
    assert pack_folder(tmp_path)  # a template may take its time


def test_equal_commands_leave_equal_folders(sandbox):
    script = "mkdir z a; for n in 3 1 2; do echo $n > a/$n; done; ln -s a/1 z/l; touch -h -d @1000 * */*"
    assert run(sandbox, script).folder == run(sandbox, script).folder


def test_what_was_written_later_is_newer_to_the_next_command(sandbox):
    end = run(sandbox, "touch -d @1000.25 made; touch -d @1000.5 source; : > now; sleep 0.01; mkdir d")
    again = run(sandbox, "[ source -nt made ] && ls; [ now -nt d ] || echo older", end.folder)
    assert again.output == "d\nmade\nnow\nsource\nolder\n"
    assert again.folder == end.folder


def test_a_machine_that_refuses_is_named(monkeypatch):
    reason = "new namespaces (mount, process, network): Operation not permitted"

    def refuse(flags):
        raise PermissionError(1, reason)

    probe.commands_refused.cache_clear()
    monkeypatch.setattr(kernel, "unshare", refuse)
    monkeypatch.setattr(inside, "become", lambda user: None)
    monkeypatch.setattr(probe, "PYTHON", None)  # a fork of this process, which refuses
    assert reason in (probe.commands_refused() or "")
    probe.commands_refused.cache_clear()
    monkeypatch.undo()
    assert probe.commands_refused() is None


AS_ANOTHER_USER = """
import os, sys
from megatron_eqlen.graders.sandbox.client import EMPTY_FOLDER, Command, Sandbox, folder_files
from megatron_eqlen.graders.sandbox.program import Isolation
from tests.pure.test_command_sandbox import LIMITED, SMALL, run
os.setgroups([])
os.setresgid(54321, 54321, 54321)
os.setresuid(54321, 54321, 54321)
made = Sandbox(Isolation(True, True, False))
said = run(made, "id -u; : > /x && echo reached; set -- /proc/[0-9]*; echo $#; sleep 60 & echo kept > f")
again = run(made, "cat f; for i in $(seq 200); do sleep 60 & done", said.folder)
print(said.output, said.left_running, again.status, again.output[:5], sep="", end="", flush=True)
asked = Command(["sh", "-c", "mkdir d; echo x > d/f; chmod 0 d/f d ."], container=["env"])
boxed = made.command(asked, EMPTY_FOLDER, SMALL)
print(boxed.unkept, folder_files(boxed.folder), run(made, "stat -c %a d", boxed.folder).output, end="")
print(run(made, LIMITED["memory beside its own"][0]).status, end="")
sys.stdout.flush()
os._exit(0)
"""
"""In a process of its own: the sandbox forks it, and has nothing of a worker that has run other tests."""


@pytest.mark.skipif(os.geteuid() != 0, reason="every other test here runs without root then")
def test_a_user_who_is_not_root_gets_the_same():
    command = [sys.executable, "-c", AS_ANOTHER_USER]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    expected = "1000\nbash: line 1: /x: Read-only file system\n2\n1time_limitkept\n"
    expected += "None {'d/f': b'x\\n'} 0\nmemory_limit"
    assert printed.stdout == expected, printed.stderr
