"""Forward and backward of the same streams as token trees, as 2N sequences and as N + 1 sequences.

* 2N: each side of each pair with its whole prefix (``layout: expanded``), the naive reading;
* N + 1: the trunk once and each leaf with its prefix, what a careful trainer without trees does.

All three are packed by the same packer into rows of the same budget and go through the same model with
the language-model head on supervised positions alone. ``efficiency`` is the speedup divided by the ratio of
tokens: the part of the saved tokens that becomes saved time. It cannot be 1: attention saves less than tokens
do (a leaf's tokens see long contexts in every layout; what the tree saves are prefixes, with shorter ones;
``attention_ratio`` counts (query, key) pairs), and the head, which is on the same positions in all layouts,
saves nothing. ``FLOP_ratio`` counts both, ``FLOP_efficiency`` is the speedup divided by it: 1 where the tree
computes as fast as plain sequences. Then ``efficiency`` is its ``bound``, FLOP_ratio / token_ratio, which no
implementation exceeds that does not compute some layout faster than another. By hand, of N pairs with sides
of l tokens behind a prompt of P (2 a FLOPs of a token in the layers' matrices, 4 c of a pair, 2 h of a
supervised token in the head):

    tokens  tree P + 2 N l                                2N  sum_i 2 (P + i l)
    pairs   tree P^2 / 2 + sum_i 2 l (P + (i - 1/2) l)    2N  sum_i (P + i l)^2
    FLOPs   2 a tokens + 4 c pairs + 2 h 2 N l            of either

With P = 1024, l = 100 and the default model (a = 6.0M, c = 1,024, h = 1.05M) the bound is 0.88 at N = 6 and
0.84 at N = 12.
``metadata`` is what building the rows' arrays and everything that the kernels derive from them takes, as a
share of the step.

``--context N`` counts instead what N context-parallel ranks send, and how even their work is: bytes of keys
and values in the forward pass of an attention layer (the backward pass sends as many back).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_eqlen.hf.config import DeltaNet, Experts, ModelConfig
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.context import Share
from megatron_eqlen.models.gated_delta_net import CHUNK
from megatron_eqlen.models.groups import start, stop
from megatron_eqlen.models.tree_attention import tree_block_mask
from megatron_eqlen.models.tree_params import TreeParams
from megatron_eqlen.packing.context import BLOCK
from megatron_eqlen.packing.pack import pack
from megatron_eqlen.plan.flops import active_parameters, attention_layers
from megatron_eqlen.processes.distributed import device
from megatron_eqlen.recipe import ParallelRecipe
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.training.logprobs import token_logprobs
from megatron_eqlen.types import Node, Row, TokenTree
from tools.benchmarks.clock import memory, timed
from tools.benchmarks.table import show

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=["qwen3", "qwen3_moe", "qwen3_next"], default="qwen3")
    parser.add_argument("--pairs", type=int, nargs="+", default=[6, 12])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024], help="tokens")
    parser.add_argument("--lengths", nargs="+", choices=["equal", "uneven"], default=["equal", "uneven"])
    parser.add_argument("--segment", type=int, default=100, help="mean tokens of a side")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--budget", type=int, default=8192, help="positions of a row")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2, help="4 for qwen3_next")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--head", choices=["supervised", "all"], default="supervised")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on CPU")
    parser.add_argument("--repeat", type=int, default=2, help="the fastest of so many steps counts")
    parser.add_argument("--context", type=int, default=1, help="ranks that share a row: what they send")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    if args.context > 1:
        title = f"{args.context} context-parallel ranks, keys and values of {keys_bytes(args)} bytes a token"
        show([case | sent(trees, args) for case, trees in cases(args)], title, args.json)
        return
    torch.set_num_threads(args.threads)
    start(ParallelRecipe(), seed=0)
    model = random_model(model_config(args), DTYPES[args.dtype])
    results = [case | result for case, trees in cases(args) for result in compare(model, trees, args)]
    stop()
    count = sum(parameter.numel() for parameter in model.parameters())
    title = f"{args.family}, {count / 1e6:.1f}M parameters, {args.dtype} on {device().type}"
    show(results, title, args.json)


def cases(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[TokenTree]]]:
    for pairs, prompt, lengths in itertools.product(args.pairs, args.prompts, args.lengths):
        case = {"pairs": pairs, "prompt": prompt, "lengths": lengths}
        yield case, streams(pairs, prompt, lengths == "uneven", args)


def sent(trees: list[TokenTree], args: argparse.Namespace) -> dict[str, Any]:
    """Return the traffic of the busiest rank in the widest row, beside that of an all-gather or a ring, which
    are the same; and the ratio of its attention to the mean."""
    ranks = args.context
    row = max(pack(trees, args.budget, multiple_of=2 * ranks * BLOCK)[0], key=lambda row: len(row.input_ids))
    shares = [Share.of(row, rank, ranks, "cpu") for rank in range(ranks)]
    area = [float((row.position_ids[share.positions] + 1).sum()) for share in shares]
    each, length = keys_bytes(args) / 1e6, len(row.input_ids)
    everything = length * (ranks - 1) / ranks * each
    received = max(sum(share.receive_counts) for share in shares) * each
    return {
        "positions": length,
        "received_MB": received,
        "sent_MB": max(sum(share.send_counts) for share in shares) * each,
        "all_gather_MB": everything,
        "of_all_gather": sum(sum(share.receive_counts) for share in shares) * each / (ranks * everything),
        "area_max/mean": max(area) / float(np.mean(area)),
    }


def keys_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of a token's key and value in a layer."""
    model = model_config(args)
    return 2 * model.num_key_value_heads * model.head_dim * DTYPES[args.dtype].itemsize


