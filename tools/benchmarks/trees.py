"""Forward and backward of the same streams as token trees, as 2N sequences and as N + 1 sequences.

* 2N: each side of each pair with its whole prefix (``layout: expanded``), the naive reading;
* N + 1: the trunk once and each leaf with its prefix, what a careful trainer without trees does.

All three are packed by the same packer into rows of the same budget and go through the same model with
the language-model head on supervised positions alone. ``efficiency`` is the speedup divided by the ratio of
tokens: the part of the saved tokens that becomes saved time. It cannot be 1: attention saves less than tokens
do (what the tree saves are prefixes, with shorter contexts than the leaves'), and the head, which is on the
same positions in all layouts, saves nothing. ``FLOP_ratio`` counts both; ``efficiency`` is at most its
``bound``, FLOP_ratio / token_ratio, unless some layout is computed faster than another. By hand, of N pairs
with sides of l tokens behind a prompt of P (2 a FLOPs of a token in the layers' matrices, 4 c of a pair, 2 h
of a supervised token in the head):

    tokens  tree P + 2 N l                                2N  sum_i 2 (P + i l)
    pairs   tree P^2 / 2 + sum_i 2 l (P + (i - 1/2) l)    2N  sum_i (P + i l)^2
    FLOPs   2 a tokens + 4 c pairs + 2 h 2 N l            of either

With P = 1024, l = 100 and the default model (a = 6.0M, c = 1,024, h = 1.05M) the bound is 0.88 at N = 6 and
0.84 at N = 12.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_eqlen.hf.config import DeltaNet, ModelConfig
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.groups import start, stop
from megatron_eqlen.models.tree_params import TreeParams
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.plan.flops import active_parameters, attention_layers
from megatron_eqlen.processes.distributed import device
from megatron_eqlen.recipe import ParallelRecipe
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.training.logprobs import token_logprobs
from megatron_eqlen.types import Node, Row, TokenTree
from tools.benchmarks.clock import memory, timed
from tools.benchmarks.table import show

BUDGET = 8192
"""Positions of a row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, nargs="+", default=[6, 12])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024], help="tokens")
    parser.add_argument("--lengths", nargs="+", choices=["equal", "uneven"], default=["equal", "uneven"])
    parser.add_argument("--segment", type=int, default=100, help="mean tokens of a side")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--delta-net", action="store_true", help="Gated DeltaNet in place of attention")
    parser.add_argument("--repeat", type=int, default=2, help="the fastest of so many steps counts")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    start(ParallelRecipe(), seed=0)
    config, results = model_config(args), []
    model = random_model(config, torch.float32)
    for pairs, prompt, lengths in itertools.product(args.pairs, args.prompts, args.lengths):
        tree = stream(pairs, prompt, lengths == "uneven", args.segment, args.vocabulary)
        case = {"pairs": pairs, "prompt": prompt, "lengths": lengths}
        results += [case | result for result in compare(model, config, tree, args.repeat)]
    stop()
    count = sum(parameter.numel() for parameter in model.parameters())
    show(results, f"{count / 1e6:.1f}M parameters, float32 on {device().type}")
    return results


def compare(
    model: torch.nn.Module, config: ModelConfig, tree: TokenTree, repeat: int
) -> Iterator[dict[str, Any]]:
    """Yield one result for each layout; ratios are against the tree."""
    planned = {
        "tree": plan_rows([tree], BUDGET),
        "2N": plan_rows([tree], BUDGET, layout="expanded"),
        "N+1": plan_rows(trunk_and_leaves(tree), BUDGET),
    }
    layouts = {name: [*plan.rows(0)] for name, plan in planned.items()}
    # Layouts take turns, so that other load on the machine affects all of them.
    turns = [{name: measure(model, config, rows) for name, rows in layouts.items()} for _ in range(repeat)]
    best = {name: {key: min(turn[name][key] for turn in turns) for key in turns[0][name]} for name in layouts}
    for name, result in best.items():
        tokens, flops, speedup = (result[key] / best["tree"][key] for key in ("tokens", "GFLOP", "seconds"))
        yield {
            "layout": name,
            **result,
            "token_ratio": tokens,
            "FLOP_ratio": flops,
            "speedup": speedup,
            "efficiency": speedup / tokens,
            "bound": flops / tokens,
        }


