"""Ranks that end in a given way, or hang: ``python -m tests.kit.ends HOW FOLDER``, under a launcher."""

import os
import signal
import sys
import time
from pathlib import Path

from megatron_eqlen.processes import failures
from tests.kit.processes import within


def main(how: str, folder: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as the ranks of a run do
    rank = int(os.environ["RANK"])
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    assert within(60, Path(folder, f"pid-{1 - rank}").exists)  # a launcher may end the other one soon
    if how == "raise" and rank == 0:
        assert within(60, Path(folder, "raised").exists)
        failures.record(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
        return 1
    if how == "raise":
        try:
            raise RuntimeError("no more")
        except RuntimeError as error:
            failures.record(error)
        Path(folder, "raised").touch()
        time.sleep(600)  # it is slow to end
    if how == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "work":  # the way that commands go
        from megatron_eqlen.cli import commands
        from megatron_eqlen.processes.interrupts import Interrupts
        from megatron_eqlen.recipe.load import load

        stop = Interrupts(Path(folder) / "STOP")
        commands._start(load("recipes/tiny_cpu.yaml"), lambda _: time.sleep(600), stop)
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
