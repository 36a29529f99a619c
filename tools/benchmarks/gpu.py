"""Costs of the parts of a training step, at the paper's shapes on one GPU: a first look at a new machine.

A line is one part on one row of token trees: its forward pass, its backward pass, floating-point operations
that the mathematics needs a second (a recomputed layer counts once), and the same as a share of a yardstick,
measured beside it:

* attention, of 8 query heads and 1 key head (a TP-8 rank of Qwen3-32B): a causal flash attention of as
  many positions;
* delta rule, of 16 heads of 128 (a TP-2 rank of Qwen3-Next): the same on a plain sequence;
* head, the log-probs of a vocabulary's share, and layers, 4 of Qwen3-32B's 64 as a TP-8 rank has them: a
  matrix product of 8,192 x 8,192 x 8,192 in the same dtype. Nothing is sent between ranks.

A part that does not fit into memory says so. The defaults are for a GPU with 80 GB; a CPU runs them smaller:
``--positions 512 --hidden 64 --layers 1 --vocabulary 128 --matrix 256 --dtype float32 --repeat 1``.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_eqlen.models.gated_delta_net import tree_delta_rule
from megatron_eqlen.models.groups import start, stop
from megatron_eqlen.models.tree_attention import BLOCK, tree_attention
from megatron_eqlen.models.tree_params import TreeParams
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.processes.distributed import device
from megatron_eqlen.recipe import ParallelRecipe
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.training.logprobs import token_logprobs
from megatron_eqlen.types import Node, Row, TokenTree
from tools.benchmarks import trees
from tools.benchmarks.clock import fastest, memory
from tools.benchmarks.table import show
from tools.benchmarks.trees import visible_pairs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

PROMPT, DELTA_HEADS, DELTA_DIM = 64, 16, 128
HEADS, GROUPS, FEED_FORWARD = 8, 1, 5 / 8
"""Heads, key groups and feed-forward share (of ``--hidden``) of a TP-8 rank of Qwen3-32B."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--positions", type=int, nargs="+", default=[36864, 69632], help="of a row")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 256], help="of attention")
    parser.add_argument("--pairs", type=int, default=10, help="of a row's stream")
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=18992, help="151,936 of Qwen3 on 8 ranks")
    parser.add_argument("--matrix", type=int, default=8192, help="of the product that is a yardstick")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of so many counts, after one more")


def run(args: Namespace) -> list[dict[str, Any]]:
    start(ParallelRecipe(), seed=0)
    results: list[dict[str, Any]] = []
    try:
        for name in args.parts:
            results.extend(PARTS[name](args))
    finally:  # what was measured before a part that fails is kept
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "this CPU"
        if results:
            show(results, f"{args.dtype} on {name}")
        stop()
    return results


class Cost(NamedTuple):
    """Seconds, and peak bytes that the GPU had in use."""

    forward: float
    backward: float
    peak: int

    def speed(self, flops: float) -> float:
        """FLOP/s."""
        return flops / (self.forward + self.backward)


def result(
    part: str, positions: int, flops: float, cost: Cost | None, yardstick: float | None
) -> dict[str, Any]:
    """Return a line of the table. ``flops``: of a forward pass and a backward pass of twice that;
    ``yardstick``: FLOP/s; None for ``cost`` or ``yardstick``: memory was not enough."""
    line: dict[str, Any] = {"part": part, "positions": positions}
    if cost is None:
        missing = dict.fromkeys(("forward_ms", "backward_ms", "TFLOP/s", "of_yardstick"), "–")
        return line | missing | {"peak_GB": "out of memory"}
    speed = cost.speed(flops)
    return line | {
        "forward_ms": 1e3 * cost.forward,
        "backward_ms": 1e3 * cost.backward,
        "TFLOP/s": speed / 1e12,
        "of_yardstick": speed / yardstick if yardstick else "–",
        "peak_GB": cost.peak / 1e9,
    }


def attention(args: Namespace) -> Iterator[dict[str, Any]]:
    for positions in args.positions:
        row = stream(positions, args)
        n, tree = len(row.input_ids), TreeParams.from_row(row)
        for dim in args.head_dims:
            inputs = [random((1, heads, n, dim), args) for heads in (HEADS, GROUPS, GROUPS)]
            ours = measure(partial(tree_attention, tree=tree, scale=dim**-0.5), inputs, args)
            flash = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
            plain = measure(flash, inputs, args)
            flops, full = (3.5 * 4 * HEADS * dim * pairs for pairs in (visible_pairs(row), n * (n + 1) / 2))
            yardstick = plain.speed(full) if plain else None
            yield result(f"attention, heads of {dim}", n, flops, ours, yardstick)