def measure(model: torch.nn.Module, config: ModelConfig, rows: list[Row]) -> dict[str, float]:
    """Return the seconds of one forward and backward of all rows, and peak memory above the idle level."""
    model.zero_grad(set_to_none=True)
    idle = memory(reset=True)
    seconds = timed(lambda: step(model, rows))
    return {
        "rows": len(rows),
        "tokens": sum(row.num_tokens for row in rows),
        "GFLOP": 3 * sum(forward_flops(row, config) for row in rows) / 1e9,
        "seconds": seconds,
        "peak_MB": (memory() - idle) / 1e6,
    }


def visible_pairs(row: Row) -> float:
    """Return the number of (query, key) pairs that attention computes."""
    return sum(node.length * (node.position + (node.length + 1) / 2) for node in row.nodes)


def forward_flops(row: Row, model: ModelConfig) -> float:
    """Return the FLOPs of a row's forward pass, as ``plan.flops`` counts them, with the head on supervised
    positions."""
    in_head = model.vocab_size * model.hidden_size
    linear = (active_parameters(model) - in_head) * row.num_tokens + in_head * (row.weights > 0).sum()
    pairs = attention_layers(model) * model.num_attention_heads * model.head_dim * visible_pairs(row)
    return 2 * float(linear) + 4 * pairs


def step(model: torch.nn.Module, rows: list[Row]) -> None:
    for row in rows:
        forward(model, row).backward()


def forward(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """Return the weighted sum of the row's supervised log-probs."""
    at = torch.from_numpy(np.flatnonzero(row.weights > 0)).to(device())
    ids, positions, labels, weights = (
        torch.from_numpy(x).to(device()) for x in (row.input_ids, row.position_ids, row.labels, row.weights)
    )
    tree = TreeParams.from_row(row)
    logits = model(ids[None], positions[None], None, packed_seq_params=tree, supervised=at)[0]
    logprobs, _ = token_logprobs(logits, labels[at])
    return (logprobs * weights[at]).sum()


def stream(pairs: int, prompt: int, uneven: bool, segment: int, vocabulary: int) -> TokenTree:
    """Return a caterpillar of random tokens; uneven sides have a third to five thirds of the mean length
    ``segment``."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(segment // 3, segment * 5 // 3 + 1, pairs) if uneven else np.full(pairs, segment)
    nodes, trunk = [Node(-1, Tokens.of(rng.integers(0, vocabulary, prompt).tolist()))], 0
    for length in lengths.tolist():
        for sign in (1.0, -1.0):
            side = rng.integers(0, vocabulary, length).tolist()
            nodes.append(Node(trunk, Tokens.of(side, [0.0] * length), sign, 1.0 / length))
        trunk = len(nodes) - 1
    return TokenTree("stream", nodes)


def trunk_and_leaves(tree: TokenTree) -> list[TokenTree]:
    """Return N + 1 chains: the trunk with all B_i supervised, and each A_i after its prefix."""
    trunk = [tree.nodes[0], *tree.nodes[2::2]]
    leaves = enumerate(tree.nodes[1::2], start=1)
    return [
        _chain(trunk, supervised=set(range(1, len(trunk)))),
        *(_chain([*trunk[:pair], leaf], supervised={pair}) for pair, leaf in leaves),
    ]


def _chain(nodes: list[Node], supervised: set[int]) -> TokenTree:
    linked = [
        replace(node, parent=i - 1, weight=node.weight if i in supervised else 0.0)
        for i, node in enumerate(nodes)
    ]
    return TokenTree("chain", linked)


def random_model(
    config: ModelConfig, dtype: torch.dtype, parallel: ParallelRecipe | None = None
) -> torch.nn.Module:
    """Return a model whose weights are drawn at random."""
    (model,) = build_model(config, parallel or ParallelRecipe(), dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    return model


def model_config(args: argparse.Namespace) -> ModelConfig:
    """Return a Qwen3 with heads of 64, four to a key head, and a feed-forward of 3 x hidden; with
    ``--delta-net``, as many heads of Gated DeltaNet in all layers."""
    heads = args.hidden // 64
    model = qwen3(args, heads, max(1, heads // 4), head_dim=64, feed_forward=3 * args.hidden)
    if not args.delta_net:
        return model
    linear = DeltaNet(heads, heads, 64, 64, conv_kernel_dim=4, layers=(True,) * args.layers)
    return replace(model, model_type="qwen3_next", delta_net=linear)


def qwen3(args: argparse.Namespace, heads: int, groups: int, head_dim: int, feed_forward: int) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3",
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        partial_rotary_factor=1.0,
        tie_word_embeddings=False,
        experts=None,
        delta_net=None,
    )
