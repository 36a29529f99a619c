"""The paper's learning tax (Proposition 2), measured: gradients on prefixes that responses share.

Each trained segment that holds a token after the same path gives that token the gradient c x d log pi, with c
= weight x advantage and the same d log pi for all (before the step's first update). GRPO trains a shared
prefix once for each response, with that response's advantage; advantages of both signs cancel. EqLen trains
an inherited prefix once, as the pair's side B.

Prefixes that responses share by chance, in any method, are counted as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from megatron_eqlen.files import step_folders
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.objectives.dynamic_sampling import trained
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.compare import METHOD, Rows
from megatron_eqlen.report.run_groups import Group
from megatron_eqlen.rollout.record.reader import read_step
from megatron_eqlen.tokens import COLUMNS, NUMBERS
from megatron_eqlen.types import Node, TokenTree


@dataclass(frozen=True)
class Tax:
    """Sums over the shared tokens of some steps; ``+`` joins those of several."""

    trained: int = 0
    """Number of trained tokens, shared or not, each as often as it is trained."""
    shared: int = 0
    """Number of different tokens that two or more paths share and that are trained at least once."""
    opposed: int = 0
    """Number of shared tokens that are trained with both signs."""
    gross: float = 0.0
    """Sum of the absolute coefficients of shared tokens."""
    net: float = 0.0
    """Sum of the absolute values of each shared token's summed coefficients."""

    def __add__(self, other: Tax) -> Tax:
        return Tax(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def cancelled_share(self) -> float:
        """Share of the shared tokens' absolute coefficients that other responses cancel."""
        return 1 - self.net / self.gross if self.gross else 0.0


def learning_tax(trees: Sequence[TokenTree]) -> Tax:
    """Return the tax of one optimizer step's trees, with advantages and weights."""
    tax = Tax()
    prompts: dict[bytes, list[TokenTree]] = defaultdict(list)
    for tree in trees:
        prompts[tree.nodes[0].token_ids.tobytes()].append(tree)
        for node in tree.nodes:
            tax += Tax(trained=len(node) if _coefficient(node) else 0)
    for values in chain.from_iterable(map(shared_coefficients, prompts.values())):
        tax += Tax(
            shared=1,
            opposed=int(values.min() < 0 < values.max()),
            gross=float(np.abs(values).sum()),
            net=float(abs(values.sum())),
        )
    return tax


def shared_coefficients(trees: Sequence[TokenTree]) -> Iterator[np.ndarray]:
    """Yield, for each token that two or more paths of one prompt's ``trees`` share after the same tokens, [n]
    float64: the coefficients of the segments that train it, at least one."""
    places: dict[tuple[int, int], int] = {}
    """(place of the token before, token) -> place: a trie of the paths."""
    paths: Counter[int] = Counter()
    coefficients: dict[int, dict[int, float]] = defaultdict(dict)
    for node_path in chain.from_iterable(map(_node_paths, trees)):
        place = 0
        for node in node_path:
            value = _coefficient(node)
            for token in node.token_ids.tolist():
                place = places.setdefault((place, token), len(places) + 1)
                paths[place] += 1
                if value:
                    coefficients[place][id(node)] = value
    for place, values in coefficients.items():
        if paths[place] > 1:
            yield np.array([*values.values()])


def _node_paths(tree: TokenTree) -> Iterator[list[Node]]:
    """Yield the nodes from the end of the prompt to each leaf."""
    for number in set(range(1, len(tree.nodes))) - {node.parent for node in tree.nodes}:
        nodes = []
        while number > 0:
            nodes.append(tree.nodes[number])
            number = tree.nodes[number].parent
        yield nodes[::-1]


def _coefficient(node: Node) -> float:
    return float(node.weight * np.mean(node.advantage))


TAX_STEPS = 8
"""Number of a run's steps that are read, evenly spread."""


def tax_of_run(folder: Path, recipe: Recipe) -> Tax:
    """Return the tax of some steps of a run; zero if it kept no rollouts."""
    steps = [step for _, step in step_folders(folder / "streams")]
    chosen = {round(number) for number in np.linspace(0, len(steps) - 1, TAX_STEPS)} if steps else ()
    tax = Tax()
    for number in sorted(chosen):
        rollouts = trained(read_step(steps[number], without=COLUMNS.keys() - NUMBERS), recipe)
        tax = sum(map(learning_tax, build_minibatches(rollouts, recipe)[0]), tax)
    return tax


def learning_taxes(groups: Sequence[Group]) -> Rows:
    """Return a row for each method: its runs' shared prefixes, and the sums of their gradients; None where
    the runs kept no rollouts."""
    rows = []
    for group in groups:
        tax = sum((tax_of_run(run.folder, run.recipe) for run in group.runs), Tax())
        values = {
            "shared tokens": tax.shared,
            "pushed both ways, %": 100 * tax.opposed / max(tax.shared, 1),
            "cancelled, %": 100 * tax.cancelled_share,
        }
        rows.append({METHOD: group.method, **(values if tax.trained else dict.fromkeys(values))})
    return rows
