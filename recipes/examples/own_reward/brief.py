"""A reward of one's own: right answers count 1, and up to a tenth more the shorter they are."""

from megatron_eqlen.graders import grade_math

LONG = 600
"""Characters from which a response gets nothing more."""


def right_and_brief(response: str, answer: str) -> float:
    right = grade_math(response, answer).reward
    return right * (1 + 0.1 * max(0.0, 1 - len(response) / LONG))
