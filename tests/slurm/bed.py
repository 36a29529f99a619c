"""A real SLURM on one machine: every node is a set of Linux namespaces with its own network.

Nodes can crash (all their processes get SIGKILL), come back, be cut off from the network and be healed. They
share the file system, as a cluster does. The bridge between them lies in a namespace of its own: beds do not
meet, and nothing leaves the machine. Needs root and Debian packages, which
``tools/test --install-system-packages`` installs.

The kernel ends every process of a bed when the process that made it is gone, killed -9, too; the network
namespaces that it then leaves are removed by the next bed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.kit.processes import within

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "setpriv", "unshare")
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Prefix of a command that is killed when the thread that started it ends, for whatever reason."""
NETNS = Path("/run/netns")
CONTROLLER = "login"
PATIENCE = 300.0
"""Seconds to wait; SLURM itself takes up to 30 to give up a node, and a slow machine 60 to start a try."""

CONFIGURATION = """\
ClusterName=bed
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits until its old credential has expired: 120 seconds by default, 5 at least
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# a step's end reaches all of a task's process group; clusters have cgroups, which are more
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdTimeout=4
SlurmctldTimeout=10
KillWait=15
MessageTimeout=5
MinJobAge=3600
ReturnToService=2
JobRequeue=1
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=low Nodes=ALL State=UP PriorityTier=1 GraceTime=5 MaxTime=INFINITE
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""


class Bed:
    """SLURM with nodes ``n1``, ``n2``, ...; files and logs lie in ``folder``. Use as a context."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 4) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.cpus = cpus
        self.mark = f"bed-{os.getpid()}-{secrets.token_hex(3)}"
        """Prefix of the names of its network namespaces."""
        self.processes: dict[str, subprocess.Popen] = {}
        """First process of each node; all other processes of the node end with it."""
        self.munged: subprocess.Popen | None = None

    def __enter__(self) -> Bed:
        try:
            _remove_left_namespaces()
            self._configure()
            self._connect()
            self._authenticate()
            self._start(CONTROLLER, "slurmctld", "-D")
            for node in self.nodes:
                self.start(node)
            self.wait(lambda: self.node_states() == dict.fromkeys(self.nodes, "idle"), "all nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in [*self.processes]:
            self.crash(node)
        if self.munged is not None:
            self.munged.kill()
            self.munged.wait()
        for name in ("hub", CONTROLLER, *self.nodes):
            _remove_namespace(self._netns(name))

    # ---- nodes --------------------------------------------------------------------------------------

    def start(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", node)

    def crash(self, node: str) -> None:
        """Cut the node's power: all its processes are killed."""
        process = self.processes.pop(node)
        subprocess.run(["pkill", "-KILL", "--parent", str(process.pid)], check=False)  # its init
        process.wait()

    def cut(self, node: str) -> None:
        """Take the node off the network; its processes keep running."""
        _run("ip", "-n", self._netns("hub"), "link", "set", node, "down")

    def heal(self, node: str) -> None:
        _run("ip", "-n", self._netns("hub"), "link", "set", node, "up")

    def node_states(self) -> dict[str, str]:
        lines = self._ask("sinfo", "-h", "-N", "-p", "main", "-o", "%n %t").splitlines()
        return dict(line.split() for line in lines)

    # ---- jobs ---------------------------------------------------------------------------------------

    def run(self, *command: str | Path, folder: Path | None = None, **environment: str) -> str:
        """Run a command on the controller's machine; return its output."""
        return _run(*self._inside(*map(str, command)), cwd=folder, env=self._environment() | environment)

    def program(self, path: Path, name: str) -> None:
        """Make ``path`` a program that is ``name`` on the controller's machine."""
        configuration = f"SLURM_CONF={self.folder}/slurm.conf"
        path.write_text(f'#!/bin/bash\nexec env {configuration} {" ".join(self._inside(name))} "$@"\n')
        path.chmod(0o755)

    def submit(self, *arguments: str | Path, folder: Path, **environment: str) -> str:
        """Call ``sbatch`` in ``folder``; return the job's id."""
        return self.run("sbatch", "--parsable", *arguments, folder=folder, **environment).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return ``JobState``, ``Restarts``, ``NodeList`` and all other fields of SLURM's record."""
        return dict(re.findall(r"(\S+?)=(\S*)", self._ask("scontrol", "show", "job", job)))

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def _ask(self, *query: str) -> str:
        """Return SLURM's answer; ask again if a busy controller does not answer yet or in time."""
        answers: list[str] = []

        def answered() -> bool:
            try:
                answers.append(self.run(*query))
            except RuntimeError as error:
                if not re.search("timed out|Unable to contact slurm controller", str(error)):
                    raise
            return bool(answers)

        assert within(PATIENCE, answered), f"{' '.join(query)}: no answer\n{self.logs()}"
        return answers[0]

    def wait(self, true: Callable[[], bool], what: str) -> None:
        assert within(PATIENCE, true, every=0.2), f"{what}: not within {PATIENCE:.0f} s\n{self.logs()}"

    def wait_for(self, job: str, *states: str) -> None:
        self.wait(lambda: self.state(job) in states, f"job {job} {self.job(job)} is {' or '.join(states)}")

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            for log in sorted(self.folder.glob("*.log"))
        )

    # ---- set-up -------------------------------------------------------------------------------------

    def _inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--net={NETNS / self._netns(CONTROLLER)}", *command]

    def _netns(self, name: str) -> str:
        return f"{self.mark}-{name}"

    def _address(self, node: str) -> str:
        return f"10.77.0.{254 if node == CONTROLLER else self.nodes.index(node) + 1}"

    def _environment(self) -> dict[str, str]:
        path = f"{SYSTEM_PATH}:{os.environ.get('PATH', '')}"
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def _configure(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={self._address(node)} CPUs={self.cpus} State=UNKNOWN"
            for node in self.nodes
        )
        text = CONFIGURATION.format(
            folder=self.folder, controller=CONTROLLER, address=self._address(CONTROLLER), nodes=nodes
        )
        (self.folder / "slurm.conf").write_text(text)
        hosts = [f"{self._address(name)} {name}" for name in (CONTROLLER, *self.nodes)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))

    def _connect(self) -> None:
        """Connect nodes: every node's ``eth0`` is one end of a cable; the other, in the bridge, has the
        node's name."""
        hub = self._netns("hub")
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        for node in (CONTROLLER, *self.nodes):
            mine = self._netns(node)
            _run("ip", "netns", "add", mine)
            cable = ("type", "veth", "peer", "name", "eth0", "netns", mine)
            _run("ip", "-n", hub, "link", "add", node, *cable)
            _run("ip", "-n", hub, "link", "set", node, "master", "bridge", "up")
            _run("ip", "-n", mine, "address", "add", f"{self._address(node)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", mine, "link", "set", link, "up")

    def _authenticate(self) -> None:
        """Start munge on a file-system socket, which all nodes see."""
        private = self.folder / "munge"
        private.mkdir(mode=0o700)
        (private / "key").write_bytes(secrets.token_bytes(1024))
        (private / "key").chmod(0o400)
        socket = self.folder / "munge.socket"
        options = {
            "key-file": private / "key", "socket": socket, "pid-file": private / "pid",
            "log-file": private / "log", "seed-file": private / "seed",
        }  # fmt: skip
        settings = [f"--{key}={path}" for key, path in options.items()]
        command = [*WITH_US, "munged", "--foreground", "--force", *settings]
        self.munged = subprocess.Popen(command, env=self._environment(), stderr=subprocess.DEVNULL)
        self.wait(socket.exists, "munged listens")

    def _start(self, node: str, *daemon: str) -> None:
        """Start ``daemon`` as a child of the first process of a new node."""
        inside = (
            f"hostname {node}; mount --bind {self.folder}/hosts /etc/hosts; "
            f"mount -t tmpfs -o size=2g shm /dev/shm; {' '.join(daemon)}; sleep infinity"
        )
        command = [
            *WITH_US, "nsenter", f"--net={NETNS / self._netns(node)}",
            "unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc",
            "bash", "-c", inside,
        ]  # fmt: skip
        with open(self.folder / f"node-{node}.log", "a", encoding="utf-8") as log:
            self.processes[node] = subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip


def missing() -> str:
    """Return why no bed can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "a SLURM of several nodes on one machine needs root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    return f"not installed: {', '.join(absent)} (tools/test --install-system-packages)" if absent else ""


def _remove_left_namespaces() -> None:
    """Remove network namespaces of beds whose process is gone."""
    for path in NETNS.glob("bed-*"):
        owner = re.match(r"bed-(\d+)-[0-9a-f]{6}-", path.name)
        if owner and not Path("/proc", owner[1]).exists():
            _remove_namespace(path.name)


def _remove_namespace(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str, **options: object) -> str:
    done = subprocess.run([*WITH_US, *command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
