"""CPU time of the process that drives servers, for each token: servers answer at once, on many streams.

Each stream is a request of ``--tokens`` tokens, in events as vLLM 0.32 sends them. ``bulk``: a server writes
all events of a request together; ``single``: an event of each request in turn. ``driver``: its own seconds,
to send requests and to have their tokens in growing columns; ``readers``: those of the processes that read
for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from megatron_eqlen.engines.protocol import Request
from megatron_eqlen.engines.server.gate import KEY
from megatron_eqlen.engines.servers import ServerEngine
from megatron_eqlen.processes.collector import young_collected
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.recipe.contents import function, weights
from megatron_eqlen.tokens import GrowingTokens
from tools.benchmarks.table import show

VOCABULARY = 32768


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[64, 512], help="requests in flight at once"
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a request")
    parser.add_argument("--kept", type=int, nargs="+", default=[0, 20], help="tokens in each sampling mask")
    parser.add_argument("--servers", type=int, default=2)


def run(args: argparse.Namespace) -> None:
    os.environ.setdefault(KEY, "benchmark")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        for kept in args.kept:
            for way in ("bulk", "single"):
                rows += [measured(model, streams, kept, way, args) for streams in args.streams]
    show(rows, f"microseconds of CPU time a token, {args.servers} servers")


def write_model(folder: Path) -> Path:
    """Write a model of few weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measured(model: Path, streams: int, kept: int, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return a row: seconds of ``streams`` requests that begin at once."""
    context = multiprocessing.get_context("spawn")
    ports, answer = context.SimpleQueue(), {"function": function(model, "float32"), "weights": weights(model)}
    servers = [
        context.Process(target=serve, args=(answer, kept, way, args.tokens, ports), daemon=True)
        for _ in range(args.servers)
    ]
    for server in servers:
        server.start()
    rollout = RolloutRecipe.model_validate(
        {
            "engine": "server",
            "servers": [f"http://127.0.0.1:{ports.get()}" for _ in servers],
            "max_num_seqs": streams,
            "keep_sampling_mask": kept > 0,
        }
    )
    engine = ServerEngine(model, rollout, [0], 1 << 20)
    try:
        generate(engine, args.servers, args.tokens)  # readers start
        own, readers = time.process_time(), readers_seconds(servers)
        tokens = generate(engine, streams, args.tokens)
        own, readers = time.process_time() - own, readers_seconds(servers) - readers
    finally:
        engine.close()
        for server in servers:
            server.terminate()
    assert tokens == streams * args.tokens
    numbers = {"driver": own * 1e6 / tokens, "readers": readers * 1e6 / tokens}
    return {"masks of": kept, "events": way, "streams": streams} | numbers


def generate(engine: ServerEngine, streams: int, tokens: int) -> int:
    """Return how many tokens all requests brought."""
    grown = {f"{number}/0": GrowingTokens() for number in range(streams)}
    for number, name in enumerate(grown):
        engine.submit(Request(name, [1] * 300, tokens, number))
    with young_collected():
        while engine.has_unfinished:
            for delta in engine.step():
                grown[delta.request_id].append(delta.token_ids, delta.columns, 0)
    return sum(map(len, grown.values()))


def readers_seconds(servers: list[Any]) -> float:
    """Return the CPU seconds of this process's children that are no servers of the benchmark."""
    others = {server.pid for server in servers}
    children = [child for child in psutil.Process().children() if child.pid not in others]
    return sum(sum(child.cpu_times()[:2]) for child in children)


def serve(answer: dict[str, Any], kept: int, way: str, tokens: int, ports: Any) -> None:
    """Answer as ``engines.server`` does, with tokens that are known beforehand."""
    setup = {
        "vocab_size": VOCABULARY,
        "max_model_len": 1 << 20,
        "function": answer["function"],
        "started_with": {},
        "stock": "vLLM V2",
    }
    events: dict[int, list[bytes]] = {}

    async def rpc(request: web.Request) -> web.Response:
        setup_asked = (await request.json())["method"] == "eqlen_setup"
        return web.json_response({"results": [setup if setup_asked else answer["weights"]]})

    async def generate(request: web.Request) -> web.StreamResponse:
        interval = (await request.json())["sampling_params"]["stream_interval"]
        response = web.StreamResponse()
        await response.prepare(request)
        if interval not in events:
            events[interval] = [*make_events(tokens, interval, kept)]
        if way == "bulk":
            await response.write(b"".join(events[interval]))
        else:
            for event in events[interval]:
                await response.write(event)
                await asyncio.sleep(0.001)
        return response

    async def other(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})

    async def listen() -> None:
        app = web.Application()
        app.router.add_post("/collective_rpc", rpc)
        app.router.add_post("/inference/v1/generate", generate)
        app.router.add_route("*", "/{path:.*}", other)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(listen())


def make_events(tokens: int, interval: int, kept: int) -> Any:
    """Yield the server-sent events of a request of ``tokens`` tokens."""
    draw = random.Random(0)
    for first in range(0, tokens, interval):
        end = min(first + interval, tokens)
        ids = [draw.randrange(1, VOCABULARY) for _ in range(first, end)]
        content = [
            {"token": f"token_id:{token}", "logprob": -draw.expovariate(3), "bytes": [*str(token).encode()],
             "top_logprobs": [], "rank": 1}
            for token in ids
        ]  # fmt: skip
        choice = {
            "index": 0,
            "logprobs": {"content": content},
            "finish_reason": "length" if end == tokens else None,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": [[token, *draw.sample(range(VOCABULARY), kept - 1)] for token in ids]
            if kept
            else None,
            "weight_versions": [{"version": "default", "start": 0, "end": end}],
        }
        yield (
            b"data: " + json.dumps({"request_id": "r", "choices": [choice], "usage": None}).encode() + b"\n\n"
        )
    usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    yield (
        b"data: "
        + json.dumps({"request_id": "r", "choices": [], "usage": usage}).encode()
        + b"\n\ndata: [DONE]\n\n"
    )