def compare(model: torch.nn.Module, trees: list[TokenTree], args: argparse.Namespace) -> Iterator[dict]:
    """Yield one result for each layout; ratios are against the tree."""
    layouts = {
        "tree": lambda: pack(trees, args.budget)[0],
        "2N": lambda: pack(trees, args.budget, layout="expanded")[0],
        "N+1": lambda: pack(trunk_and_leaves(trees), args.budget)[0],
    }
    # Layouts take turns, so that other load on the machine affects all of them.
    turns = [{name: measure(model, rows, args) for name, rows in layouts.items()} for _ in range(args.repeat)]
    best = {name: {key: min(turn[name][key] for turn in turns) for key in turns[0][name]} for name in layouts}
    for name, result in best.items():
        ratio, area, flops, speedup = (
            result[key] / best["tree"][key] for key in ("tokens", "Mpairs", "GFLOP", "seconds")
        )
        yield {
            "layout": name,
            **result,
            "metadata": result["metadata"] / result["seconds"],
            "token_ratio": ratio,
            "attention_ratio": area,
            "FLOP_ratio": flops,
            "speedup": speedup,
            "efficiency": speedup / ratio,
            "bound": flops / ratio,
            "FLOP_efficiency": speedup / flops,
        }


def measure(
    model: torch.nn.Module, layout: Callable[[], list[Row]], args: argparse.Namespace
) -> dict[str, Any]:
    """Return seconds of one forward and backward of all rows and of their metadata; memory above the idle
    level."""
    rows = layout()
    model.zero_grad(set_to_none=True)
    idle = memory(reset=True)
    seconds = timed(lambda: step(model, rows, args.head))
    peak = memory() - idle
    return {
        "rows": len(rows),
        "tokens": sum(row.num_tokens for row in rows),
        "Mpairs": sum(visible_pairs(row) for row in rows) / 1e6,
        "GFLOP": 3 * sum(forward_flops(row, model_config(args), args.head) for row in rows) / 1e9,
        "seconds": seconds,
        "peak_MB": peak / 1e6,
        "metadata": timed(layout) + timed(lambda: [derive(row, args) for row in rows]),
    }


def visible_pairs(row: Row) -> float:
    """Return the number of (query, key) pairs that attention computes."""
    return sum(node.length * (node.position + (node.length + 1) / 2) for node in row.nodes)


def forward_flops(row: Row, model: ModelConfig, head: str) -> float:
    """Return the FLOPs of a row's forward pass, as ``plan.flops`` counts them, with the head where it is
    computed."""
    in_head = model.vocab_size * model.hidden_size
    positions = (row.weights > 0).sum() if head == "supervised" else row.num_tokens
    linear = (active_parameters(model) - in_head) * row.num_tokens + in_head * positions
    pairs = attention_layers(model) * model.num_attention_heads * model.head_dim * visible_pairs(row)
    return 2 * float(linear) + 4 * pairs


def step(model: torch.nn.Module, rows: list[Row], head: str) -> None:
    for row in rows:
        forward(model, row, head).backward()