def delta_rule(args: Namespace) -> Iterator[dict[str, Any]]:
    """Measure the delta rule. Its FLOPs: the state's update and reading it, 4 for each of its numbers at
    every position."""
    for positions in args.positions:
        rows = [stream(positions, args), chain(positions, args)]
        n = len(rows[0].input_ids)
        shape = (1, n, DELTA_HEADS, DELTA_DIM)
        q, k = (F.normalize(random(shape, args), dim=-1).detach().requires_grad_() for _ in range(2))
        decay = (-F.softplus(random(shape[:3], args).float())).detach().requires_grad_()
        beta = random(shape[:3], args).sigmoid().detach().requires_grad_()
        inputs = [q, k, random(shape, args), decay, beta]
        ours, plain = (
            measure(partial(tree_delta_rule, tree=TreeParams.from_row(row)), inputs, args) for row in rows
        )
        flops = 3 * 8 * DELTA_HEADS * DELTA_DIM**2 * n
        yield result("delta rule", n, flops, ours, plain.speed(flops) if plain else None)


def head(args: Namespace) -> Iterator[dict[str, Any]]:
    """Measure the product with the head's weight, and the loss, at 32,768 supervised positions or fewer."""
    n, yardstick = min(32768, max(args.positions)), matrix_product(args)
    labels = torch.randint(0, args.vocabulary, (n,), device=device())
    inputs = [random((n, args.hidden), args), random((args.vocabulary, args.hidden), args)]
    cost = measure(lambda x, weight: token_logprobs(x @ weight.T, labels, 0.6)[0], inputs, args)
    yield result("head and loss", n, 6 * n * args.hidden * args.vocabulary, cost, yardstick)


def layers(args: Namespace) -> Iterator[dict[str, Any]]:
    """Measure the layers with the embedding and the head."""
    yardstick = matrix_product(args)
    model = trees.qwen3(args, HEADS, GROUPS, head_dim=128, feed_forward=int(FEED_FORWARD * args.hidden))
    for recompute in ("none", "full"):
        built = trees.random_model(model, DTYPES[args.dtype], ParallelRecipe(recompute=recompute))
        for positions in args.positions:
            row = stream(positions, args)
            flops = 3 * trees.forward_flops(row, model)
            cost = measure_step(built, row, args)
            yield result(f"layers, recompute {recompute}", len(row.input_ids), flops, cost, yardstick)
        del built


PARTS: dict[str, Callable[[Namespace], Iterator[dict[str, Any]]]] = {
    "attention": attention,
    "delta_rule": delta_rule,
    "head": head,
    "layers": layers,
}


def stream(positions: int, args: Namespace) -> Row:
    """Return a stream of pairs of equal sides, in about ``positions`` positions, whole blocks."""
    side = (positions - PROMPT) // (2 * args.pairs)
    return _row(trees.stream(args.pairs, PROMPT, False, side, args.vocabulary), positions)


def chain(positions: int, args: Namespace) -> Row:
    """Return one sequence in as many positions as the stream has."""
    n = 2 * args.pairs * ((positions - PROMPT) // (2 * args.pairs))
    tokens = np.random.default_rng(0).integers(0, args.vocabulary, PROMPT + n)
    prompt, response = Tokens.of(tokens[:PROMPT]), Tokens.of(tokens[PROMPT:], np.zeros(n))
    return _row(TokenTree("chain", [Node(-1, prompt), Node(0, response, 1.0, 1.0)]), positions)


def _row(tree: TokenTree, positions: int) -> Row:
    (row,) = plan_rows([tree], positions + BLOCK, multiple_of=BLOCK).rows(0)
    return row


def random(shape: Sequence[int], args: Namespace) -> Tensor:
    return torch.randn(tuple(shape), device=device(), dtype=DTYPES[args.dtype], requires_grad=True)


def matrix_product(args: Namespace) -> float:
    """Return the FLOP/s of a product of two square matrices."""
    a, b = (random((args.matrix, args.matrix), args).detach() for _ in range(2))
    return 2 * args.matrix**3 / fastest(lambda: a @ b, args.repeat)


def measure(function: Callable[..., Tensor], inputs: list[Tensor], args: Namespace) -> Cost | None:
    """Measure a part; None if the GPU's memory is not enough."""

    def both() -> None:
        output = function(*inputs)
        torch.autograd.grad(output, inputs, torch.ones_like(output))

    return _cost(lambda: function(*inputs), both, args)


def measure_step(model: torch.nn.Module, row: Row, args: Namespace) -> Cost | None:
    model.zero_grad(set_to_none=True)
    return _cost(lambda: trees.forward(model, row), lambda: trees.step(model, [row]), args)


def _cost(forward: Callable[[], object], both: Callable[[], object], args: Namespace) -> Cost | None:
    memory(reset=True)
    try:
        with torch.no_grad():
            seconds = fastest(forward, args.repeat)
        return Cost(seconds, max(fastest(both, args.repeat) - seconds, 0.0), memory())
    except torch.OutOfMemoryError:
        return None
