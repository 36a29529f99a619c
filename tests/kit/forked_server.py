"""``megatron_eqlen.engines.server.serve``, with an engine and workers that are forked from the server.

On CPUs vLLM spawns them, so that each imports vLLM again, which takes longer than most tests of servers. One
test of ``tests/job`` leaves the engine to Python and, each week, starts a server as users do.
"""

import multiprocessing.context
import os
import runpy

from megatron_eqlen.processes.lifeline import die_with_launcher


def die_in_child() -> None:
    try:
        die_with_launcher()
    except SystemExit:
        os._exit(1)  # Python ignores exceptions of such a hook, and the child would live for ever


if __name__ == "__main__":
    contexts = vars(multiprocessing.context)["_concrete_contexts"]
    contexts["spawn"] = contexts["fork"]
    os.register_at_fork(after_in_child=die_in_child)  # spawned, they do so when they import ``serve``
    runpy.run_module("megatron_eqlen.engines.server.serve", run_name="__main__")
