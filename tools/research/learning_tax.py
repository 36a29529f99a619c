"""The paper's learning tax (Proposition 2), measured: gradients on prefixes that responses share.

Each trained segment that holds a token after the same path gives that token the gradient c x d log pi, with c
= weight x advantage and the same d log pi for all (before the step's first update). So mean and variance of
the gradient are those of c. GRPO trains a shared prefix once for each response, with that response's
advantage; advantages of both signs cancel. EqLen trains an inherited prefix once, as the pair's side B.

Prefixes that responses share by chance, in any method, are counted as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    squares: float = 0.0
    """Sum of the squared coefficients of these tokens."""
    shared: int = 0
    """Number of different tokens that two or more paths share and that are trained at least once."""
    opposed: int = 0
    """Number of shared tokens that are trained with both signs."""
    mean_squares: float = 0.0
    """Sum of the squared mean coefficients of the shared tokens."""
    variances: float = 0.0
    """Sum of the variances of each shared token's coefficients."""
    gross: float = 0.0
    """Sum of the absolute coefficients of shared tokens."""
    net: float = 0.0
    """Sum of the absolute values of each shared token's summed coefficients."""

    def __add__(self, other: Tax) -> Tax:
        return Tax(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def opposed_share(self) -> float:
        """Share of shared tokens that are trained with both signs."""
        return self.opposed / self.shared if self.shared else 0.0

    @property
    def cancelled_share(self) -> float:
        """Share of the shared tokens' absolute coefficients that other responses cancel."""
        return 1 - self.net / self.gross if self.gross else 0.0

    @property
    def mean(self) -> float:
        """Root mean square, over shared tokens, of the gradient's mean, in units of that of all
        trained tokens' gradients."""
        return self._relative(self.mean_squares)

    @property
    def deviation(self) -> float:
        """Root mean square of the gradient's standard deviation, in the same units."""
        return self._relative(self.variances)

    def _relative(self, squares: float) -> float:
        typical = self.squares / self.trained if self.trained else 0.0
        return float(np.sqrt(squares / self.shared / typical)) if self.shared and typical else 0.0


def learning_tax(trees: Sequence[TokenTree]) -> Tax:
    """Return the tax of one optimizer step's trees, with advantages and weights; arrays of token ids are
    read."""
    nodes = [node for tree in trees for node in tree.nodes if _coefficient(node)]
    tax = Tax(
        sum(len(node.token_ids) for node in nodes),
        float(sum(len(node.token_ids) * _coefficient(node) ** 2 for node in nodes)),
    )
    prompts: dict[bytes, list[TokenTree]] = defaultdict(list)
    for tree in trees:
        prompts[tree.nodes[0].token_ids.tobytes()].append(tree)
    for same in prompts.values():
        for values in shared_coefficients(same):
            tax += _of_token(values)
    return tax


def _of_token(values: np.ndarray) -> Tax:
    return Tax(
        shared=1,
        opposed=int(values.min() < 0 < values.max()),
        mean_squares=float(values.mean() ** 2),
        variances=float(values.var()),
        gross=float(np.abs(values).sum()),
        net=float(abs(values.sum())),
    )


def shared_coefficients(trees: Sequence[TokenTree]) -> Iterator[np.ndarray]:
    """Yield, for each token that two or more paths of one prompt's ``trees`` share after the same tokens, [n]
    float64: the coefficients of the segments that train it, at least one."""
    groups = [(0, [path for tree in trees for path in _paths(tree)])]
    while groups:
        position, paths = groups.pop()
        by_token: dict[int, list[_Path]] = defaultdict(list)
        for path in paths:
            if position < len(path.token_ids):
                by_token[int(path.token_ids[position])].append(path)
        for sharing in by_token.values():
            if len(sharing) < 2:
                continue
            owners = {id(node): node for node in (path.owner(position) for path in sharing)}
            values = [value for node in owners.values() if (value := _coefficient(node))]
            if values:
                yield np.array(values)
            groups.append((position + 1, sharing))


@dataclass(frozen=True)
class _Path:
    """A path from the end of the prompt to a leaf."""

    nodes: list[Node]
    ends: np.ndarray
    """[nodes] int64, end position of each node."""
    token_ids: np.ndarray

    def owner(self, position: int) -> Node:
        """Return the node that holds the token at ``position``."""
        return self.nodes[int(np.searchsorted(self.ends, position, side="right"))]


def _paths(tree: TokenTree) -> Iterator[_Path]:
    inner = {node.parent for node in tree.nodes}
    for number in range(1, len(tree.nodes)):
        if number in inner:
            continue
        above = []
        while number > 0:
            above.append(tree.nodes[number])
            number = tree.nodes[number].parent
        nodes = above[::-1]
        ends = np.cumsum([len(node.token_ids) for node in nodes])
        yield _Path(nodes, ends, np.concatenate([node.token_ids for node in nodes]))


def _coefficient(node: Node) -> float:
    return node.weight * node.advantage


TAX_STEPS = 8
"""Number of a run's steps that are read, evenly spread."""


def tax_of_run(folder: Path, recipe: Recipe) -> Tax:
    """Return the tax of some steps of a run; zero if it kept no rollouts."""
    steps = [step for _, step in step_folders(folder / "streams")]
    chosen = (
        np.unique(np.linspace(0, len(steps) - 1, min(TAX_STEPS, len(steps))).round().astype(int))
        if steps
        else []
    )
    return sum((tax_of_step(steps[number], recipe) for number in chosen), Tax())


def tax_of_step(folder: Path, recipe: Recipe) -> Tax:
    rollouts = trained(read_step(folder, without=COLUMNS.keys() - NUMBERS), recipe)
    batches, _ = build_minibatches(rollouts, recipe)
    return sum(map(learning_tax, batches), Tax())


def learning_taxes(groups: Sequence[Group]) -> Rows:
    """Return a row for each method: its runs' shared prefixes, and the sums of their gradients; None where
    the runs kept no rollouts."""
    rows = []
    for group in groups:
        tax = sum((tax_of_run(run.folder, run.recipe) for run in group.runs), Tax())
        values = {
            "shared tokens": tax.shared,
            "pushed both ways, %": 100 * tax.opposed_share,
            "cancelled, %": 100 * tax.cancelled_share,
            "gradient: mean": tax.mean,
            "gradient: deviation": tax.deviation,
        }
        rows.append({METHOD: group.method, **(values if tax.trained else dict.fromkeys(values))})
    return rows
