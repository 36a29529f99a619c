#!/usr/bin/env python
"""Print Propositions 1 and 2 of the paper as numbers, with the conditions their proofs need.

python tools/theory.py [--policies 100]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from megatron_eqlen.paper import theory
from megatron_eqlen.paper.theory import A_1, A_2, A_3, B_1, B_2


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Print Propositions 1 and 2 of the paper as numbers, with their proofs' conditions."
    )
    parser.add_argument("--policies", type=int, default=100, help="random transformers to average over")
    policies = [theory.TransformerPolicy(seed) for seed in range(parser.parse_args().policies)]
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


def title(text: str) -> None:
    print(f"\n{text}")


def line(name: str, value: float) -> None:
    print(f"  {name:<44} {value:+.6f}")


def moments(name: str, found: theory.Moments) -> None:
    print(f"  {name:<44} mean {found.mean:+.6f}, variance {found.variance:.6f}")


def share(
    name: str,
    policies: Sequence[theory.TransformerPolicy],
    holds: Callable[[theory.TransformerPolicy], bool],
) -> None:
    print(f"  {name:<44} {sum(map(holds, policies))} of {len(policies)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
