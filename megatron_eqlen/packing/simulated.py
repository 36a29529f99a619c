"""Simulated streams of equal-length pairs, to predict packing before anything is generated.

The simulation follows the harvester: response lengths are log-normal; the shorter of two tracks ends a pair;
the survivor continues, and the fork's length is drawn conditional on being longer than the trunk; a stream
ends if both tracks end at once or reach the limit. Half of the pairs have equal rewards and carry no weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_eqlen.metrics import PACKING_REPEATED_TOKENS, PACKING_TOKENS
from megatron_eqlen.packing.context import BLOCK, keys_of_ranks, slices_of_ranks
from megatron_eqlen.packing.pack import Layout, plan_rows
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Node, TokenTree

MEDIAN = 6000 / 32768
"""Median of response lengths, as a share of the limit; an assumption, as is sigma."""
SIGMA = 0.8
SHORTEST_PROMPT = 64


def repeated_share(max_tokens_per_row: int, limit: int, prompt: int, streams: int = 128) -> float:
    """Return the share of the rows' positions that repeat a cut trunk: the real packer on simulated streams.

    ``limit`` and ``prompt``: tokens of the longest response and prompt.
    """
    metrics = plan_rows(simulated_streams(streams, limit, prompt), max_tokens_per_row).metrics
    return metrics[PACKING_REPEATED_TOKENS] / max(metrics[PACKING_TOKENS], 1)


def exchanged_share(
    trees: Sequence[TokenTree], max_tokens_per_row: int, ranks: int, layout: Layout = "tree"
) -> float:
    """Return the positions whose keys a row's busiest context-parallel rank receives from the ``ranks`` - 1
    others or sends to them, whichever is more, over all positions of the rows; on GPUs, where rows are whole
    blocks."""
    planned = plan_rows(trees, max_tokens_per_row, multiple_of=2 * ranks * BLOCK, layout=layout)
    exchanged = positions = 0
    for row in (planned.fill(row, for_loss=False) for row in planned.ranks[0]):
        slices, length = slices_of_ranks(row.position_ids, ranks), len(row.position_ids)
        seen = np.array(keys_of_ranks(slices, row.visible_until))
        everyone = seen.sum(0)
        given = [sum(int(everyone[start:end].sum()) for start, end in spans) for spans in slices]
        exchanged += max(*seen.sum(1).tolist(), *given) - length // ranks  # without its own
        positions += length
    return exchanged / positions


def simulated_streams(count: int, limit: int, prompt: int) -> list[TokenTree]:
    """Return simulated streams. ``limit`` and ``prompt``: tokens of the longest response and prompt."""
    rng = np.random.default_rng(0)
    median = max(1, round(MEDIAN * limit))
    return [simulated_stream(rng, number, median, limit, prompt) for number in range(count)]


def simulated_responses(count: int, limit: int, prompt: int) -> list[TokenTree]:
    """Return independent responses, each with its own prompt."""
    rng = np.random.default_rng(0)
    median = max(1, round(MEDIAN * limit))
    trees: list[TokenTree] = []
    for number in range(count):
        root = np.zeros((min(SHORTEST_PROMPT, prompt) + prompt) // 2, np.int32)
        tokens = np.zeros(min(response_length(rng, median, 0), limit), np.int32)
        answer = Node(0, Tokens.of(tokens, 0.0), 1.0, 1.0)
        trees.append(TokenTree(f"response {number}", [Node(-1, Tokens.of(root)), answer]))
    return trees


def simulated_stream(
    rng: np.random.Generator, number: int, median: int, limit: int, prompt: int
) -> TokenTree:
    """Return one stream's token tree (all tokens are 0: the packer's work does not depend on their
    values)."""
    ends = [response_length(rng, median, 0), response_length(rng, median, 0)]
    root = np.zeros(int(rng.integers(min(SHORTEST_PROMPT, prompt), prompt + 1)), np.int32)
    nodes, trunk, length = [Node(-1, Tokens.of(root))], 0, 0
    while length < min(ends) <= limit:
        side = np.zeros(min(ends) - length, np.int32)
        weight = float(rng.integers(0, 2))
        nodes += [Node(trunk, Tokens.of(side, 0.0), sign, weight) for sign in (1.0, -1.0)]
        trunk, length = len(nodes) - 1, min(ends)
        ends = [max(ends), response_length(rng, median, length)]
    return TokenTree(f"stream {number}", nodes)


def response_length(rng: np.random.Generator, median: int, longer_than: int) -> int:
    """Draw a log-normal length, conditional on being longer than ``longer_than``."""
    while True:
        draws = median * rng.lognormal(0.0, SIGMA, 1000)
        longer = draws[draws > longer_than + 1]
        if longer.size:
            return int(longer[0])
        median = int(median * 1.5) + 1
