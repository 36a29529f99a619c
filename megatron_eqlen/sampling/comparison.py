"""Comparison units: parts whose rewards are measured against each other. A unit is the two sides of an
equal-length pair, the completions of a group, or the children of a node of a sampled tree. Each member is one
node of a token tree, so that an advantage and a weight on the node reach its tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import FinishReason, Node, Part, Rollout, TokenTree

EQUAL_REWARDS = 1e-9
"""Rewards closer than this are equal: dividing by a std of round-off would give advantages of 1."""

Penalty = Callable[[int, FinishReason | None], float]
"""(length of a whole response, its finish reason) -> number that is added to its reward, at most 0."""


@dataclass
class ComparisonUnit:
    """Members that are compared with each other; the lists are aligned."""

    prompt_id: str
    members: list[Part]
    """Parts that are compared."""
    nodes: list[Node]
    """Their nodes in the token tree."""
    rewards: list[float]
    skip_equal: bool
    """The paper's skip rule: members with equal rewards are not trained, not even by the KL penalty."""
    baseline: float | None = None
    """Reward that each member is compared with; None: the members are compared with each other."""
    share: float | None = None
    """Weight of the unit in its rollout; None: all units of the rollout weigh the same."""
    rollout: int = 0
    """Number of the rollout in its minibatch: units of one rollout share the rollout's weight."""
    apart: list[tuple[float, ComparisonUnit]] = field(default_factory=list)
    """(weight, unit) of each named reward, where every name gets advantages of its own."""
    advantages: list[float] = field(default_factory=list)
    trained: bool = True
    counted: bool = True
    """True if the unit is one of the N_k (and its tokens are among those that token means divide by)."""

    @cached_property
    def lengths(self) -> list[int]:
        return [node.tokens.generated for node in self.nodes]

    @property
    def differs(self) -> bool:
        """True if a member's reward differs from one that it is compared with, as an advantage needs."""
        if self.apart:
            return any(weight and unit.differs for weight, unit in self.apart)
        return not all_equal(self.rewards if self.baseline is None else [*self.rewards, self.baseline])


def all_equal(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) <= EQUAL_REWARDS


def no_penalty(length: int, finish_reason: FinishReason | None) -> float:
    return 0.0


def verifier_reward(part: Part, prompt_id: str) -> float:
    """Return the verifier's reward of the response that ``part`` ends. Raises ValueError without a grade."""
    if part.grade is None:
        raise ValueError(f"prompt {prompt_id}: an ended response has no grade: score rollouts before")
    return part.grade.reward


def response_reward(part: Part, prompt_id: str) -> float:
    """Return ``verifier_reward``, or 0 for a truncated response, which has no answer."""
    return verifier_reward(part, prompt_id) if part.finish_reason == "stop" else 0.0


def part_rewards(
    tree: Rollout, penalty: Penalty = no_penalty, open_reward: float | None = None
) -> dict[int, float]:
    """Return the reward of each part, by its number: a leaf's is that of its response, an inner part's the
    mean of the parts that continue it. A part that the budget cut off, and that nothing continues, has
    ``open_reward`` plus the penalty of its length; without ``open_reward`` it has none."""
    ends, rewards = tree.ends(), dict[int, float]()
    below: dict[int, list[float]] = defaultdict(list)
    # children come after their parents: an inner part's reward is known from below
    for part in reversed(tree.parts):
        if part.finish_reason is not None:
            reward = response_reward(part, tree.prompt_id) + penalty(ends[part.number], part.finish_reason)
        # equal weights: each of these parts is as likely a continuation as the others
        elif part.number in below:
            reward = fmean(below[part.number])
        elif open_reward is not None:
            reward = open_reward + penalty(ends[part.number], None)
        else:
            continue
        rewards[part.number] = reward
        below[part.parent].append(reward)
    return rewards


def token_tree(rollout: Rollout, name: str, parts: Sequence[Part]) -> tuple[TokenTree, dict[int, Node]]:
    """Return the token tree of the prompt and ``parts``, and its nodes by part number; the root's is -1."""
    tokens = Tokens.of(rollout.prompt.token_ids)
    if rollout.prompt_columns is not None and len(tokens):  # skeletons on disk have no prompts
        tokens = Tokens({**rollout.prompt_columns.columns, **tokens.columns})
    nodes, places = {-1: Node(-1, tokens, home=rollout.home)}, {-1: 0}
    for part in parts:
        places[part.number] = len(nodes)
        nodes[part.number] = Node(places[part.parent], part.tokens, home=part.home)
    return TokenTree(name, list(nodes.values())), nodes
