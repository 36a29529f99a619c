"""Plays episodes of a ``verifiers`` environment (0.4). The python of verifiers' own virtual environment runs
this file, which imports nothing of ours.

    python -P verifiers_worker.py CONFIG         reads episodes, a line each, and writes rewards
    python -P verifiers_worker.py CONFIG COUNT   writes COUNT tasks as rows of a data file

CONFIG is JSON: verifiers' ``[env]`` block, for example ``{"taskset": {"id": "gsm8k-v1"}}``.
"""

import asyncio
import itertools
import json
import os
import sys

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.clients import ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.generic import concrete_type  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
    environment_class,
    load_environment,
)

OUT = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what an environment prints is no answer


def environment(config: dict):
    cls = environment_class(config["taskset"]["id"], config.get("id", ""))
    return load_environment(
        (concrete_type(cls, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig).model_validate(config)
    )


async def play(env, asked: dict) -> None:
    kind = type(env.taskset).task_type()
    try:
        task = kind(kind.data_type().model_validate(json.loads(asked["task"])), env.config.taskset.task)
        (slot,) = env.slots(task)
        client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var="NONE")
        episode = await env.run_slot(
            slot, ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
        )
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        answer = (
            {"error": str(errors[0])} if errors else {"reward": sum(trace.reward for trace in episode.traces)}
        )
    except Exception as error:  # noqa: BLE001  reported, and the rollout is dropped
        answer = {"error": repr(error)}
    OUT.write(json.dumps({"id": asked["id"]} | answer) + "\n")


async def serve(env) -> None:
    lines, running = asyncio.StreamReader(limit=1 << 26), set()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with env.serving():
        while line := await lines.readline():
            running.add(episode := asyncio.create_task(play(env, json.loads(line))))
            episode.add_done_callback(running.discard)


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
    made = environment(json.loads(sys.argv[1]))
    if len(sys.argv) > 2:
        for one in itertools.islice(made.taskset, int(sys.argv[2])):
            OUT.write(json.dumps(row(one)) + "\n")
    else:
        asyncio.run(serve(made))
