"""Mismatch of trainer and engine, held against ``rollout.mismatch.tolerance``.

The mismatch is the mean |log-prob difference| over an update's tokens that were sampled by the weights which
it trains; without such tokens it is undefined. Lines drawn among all that the step generated are compared
beside it: an engine that computes another function earns other rewards, and its tokens may not be trained.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_eqlen.job import Job
from megatron_eqlen.packing.pack import RankRows
from megatron_eqlen.recipe import Recipe, RolloutRecipe
from megatron_eqlen.sampling.comparison import token_tree
from megatron_eqlen.tokens import TEACHER
from megatron_eqlen.training.forward import supervised_positions
from megatron_eqlen.training.policy_loss import RowLoss
from megatron_eqlen.types import Metrics, Rollout, TokenTree

DRAWN_SHARE = 1 / 16
"""Share of a step's generated tokens in drawn lines. A row full may be more than a small step trains."""


class MismatchError(ValueError):
    """Trainer and engine disagree by more than ``rollout.mismatch`` allows. The run can be resumed."""


class WorstToken(NamedTuple):
    """Token whose log-probs in trainer and engine differ most."""

    difference: float
    place: str


NO_TOKEN = WorstToken(-1.0, "")
"""Worst token where no token is comparable: any other is larger."""


def mismatch_of(measured: Metrics) -> float | None:
    """Return the mismatch of an update, from its metrics; None where no engine sampled."""
    if "mismatch/compared_tokens" not in measured:
        return measured.get("mismatch/logprob_abs_diff")
    return measured["mismatch/compared_abs_diff"] if measured["mismatch/compared_tokens"] else None


def disagreement(mismatch: float | None, rollout: RolloutRecipe) -> str | None:
    """Return a message if a step's mismatch is above the tolerance or NaN."""
    tolerance = rollout.tolerance
    if not rollout.comparable or mismatch is None or mismatch <= tolerance:
        return None
    most = f"rollout.mismatch.tolerance is {tolerance:g}"
    return f"log-probs of trainer and engine differ by {mismatch:.2g} on average of the step, {most}"


def worst_token(rows: RankRows, losses: Sequence[RowLoss]) -> WorstToken:
    """Return the worst of this rank's comparable tokens."""
    differences = [torch.where(loss.compared, loss.log_ratio.abs(), -1.0) for loss in losses]
    peaks = [float(values.max()) if len(values) else -1.0 for values in differences]
    number = int(np.argmax(peaks))
    if not peaks[number] >= 0:
        return NO_TOKEN
    # reading a row fills it again, so only the row with the peak is read
    row, at = rows[number], supervised_positions(rows[number])[int(differences[number].argmax())]
    segment = int(row.segment_ids[at])
    tree, node = rows.packing.forest.of_segment(segment)
    place = f"token {(row.segment_ids[:at] == segment).sum()} of node {node} of tree {tree!r}"
    return WorstToken(peaks[number], place)


@dataclass(frozen=True)
class Compared:
    """Log-probs of tokens of a tree: sums over ``count`` tokens."""

    count: int
    trainer: float
    engine: float
    difference: float
    """Sum of |trainer - engine|."""
    worst: WorstToken

    @classmethod
    def joined(cls, parts: Iterable[Compared]) -> Compared:
        *sums, worst = zip(*map(astuple, parts), strict=True)
        return cls(*map(sum, sums), worst=max(worst))

    @property
    def mean(self) -> float:
        return self.difference / self.count


def check_servers(compared: Mapping[str, Compared], job: Job) -> None:
    """Raise MismatchError, with both values, for a server whose log-probs are not those of the trainer.
    ``compared``: those of each server's own tokens, by its URL."""
    rollout = job.recipe.rollout
    rounds = job.recipe.model.dtype != "float32" or rollout.quantization or job.model.delta_net
    # float32 stays below 1e-4
    tolerance = rollout.tolerance / (1 if rounds or rollout.mismatch.tolerance else 100)
    for url, found in compared.items():
        if not found.mean <= tolerance:
            raise MismatchError(
                f"rollout.servers: {url}: expected log-probs of the trainer's model, "
                f"{found.trainer / found.count:.5g} on average of {found.count} tokens, found "
                f"{found.engine / found.count:.5g}: they differ by {found.mean:.2g} a token, more than "
                f"{tolerance:g} (rollout.mismatch.tolerance): it computes another function"
            )


def drawn_lines(rollouts: Sequence[Rollout], recipe: Recipe, step: int) -> list[TokenTree]:
    """Return lines of the rollouts as trees to compare, the same on every rank: at most one of each, until
    they have ``DRAWN_SHARE`` of the tokens or fill a row."""
    # a generator of the step's own: every rank draws the same lines from skeletons
    draw, room, trees = random.Random(f"{recipe.seed}/{step}"), recipe.packing.max_tokens_per_row, []
    # `room` counts down from a row: this much left means that the share is drawn
    enough = room - DRAWN_SHARE * sum(len(part) for rollout in rollouts for part in rollout.parts)
    unused = {TEACHER.name, *recipe.rollout.untrained_columns}
    for rollout in draw.sample(rollouts, len(rollouts)):
        ends = [line.last.number for line in rollout.lines()]
        name = f"{rollout.prompt_id}/{rollout.index}"
        tree, nodes = token_tree(rollout, name, rollout.line(draw.choice(ends)) if ends else [])
        for number, node in nodes.items():
            node.tokens = node.tokens.without(unused)
            # lines are compared, not trained: every generated token weighs 1
            node.weight = float(number >= 0 and node.tokens.generated > 0)
        if (size := sum(map(len, tree.nodes))) <= room and any(node.weight for node in tree.nodes):
            room -= size
            trees.append(tree)
        if trees and room <= enough:
            break
    return trees
