"""vLLM's own server, with an engine and workers that die with it; ``server`` starts it with vLLM's arguments.

If the server that spawned it is killed, vLLM's engine otherwise waits for ever and holds the GPU's memory.
Engine and workers meet on this machine alone: gloo listens on loopback, and what they unpickle is sealed.
"""

from __future__ import annotations

import os
import secrets
from functools import partial
from types import SimpleNamespace

from megatron_eqlen.processes.lifeline import die_with_launcher, named
from megatron_eqlen.processes.quiet import quiet

PATIENCE = 5
"""Seconds that open requests have when the server ends, because its engine has died for example."""


def main() -> None:
    os.environ |= named() | {"GLOO_SOCKET_IFNAME": "lo", "EQLEN_SECRET": secrets.token_hex()}
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    import uvicorn
    from vllm.entrypoints.launchers.api_server import entry

    from megatron_eqlen.engines.server.requests import SETTINGS, check_requests, stream

    check_requests()
    stream()
    # until uvicorn listens to SIGTERM it kills: the error that vLLM raises may be lost, and the start hang
    entry.__dict__["signal"] = SimpleNamespace(SIGTERM=None, signal=lambda number, handler: None)
    # which otherwise waits for the last client, as long as that is silent
    uvicorn.__dict__["Config"] = partial(uvicorn.Config, timeout_graceful_shutdown=PATIENCE, **SETTINGS)
    entry.main()


# Python's multiprocessing imports the main module of a server, as __mp_main__, into every process that it
# spawns, before anything else: here the engine and the workers begin to watch over their parent.
if __name__ in ("__main__", "__mp_main__"):
    die_with_launcher()
    quiet()
    from megatron_eqlen.processes.distributed import seal  # imports torch

    seal()
if __name__ == "__main__":
    main()
