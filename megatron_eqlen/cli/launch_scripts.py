"""Commands that a launch script starts, as bash expands them: the script runs, what it starts does not.

script ─► bash in the sandbox: no network, an empty home, a stand-in for each program that it may start
            └─► a stand-in writes down its arguments, and ends well
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_eqlen.graders.sandbox.client import Command, CommandEnd, Sandbox, folder_files
from megatron_eqlen.graders.sandbox.command import FOLDER, CommandLimits
from megatron_eqlen.graders.sandbox.probe import commands_refused
from megatron_eqlen.graders.sandbox.program import Isolation

PROGRAMS = (
    *("accelerate", "apt", "apt-get", "aws", "conda", "curl", "deepspeed", "docker", "git", "gsutil", "hf"),
    *("huggingface-cli", "ip", "kill", "kinit", "killall", "mpirun", "nsys", "numactl", "nvidia-smi", "pip"),
    *("pip3", "pkill", "podman", "python", "python3", "ray", "sbatch", "scontrol", "scp", "sleep", "squeue"),
    *("srun", "ssh", "sudo", "systemctl", "torchrun", "trl", "uv", "wandb", "wget"),
)
"""Programs with a stand-in on PATH; bash asks for one for every other that it does not find."""
OWN, RECORD = ".eqlen", ".eqlen/record"
HOME, HERE = f"{FOLDER}/{OWN}/home", f"{FOLDER}/{OWN}/here"
MOST_FILES, MOST_BYTES, DEEPEST = 5000, 1 << 17, 6
"""Limits of what a script may read of its repository: files, bytes of each, and folders below each other."""
STAND_IN = r"""#!/bin/bash
name=${EQLEN_NAME:-${0##*/}}; unset EQLEN_NAME
case $name in
  python*) [[ $1 == -c && -x /usr/bin/python3 ]] && exec /usr/bin/python3 "$@" ;;  # a value of the script
esac
printf '%s\0' "$name" "$@" > "$(mktemp "/work/.eqlen/record/$EPOCHREALTIME.XXXXXX")"
case $name in
  ssh) exec bash -c "${*: -1}" ;;
  sbatch) for word; do [[ -f $word ]] && exec bash "$word" "${@:2}"; done ;;
esac
while (($#)); do  # a launcher of another shell
  case $1 in
    bash | sh | */bash | */sh) exec bash "${@:2}" ;;
    --wrap) exec bash -c "$2" ;;
    --wrap=*) exec bash -c "${1#*=}" ;;
  esac
  shift
done
exit 0
"""
SETTINGS = r"""
command_not_found_handle() { EQLEN_NAME=$1 /work/.eqlen/stand_in "${@:2}"; }
source() {
  if [[ -e $1 ]] || builtin type -P -- "$1" > /dev/null; then builtin source "$@"
  else printf '%s\0' "$1" > "$(mktemp "/work/.eqlen/record/missing.XXXXXX")"; fi
}
function . { source "$@"; }
cd() { builtin cd "$@" 2> /dev/null || true; }
for name in chmod chown cp ln mkdir mv rm tee touch; do
  eval "$name() { command $name \"\$@\" 2> /dev/null || true; }"
done
unset name
"""
"""Read by every bash: a file or folder that is not here ends no script."""


class Launched(NamedTuple):
    """Commands that a script started, and its end."""

    commands: list[list[str]]
    """Programs with their arguments, in order."""
    missing: list[str]
    """Files that the script reads settings from, and that are not there."""
    end: CommandEnd


def launched(
    script: Path, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Launched:
    """Run the script with bash, where it can do no harm, and return the commands that it starts. The script
    sees its repository (the next folder above it with ``.git``, or else its own folder), and starts there.
    Raises ValueError where there is no sandbox."""
    if refusal := commands_refused():
        raise ValueError(
            f"{script}: bash runs a script in the sandbox, and this machine has none ({refusal}); save the "
            "arguments of its training command, one a line, and give that file: python3() { printf '%s\\n' "
            f'"$@" > args.txt; }}; export -f python3; bash {script.name}'
        )
    script = script.resolve()
    root = next((folder for folder in script.parents if (folder / ".git").exists()), script.parent)
    given = {"PATH": f"{FOLDER}/{OWN}/bin:/usr/bin:/bin", "HOME": HOME, "USER": "user", "SLURM_JOB_ID": "1"}
    given |= {"BASH_ENV": f"{FOLDER}/{OWN}/settings", "MASTER_ADDR": "127.0.0.1", **(variables or {})}
    start = [
        "bash",
        "-c",
        f'cd {HERE} && exec bash "$@"',
        "-",
        f"{HERE}/{script.relative_to(root)}",
        *arguments,
    ]
    limits = CommandLimits(seconds=20, processes=64, memory_mb=1024, folder_mb=128)
    with contextlib.closing(Sandbox(Isolation(True, True, True), sys.executable)) as sandbox:
        end = sandbox.command(Command(start, environment=given), _furnished(root, script), limits)
    files = sorted(folder_files(end.folder).items())
    record = {
        Path(name).name: text.decode(errors="replace")
        .replace(HOME, str(Path.home()))
        .replace(HERE, str(root))
        .split("\0")[:-1]
        for name, text in files
        if name.startswith(RECORD)
    }
    missing = [words[0] for name, words in record.items() if name.startswith("missing")]
    return Launched([words for name, words in record.items() if not name.startswith("missing")], missing, end)


def _furnished(root: Path, script: Path) -> bytes:
    """Return the folder that a script starts in, as a tar: its repository's small files, and stand-ins."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:

        def add(name: str, kind: bytes = tarfile.REGTYPE, text: str = "", target: str = "") -> None:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.mode, entry.linkname = kind, len(text.encode()), 0o755, target
            tar.addfile(entry, io.BytesIO(text.encode()))

        for name in ("", "/bin", "/home", "/here", "/record"):
            add(f"{OWN}{name}", tarfile.DIRTYPE)
        add(f"{OWN}/settings", text=SETTINGS)
        add(f"{OWN}/stand_in", text=STAND_IN)
        for name in PROGRAMS:
            add(f"{OWN}/bin/{name}", tarfile.SYMTYPE, target="../stand_in")
        for file in itertools.islice(_small_files(root, script), MOST_FILES):
            with contextlib.suppress(OSError):
                tar.add(file, f"{OWN}/here/{file.relative_to(root)}", filter=_plain)
    return buffer.getvalue()


def _small_files(root: Path, script: Path) -> Iterator[Path]:
    """Yield the script, its neighbours, and files below ``root``, but those of hidden folders."""
    yield script
    for folder, below, names in itertools.chain(os.walk(script.parent), os.walk(root)):
        below[:] = [
            name
            for name in below
            if not name.startswith(".") and folder.count("/") < DEEPEST + str(root).count("/")
        ]
        files = (Path(folder, name) for name in names)
        yield from (file for file in files if file.is_file() and file.stat().st_size <= MOST_BYTES)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.mode |= 0o755
    return entry
