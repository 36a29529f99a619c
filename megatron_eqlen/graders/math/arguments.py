"""Give each argument of a LaTeX command its delimiters, where people leave them out."""

from __future__ import annotations

import re

_CALLS = re.compile(r"\\(?:(?:arc|ar)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp)(?![A-Za-z])")
"""Functions whose argument may stand without parentheses."""
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_MACROS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1}
_MACROS |= dict.fromkeys((r"\bar", r"\hat", r"\vec", r"\tilde", r"\dot", r"\ddot", r"\overline"), 1)
"""Number of arguments."""
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|.", re.DOTALL)
_FACTOR = re.compile(
    r"[A-Za-z\d]|\\(?:frac|binom|sqrt|infty|overline|bar|hat|tilde|vec|mathbb|alpha|beta|gamma|delta|epsilon|"
    r"varepsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|varphi|chi|psi|omega)(?![A-Za-z])"
)
"""The start of a factor that belongs to the argument of the function before it."""
_SCRIPT = re.compile(r"\s*(?=\\(?:frac|sqrt|binom))")
_INDEX = re.compile(r"\s*\[[^\[\]]*\]")
_ANGLE = re.compile(r"\d*\\pi\s*(/\s*\d+(?!\s*\\?[A-Za-z({]))?")


def delimit(text: str) -> str:
    r"""Put braces around the arguments of ``\frac``, ``\sqrt``, ``\bar``, parentheses around a function's.

    ``\frac\pi2\ln2x/3`` becomes ``\frac{\pi}{2}\ln(2x)/3``. A function without parentheses takes the product
    of the factors after it. It ends before ``/``, ``\cdot``, a sign, another function, ``e^``, or ``(`` after
    a letter. Only an angle keeps its denominator: ``\sin\pi/4`` is sin(pi/4), as sin(pi)/4 is 0.
    """
    try:
        return _delimit(text) if "\\" in text else text
    except RecursionError:  # nested a hundred times: no answer, but the parser decides
        return text


def _delimit(text: str) -> str:
    parts, at = [], 0
    while at < len(text):
        part, at = _command(text, at)
        parts.append(part)
    return "".join(parts)


def _command(text: str, at: int) -> tuple[str, int]:
    """Return the token at ``at`` with its arguments, delimited, and its end."""
    token = next(_TOKEN.finditer(text, at))[0]
    at += len(token)
    if count := _MACROS.get(token):
        if token == r"\sqrt" and (index := _INDEX.match(text, at)):
            token, at = token + index[0].strip(), index.end()
        for _ in range(count):
            argument, at = _argument(text, at)
            token += f"{{{argument}}}"
        return token, at
    if _CALLS.fullmatch(token):
        return _call(token, text, at)
    if token in ("^", "_") and (script := _SCRIPT.match(text, at)):
        argument, at = _command(text, script.end())
        return f"{token}{{{argument}}}", at
    return token, at


def _argument(text: str, at: int) -> tuple[str, int]:
    """Return TeX's next argument (group, command with arguments or character) without braces, and its end."""
    at = _skip(text, at)
    if text[at : at + 1] == "{" and (end := _closing(text, at)):
        return _delimit(text[at + 1 : end - 1]), end
    if text[at : at + 1] == "\\":
        return _command(text, at)
    if text[at : at + 1] in ("", "}", "^", "_"):
        return "", at
    return text[at], at + 1


def _call(name: str, text: str, at: int) -> tuple[str, int]:
    # ``\sin^2 x``, ``\log_2 8``: exponent and base come before the argument.
    while text[_skip(text, at) :][:1] in ("^", "_"):
        at = _skip(text, at)
        script, after = _argument(text, at + 1)
        name, at = f"{name}{text[at]}{{{script}}}", after
    start = _skip(text, at)
    if text[start : start + 1] == "{" and (end := _closing(text, start)):
        return f"{name}({_delimit(text[start + 1 : end - 1])})", end
    # ``\ln\sin x``
    if (function := _CALLS.match(text, start)) and (inner := _call(function[0], text, function.end())):
        return f"{name}({inner[0]})", inner[1]
    argument, end = _product(text, start)
    if _TRIGONOMETRIC.match(name) and (angle := _ANGLE.match(text, start)) and angle.end() >= end:
        argument, end = angle[0], angle.end()
    return (f"{name}({argument})", end) if argument else (name + " ", at)


def _product(text: str, at: int) -> tuple[str, int]:
    """Return the factors at ``at`` that stand side by side, delimited, and their end."""
    argument = ""
    # ``\ln|x+1|``
    if text[at : at + 1] == "|" and (end := text.find("|", at + 1) + 1):
        argument, at = _delimit(text[at:end]), end
    while True:
        start = _skip(text, at)
        # ``\sin x e^x`` is a product of two functions.
        if argument and text.startswith("e^", start):
            return argument, at
        if _FACTOR.match(text, start) or (argument and text[start : start + 1] in ("^", "_", "!", "'")):
            part, at = _command(text, start)
            if part in ("^", "_"):
                script, at = _argument(text, at)
                part += script if script == r"\circ" else f"{{{script}}}"
            # ``\overline{z}``: the argument of a command stays with it.
            elif text[at : at + 1] == "{" and part[0] == "\\" and (end := _closing(text, at)):
                part, at = part + text[at:end], end
        # ``\ln 2(x+1)``: after a number a bracket belongs to the argument, after a letter it does not.
        elif text[start : start + 1] == "(" and argument.isdigit() and (end := _closing(text, start)):
            part, at = _delimit(text[start:end]), end
        else:
            return argument, at
        # ``\pi`` and ``x`` need a space between them, or they would be ``\pix``.
        argument += " " * (argument[-1:].isalpha() and "\\" in argument and part[0].isalpha()) + part


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] == " ":
        at += 1
    return at


def _closing(text: str, at: int) -> int:
    """Return the end of the group that opens at ``at``, 0 if it never closes."""
    opening, closing = text[at], "})"[text[at] == "("]
    depth = 0
    for match in _TOKEN.finditer(text, at):
        depth += (match[0] == opening) - (match[0] == closing)
        if depth == 0:
            return match.end()
    return 0