def forward(model: torch.nn.Module, row: Row, head: str) -> torch.Tensor:
    """Return the weighted sum of the row's supervised log-probs."""
    at = torch.from_numpy(np.flatnonzero(row.weights > 0)).to(device())
    ids, positions, labels, weights = (
        torch.from_numpy(x).to(device()) for x in (row.input_ids, row.position_ids, row.labels, row.weights)
    )
    logits = model(
        ids[None],
        positions[None],
        None,
        packed_seq_params=TreeParams.from_row(row),
        supervised=at if head == "supervised" else None,
    )[0]
    logprobs, _ = token_logprobs(logits if head == "supervised" else logits[at], labels[at])
    return (logprobs * weights[at]).sum()


def derive(row: Row, args: argparse.Namespace) -> None:
    """Derive everything that a model of the family derives from a row's nodes."""
    tree = TreeParams.from_row(row)
    if tree.device.type == "cuda":
        tree_block_mask(tree.visible_until)
    else:
        _ = tree.calls
    if args.family == "qwen3_next":
        _ = tree.seams(4), tree.run_levels if tree.device.type == "cuda" else tree.chunks(CHUNK)


def streams(pairs: int, prompt: int, uneven: bool, args: argparse.Namespace) -> list[TokenTree]:
    """Return caterpillars with random tokens; uneven sides have a third to five thirds of the mean length."""
    rng = np.random.default_rng(0)
    trees = []
    for number in range(args.streams):
        low, high = args.segment // 3, args.segment * 5 // 3
        lengths = rng.integers(low, high + 1, pairs) if uneven else np.full(pairs, args.segment)
        nodes, trunk = [Node(-1, Tokens.of(rng.integers(0, args.vocabulary, prompt).tolist()))], 0
        for length in lengths.tolist():
            for sign in (1.0, -1.0):
                side = rng.integers(0, args.vocabulary, length).tolist()
                nodes.append(Node(trunk, Tokens.of(side, [0.0] * length), sign, 1.0 / length))
            trunk = len(nodes) - 1
        trees.append(TokenTree(f"stream {number}", nodes))
    return trees


def trunk_and_leaves(trees: list[TokenTree]) -> list[TokenTree]:
    """Return N + 1 chains for each stream: its trunk with all B_i supervised, and each A_i after its
    prefix."""
    chains = []
    for tree in trees:
        trunk = [tree.nodes[0], *tree.nodes[2::2]]
        chains.append(_chain(tree.name, trunk, supervised=set(range(1, len(trunk)))))
        for pair, leaf in enumerate(tree.nodes[1::2], start=1):
            chains.append(_chain(tree.name, [*trunk[:pair], leaf], supervised={pair}))
    return chains


def _chain(name: str, nodes: list[Node], supervised: set[int]) -> TokenTree:
    linked = [
        replace(node, parent=i - 1, weight=node.weight if i in supervised else 0.0)
        for i, node in enumerate(nodes)
    ]
    return TokenTree(name, linked)


def random_model(
    config: ModelConfig, dtype: torch.dtype, parallel: ParallelRecipe | None = None
) -> torch.nn.Module:
    """Return a model whose weights are drawn at random."""
    (model,) = build_model(config, parallel or ParallelRecipe(), dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            elif "norm" not in name:
                parameter.zero_()  # the delta net's A_log and dt_bias
    return model


def model_config(args: argparse.Namespace) -> ModelConfig:
    """Return heads of 64; feed-forward 3 x hidden; experts an eighth of that, 4 of 16; delta net heads
    of 64."""
    layers, heads = args.layers, args.hidden // 64
    linear = args.family == "qwen3_next"
    experts = Experts(
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=3 * args.hidden // 8,
        norm_topk_prob=True,
        shared_expert_intermediate_size=3 * args.hidden // 8 if linear else 0,
        layers=(True,) * layers,
    )
    delta_net = DeltaNet(
        num_key_heads=heads // 2,
        num_value_heads=heads,
        key_head_dim=64,
        value_head_dim=64,
        conv_kernel_dim=4,
        layers=tuple((i + 1) % 4 != 0 for i in range(layers)),
    )
    return ModelConfig(
        model_type=args.family,
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=64,
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        partial_rotary_factor=0.25 if linear else 1.0,
        tie_word_embeddings=False,
        experts=None if args.family == "qwen3" else experts,
        delta_net=delta_net if linear else None,
    )
