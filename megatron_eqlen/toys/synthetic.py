"""Chains of arithmetic with worked responses, in DeepMath-103K's schema.

A question is ``Compute $14-9-1+5$.``: operands are distinct digits and every partial result lies in 0..19.
Each row has three right demonstrations, and each draws its own style, so that a model that imitates them
answers one question in widely different lengths, and is right more often where it works in smaller steps:

=======  =====================================================  ======================================
style    what it writes before the boxed answer                 tokens, for 3 to 6 operands
=======  =====================================================  ======================================
guess    nothing                                                6
coarse   two or three operands a line: ``14-9-1=4``, ``4+5=9``  20 to 35
steps    one operand a line: ``14-9=5``, ``5-1=4``, ``4+5=9``   25 to 50
checked  steps, then each undone: ``Check:``, ``9-5=4``, ...    45 to 95
=======  =====================================================  ======================================

Everything is a function of the seed. The rows of one call have distinct questions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_eqlen.files import replaced

LARGEST_RESULT = 19
LARGEST_OPERAND = 9

STYLES = {"guess": 0.3, "coarse": 0.25, "steps": 0.2, "checked": 0.25}
"""Share of each style among the demonstrations."""

SCHEMA = pa.schema(
    [
        ("question", pa.string()),
        ("final_answer", pa.string()),
        ("difficulty", pa.float64()),
        ("topic", pa.string()),
        ("r1_solution_1", pa.string()),
        ("r1_solution_2", pa.string()),
        ("r1_solution_3", pa.string()),
    ]
)
"""DeepMath-103K's columns."""


@dataclass(frozen=True)
class Chain:
    """A start value and the signed operands that are added to it, left to right."""

    start: int
    operands: tuple[int, ...]

    @property
    def question(self) -> str:
        return f"Compute ${_expression(self.start, self.operands)}$."

    @property
    def answer(self) -> int:
        return self.start + sum(self.operands)


def draw_chain(rng: random.Random, operands: int) -> Chain:
    """Return a random chain of ``operands`` operands."""
    start = value = rng.randint(1, LARGEST_RESULT)
    digits = rng.sample(range(1, LARGEST_OPERAND + 1), operands)
    signed = []
    for digit in digits:
        allowed = [term for term in (digit, -digit) if 0 <= value + term <= LARGEST_RESULT]
        signed.append(rng.choice(allowed))
        value += signed[-1]
    return Chain(start, tuple(signed))


def demonstrate(chain: Chain, style: str, rng: random.Random) -> str:
    """Return a right response to ``chain`` in one of STYLES."""
    lines = []
    if style == "coarse":
        lines = _work(chain, lambda: rng.choice((2, 3)))
    elif style in ("steps", "checked"):
        lines = _work(chain, lambda: 1)
    if style == "checked":
        lines += ["Check:", *_undo(chain)]
    return "\n".join([*lines, f"\\boxed{{{chain.answer}}}"])


def _work(chain: Chain, stride: Callable[[], int]) -> list[str]:
    """Return lines that each add the next ``stride()`` operands to the result so far."""
    lines, value, done = [], chain.start, 0
    while done < len(chain.operands):
        terms = chain.operands[done : done + stride()]
        result = value + sum(terms)
        lines.append(f"{_expression(value, terms)}={result}")
        value, done = result, done + len(terms)
    return lines


def _undo(chain: Chain) -> list[str]:
    """Return lines that take the operands off the answer again, the last operand first."""
    backwards = Chain(chain.answer, tuple(-term for term in reversed(chain.operands)))
    return _work(backwards, lambda: 1)


def _expression(value: int, terms: tuple[int, ...]) -> str:
    return f"{value}{''.join(f'{term:+d}' for term in terms)}"


def make_rows(count: int, seed: int, min_operands: int = 3, max_operands: int = 6) -> list[dict]:
    """Return ``count`` rows with distinct questions; each draws its number of operands. Raises ValueError if
    there are fewer."""
    if not 1 <= min_operands <= max_operands <= LARGEST_OPERAND:
        raise ValueError(
            f"operands: expected 1 <= min <= max <= {LARGEST_OPERAND}, found {min_operands}, {max_operands}"
        )
    rng = random.Random(seed)
    rows: dict[str, dict] = {}
    draws = 0
    while len(rows) < count:
        chain = draw_chain(rng, rng.randint(min_operands, max_operands))
        draws += 1
        if draws > 100 * count:
            raise ValueError(f"count: expected at most about {len(rows)} distinct questions, found {count}")
        if chain.question not in rows:
            rows[chain.question] = _row(chain, rng)
    return list(rows.values())


def _row(chain: Chain, rng: random.Random) -> dict:
    styles = rng.choices(list(STYLES), weights=list(STYLES.values()), k=3)
    solutions = {
        f"r1_solution_{number}": demonstrate(chain, style, rng) for number, style in enumerate(styles, 1)
    }
    return {
        "question": chain.question,
        "final_answer": str(chain.answer),
        "difficulty": float(len(chain.operands)),
        "topic": "Mathematics -> Arithmetic",
        **solutions,
    }


def write_split(out: Path, rows: list[dict], test: int) -> None:
    """Write the ``test`` first rows to OUT/test.parquet and the others to OUT/train.parquet, and say so."""
    for name, part in (("test", rows[:test]), ("train", rows[test:])):
        path = out / f"{name}.parquet"
        write_rows(path, part)
        print(f"{path}: {len(part)} questions")


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write ``rows`` as a DeepMath-103K parquet file, which appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), partial)
