"""Plays episodes of a ``verifiers`` environment (0.4), in verifiers' own virtual environment.

    python -P verifiers_worker.py CONFIG         plays an episode for each connection to the socket at stdin
    python -P verifiers_worker.py CONFIG COUNT   writes COUNT tasks as rows of a data file

CONFIG is JSON: verifiers' ``[env]`` block, for example ``{"taskset": {"id": "gsm8k-v1"}}``.
"""

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import sys

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.clients import ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # pyright: ignore[reportMissingImports]


async def play(env, asked: dict) -> dict:
    kind = type(env.taskset).task_type()
    try:
        task = kind(kind.data_type().model_validate(json.loads(asked["task"])), env.config.taskset.task)
        (slot,) = env.slots(task)
        client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var="NONE")
        episode = await env.run_slot(
            slot, ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
        )
    except Exception as error:  # noqa: BLE001  reported, and the rollout is dropped
        return {"error": repr(error)}
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return {"error": str(errors[0])} if errors else {"reward": sum(trace.reward for trace in episode.traces)}


async def serve(env) -> None:
    async def answer(lines, out) -> None:
        asked = json.loads(await lines.readline())
        out.write(json.dumps(await play(env, asked) if asked else {}).encode() + b"\n")
        out.close()

    async with env.serving():
        server = await asyncio.start_server(answer, sock=socket.socket(fileno=0), limit=1 << 26)
        await server.serve_forever()


def fork_player(parent: int) -> None:
    """Return in a new process, and end it with ``parent``, or on SIGTERM: with all that it has started, in
    whatever session, since orphans become children of the process that is here."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if not (player := os.fork()):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        return
    os.close(0)  # who asks when the player has gone must not wait
    ended = None
    while ended is None and os.getppid() == parent:
        if signal.sigtimedwait([signal.SIGTERM], 0.25):
            break
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == player:
                ended = os.waitstatus_to_exitcode(found[1])
                break
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for pid in children.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)
    os._exit(1 if ended is None else ended % 256)


def row(task) -> dict:
    prompt, system = task.data.prompt, task.data.system_prompt
    turns = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else json.loads(task.data.model_dump_json())["prompt"]
    )
    messages = [{"role": "system", "content": system}] * bool(system) + turns
    return {"messages": messages, "answer": task.data.model_dump_json()}


if __name__ == "__main__":
    config = resolve_env_config(json.loads(sys.argv[1]))
    if len(sys.argv) > 2:
        rows = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what an environment prints is no task
        for one in itertools.islice(load_environment(config).taskset, int(sys.argv[2])):
            rows.write(json.dumps(row(one)) + "\n")
    else:
        fork_player(int(os.environ["EQLEN_LAUNCHED"]))
        asyncio.run(serve(load_environment(config)))
