"""A vLLM server for a recipe's rollouts: ``python -m megatron_eqlen.engines.server RECIPE --port PORT``. It
sets vLLM's variables and becomes ``serve``, which is vLLM's own server behind a ``gate``."""

from __future__ import annotations

import argparse
import os
import sys

from megatron_eqlen.engines.server.gate import authorization
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.processes.cores import share_cores
from megatron_eqlen.processes.failures import run_script
from megatron_eqlen.processes.quiet import VERBOSE, keep_bytecode, quiet
from megatron_eqlen.recipe import Recipe, layout
from megatron_eqlen.recipe.engine_options import check_options
from megatron_eqlen.recipe.inputs import local_path, with_model
from megatron_eqlen.recipe.load import load

LOOPBACK = "127.0.0.1"


def server_command(recipe: Recipe, port: int, host: str = LOOPBACK) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment of a server that ``ServerEngine`` can use with this recipe."""
    from megatron_eqlen.engines.vllm_args import as_flags, engine_args, environ

    rollout = recipe.rollout
    model = str(local_path(recipe.model))
    flags = engine_args(model, rollout, recipe.model.dtype, recipe.longest_context) | {
        "host": host,
        "port": port,
        # in front of every path of vLLM's
        "middleware": "megatron_eqlen.engines.server.gate.Gate",
        "enable_scale_out": True,
        # for ``Delta.num_cached_tokens``
        "enable_prompt_tokens_details": True,
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "info" if VERBOSE in os.environ else "warning",
        "worker_extension_cls": "megatron_eqlen.engines.weights.worker.WorkerExtension",
        "weight_transfer_config": {"backend": f"eqlen_{rollout.sync}"},
    }
    # development mode serves pauses, weight updates and collective_rpc; the gate stands before them
    variables = {"VLLM_SERVER_DEV_MODE": "1", **environ(rollout)}
    return [sys.executable, "-m", "megatron_eqlen.engines.server.serve", *as_flags(flags)], variables


def main() -> None:
    parser = argparse.ArgumentParser(description="Start a vLLM server for a recipe's rollouts.")
    parser.add_argument("recipe")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen at (default: loopback)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    args = parser.parse_intermixed_args()
    authorization()  # without a secret, refuse before anything is loaded
    recipe = with_model(load(args.recipe, args.overrides))
    check_options("rollout.vllm", recipe.rollout.vllm)
    layout.require(layout.engine(recipe.rollout, read_config(local_path(recipe.model))))
    quiet()
    keep_bytecode()
    share_cores()
    command, environ = server_command(recipe, args.port, args.host)
    print(f"vLLM server of {recipe.model.path} on port {args.port}; {VERBOSE}=1 shows its log", flush=True)
    os.execve(command[0], command, os.environ | environ)


if __name__ == "__main__":
    run_script(main)
