"""``megatron_eqlen.rollout.vllm.serve``, with an engine and workers that are forked from the server.

On CPUs vLLM spawns them, so that each imports vLLM again, which takes longer than most tests of servers. The
server of ``tests/job`` is as users start it.
"""

import multiprocessing.context
import os
import runpy

from megatron_eqlen.lifeline import die_with_launcher

if __name__ == "__main__":
    contexts = vars(multiprocessing.context)["_concrete_contexts"]
    contexts["spawn"] = contexts["fork"]
    os.register_at_fork(after_in_child=die_with_launcher)  # spawned, they do so when they import ``serve``
    runpy.run_module("megatron_eqlen.rollout.vllm.serve", run_name="__main__")
