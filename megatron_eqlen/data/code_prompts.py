"""The question text of a code problem: the statement, then the kind of program that is wanted."""

from __future__ import annotations

FENCED = "Put the whole program into one fenced block that starts with ```python."
STDIN = (
    "Write a Python program that reads the input from standard input and prints the answer "
    "to standard output. " + FENCED
)
STARTER = (
    "Complete the starter code below without changing its names and arguments. "
    + FENCED
    + "\n\n```python\n{starter}\n```"
)
FUNCTION = (
    "Write a Python function named `{function}` (a method of `class Solution` will do as well). " + FENCED
)


def code_question(statement: str, function: str | None = None, starter: str = "") -> str:
    """Return the question text of a code problem: statement and answer format in one turn."""
    if function is None:
        wanted = STDIN
    elif starter.strip():
        wanted = STARTER.format(starter=starter.strip("\n"))
    else:
        wanted = FUNCTION.format(function=function)
    return f"{statement.strip()}\n\n{wanted}"
