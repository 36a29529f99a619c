"""Print Proposition 1 on random transformers, and the direction of the expected step on coin flips.

python -m tests.kit.theory_numbers
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.kit import theory
from tests.kit.length_bias import Process
from tests.kit.theory import B_1

POLICIES = 100
"""Random transformers."""
METHODS: dict[str, dict[str, Any]] = {
    "EqLen-GRPO": {},
    "mean, rloo": {"objective": "rloo", "suffix_reward": "mean"},
    "and drop": {"objective": "rloo", "suffix_reward": "mean", "unfinished": "drop"},
    "single pair": {"max_pairs": 1},
    "on_policy": {"pair_weight": "on_policy"},
}


def proposition_1() -> None:
    policies = [theory.TransformerPolicy(seed) for seed in range(POLICIES)]
    title(f"Proposition 1: of {POLICIES} random transformers")
    print(f"  the proof's inequality fails  {sum(not theory.fisher_step(p).holds for p in policies)}")
    for name, rollout in (("GRPO", theory.unlucky_group()), ("EqLen", theory.eqlen_stream())):
        print(f"  {name + ' makes B_1 rarer':<29} {sum(theory.slope(p, rollout, B_1) < 0 for p in policies)}")


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    proposition_1()
    coins()
