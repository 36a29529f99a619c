"""Print what of the paper's theory can be computed: Propositions 1 and 2 with the conditions their proofs
need, and the direction of the expected step on coin flips.

python -m tests.kit.theory_numbers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.kit import theory
from tests.kit.length_bias import Process
from tests.kit.theory import A_1, A_2, A_3, B_1, B_2

POLICIES = 100
"""Random transformers."""
METHODS: dict[str, dict[str, Any]] = {
    "EqLen-GRPO": {},
    "mean, rloo": {"objective": "rloo", "suffix_reward": "mean"},
    "and drop": {"objective": "rloo", "suffix_reward": "mean", "unfinished": "drop"},
    "single pair": {"single_pair": True},
    "on_policy": {"pair_weight": "on_policy"},
}


def propositions(policies: Sequence[theory.TransformerPolicy]) -> None:
    table = theory.TabularPolicy([A_1, B_1 + A_2, B_1 + B_2 + A_3])
    proposition_1(table)
    proposition_1_shared(policies)
    proposition_2()
    survivor()


def proposition_1(table: theory.TabularPolicy) -> None:
    title("Proposition 1: d log pi(B_1) per unit step, no shared parameters")
    line("GRPO on (A_1 right, B_1 A_2 wrong)", theory.slope(table, theory.unlucky_group(), B_1))
    line("EqLen, B_1 B_2 A_3 right", theory.slope(table, theory.eqlen_stream(), B_1))
    line("EqLen, no right extension sampled", theory.slope(table, theory.eqlen_stream(third=0.0), B_1))
    short, long = [1, 9], [1, 2, 4, 9]
    shared = theory.TabularPolicy([short, long])
    group = theory.grpo_group((short, 1.0), (long, 0.0))
    line("GRPO, token that both responses begin with", theory.slope(shared, group, [1]))


def proposition_1_shared(policies: Sequence[theory.TransformerPolicy]) -> None:
    title(f"Proposition 1 with shared parameters: {len(policies)} random transformers")
    unfair = theory.unfair_policy()
    line("one-parameter counterexample, GRPO", theory.slope(unfair, theory.unlucky_group(), B_1))
    share("the proof's inequality holds", policies, lambda policy: theory.fisher_step(policy).holds)
    for name, rollout in (("GRPO", theory.unlucky_group()), ("EqLen", theory.eqlen_stream())):
        share(f"{name} makes B_1 rarer", policies, lambda p, r=rollout: theory.slope(p, r, B_1) < 0)


def proposition_2() -> None:
    title("Proposition 2: GRPO's coefficient on B_1 over all samples (G = 2)")
    moments("uninformative prefix", theory.prefix_term(theory.UNINFORMATIVE, [0.25] * 4))
    moments("the paper's three responses, 1/3 each", theory.prefix_term(theory.PAPERS_RESPONSES, [1 / 3] * 3))
    both = theory.grpo_group(*theory.PAPERS_RESPONSES[1:])
    line("  its case 2 alone (said to reward B_1)", theory.direct_coefficient(both, B_1))
    stream = theory.eqlen_stream()
    line("EqLen, B_1 as inherited prefix", theory.direct_coefficient(stream, B_1))
    line("prefix_in_gradient", theory.direct_coefficient(stream, B_1, prefix_in_gradient=True))


def survivor() -> None:
    title("EqLen's advantage of B_1 where neither side deserves one, success probability 1/2")
    for extensions in range(1, 7):
        by_max = theory.survivor_advantage(extensions, 0.5)
        by_mean = theory.survivor_advantage(extensions, 0.5, "rloo", "mean")
        print(
            f"  {extensions} extensions: max {by_max.mean:+.3f} (variance {by_max.variance:.3f}), "
            f"mean with rloo {abs(by_mean.mean):.3f} (variance {by_mean.variance:.3f})"
        )


def coins() -> None:
    title("Coin flips, limit 4: expected step towards stopping, relative to that towards right ends")
    print(f"  {'':<28}" + "".join(f"{name:>13}" for name in ("truth", *METHODS)))
    for name, process in (
        ("ends before the limit", Process.coin_flips(1.0, 4, last=-60.0)),
        ("11% are truncated", Process.coin_flips(1.0, 4)),
        ("38% are truncated", Process.coin_flips(2.0, 4)),
    ):
        recipes = [theory.recipe("equal_length", **keys) for keys in METHODS.values()]
        steps = [process.gradient(), *map(process.expected_estimate, recipes)]
        print(f"  {name:<28}" + "".join(f"{_direction(step):+13.3f}" for step in steps))


def _direction(step: np.ndarray) -> float:
    """Return the derivative by a number that is added to the logits of both ends, divided by that by a number
    that is added to the logit of a right end and taken from that of a wrong one."""
    return float(step[:, :2].sum() / (step[:, 1] - step[:, 0]).sum())


def title(text: str) -> None:
    print(f"\n{text}")


def line(name: str, value: float) -> None:
    print(f"  {name:<44} {value:+.6f}")


def moments(name: str, found: theory.Moments) -> None:
    print(f"  {name:<44} mean {found.mean:+.6f}, variance {found.variance:.6f}")


def share(
    name: str, policies: Sequence[theory.TransformerPolicy], holds: Callable[[theory.TransformerPolicy], bool]
) -> None:
    print(f"  {name:<44} {sum(map(holds, policies))} of {len(policies)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    propositions([theory.TransformerPolicy(seed) for seed in range(POLICIES)])
    coins()
