"""vLLM's own server, with an engine and workers that die with it: started by ``server``, with vLLM's
arguments.

If the server that spawned it is killed, vLLM's engine otherwise waits for work for ever and holds the GPU's
memory.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from megatron_eqlen.processes.lifeline import die_with_launcher, named
from megatron_eqlen.processes.quiet import quiet

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


def main() -> None:
    os.environ.update(named())
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from megatron_eqlen.rollout.vllm.engine.engine_args import ROUTES_WORKER

    if ROUTES_WORKER in sys.argv or "--enable-return-routed-experts" in sys.argv:
        from megatron_eqlen.rollout.vllm.engine.routes import stream_routes

        stream_routes()
    stream_versions()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def stream_versions() -> None:
    """Make this process, a server's first, send ``weight_versions`` with all tokens of a request: vLLM would
    send them with the last ones only, which an aborted or lost request never gets."""
    from vllm.v1.engine.output_processor import RequestState

    new_completion = RequestState._new_completion_output

    def with_versions(self: RequestState, *args: Any, **kwargs: Any) -> CompletionOutput:
        output = new_completion(self, *args, **kwargs)
        output.weight_versions = self._weight_version_spans()
        return output

    RequestState._new_completion_output = with_versions


# Python's multiprocessing imports the main module of a server, as __mp_main__, into every process that it
# spawns, before anything else: here the engine and the workers begin to watch over their parent.
if __name__ in ("__main__", "__mp_main__"):
    die_with_launcher()
    quiet()
if __name__ == "__main__":
    main()
