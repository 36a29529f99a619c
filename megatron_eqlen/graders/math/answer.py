r"""One spelling for answers that mean the same: ``10\,\text{ cm}`` ──normalize──► ``10\unit{cm}``.

The normal form is LaTeX without what does not change a value: spaces, sizes, colours, fonts, delimiters, and
what is struck out or invisible. Words are ``\text{lowercase}``, a unit stands last as ``\unit{name}``, a
list's ``and`` is a comma. The rules of a table apply in order.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache, reduce
from math import gcd

from megatron_eqlen.graders.math.arguments import delimit
from megatron_eqlen.graders.math.units import CURRENCIES, SIZES, is_known, unit_name

Rules = list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]


def _compile(*rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> Rules:
    return [(re.compile(pattern), replacement) for pattern, replacement in rules]


def _apply(rules: Rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


_ANY = reduce(lambda inner, _: rf"(?:[^{{}}]++|\{{{inner}\}})*+", range(5), "[^{}]*+")
"""Text that may stand between braces, with five levels of braces."""
_END = r"(?![A-Za-z])"
"""The end of a command's name."""
_MATRIX = r"\\begin\{pmatrix\}(?:(?!\\end).)*+\\end\{pmatrix\}"
_FUNCTIONS = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|det|gcd|lcm|max|min"
_SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "⁄": "/", "∕": "/", "√": " sqrt ", "∞": r"\infty ", "≈": r"\approx ", "±": r"\pm ", "≠": r"\ne ",
    "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "∖": r"\setminus ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}",
    "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "′": "'",
    "’": "'", "“": '"', "”": '"', "→": r"\to ", "⇒": r"\Rightarrow ", "∴": r"\therefore ", "⟨": "(",
    "⟩": ")", "∨": r"\lor ", "∧": r"\land ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "…": r"\ldots ",
}  # fmt: skip
_CHARACTERS = _compile(
    # ``x²`` is ``x^{2}``.
    (r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+", lambda run: f"^{{{unicodedata.normalize('NFKC', run[0])}}}"),
    (r"[₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+", lambda run: f"_{{{unicodedata.normalize('NFKC', run[0])}}}"),
    # Digits with a line above, as combining characters: ``0.3̅``.
    (r"(?:\d[\u0304\u0305])+", lambda run: rf"\overline{{{re.sub(r'[^0-9]', '', run.group())}}}"),
    (r"[^\x00-\x7f]", lambda sign: _ascii(sign.group())),
)
_MARKUP = _compile(  # what is drawn, not what it means
    (r"US\s*\\?\$", r"\\$"),
    (rf"\\(?:[hv]?phantom|[bx]?cancel|sout|st|label|tag)\s*\{{{_ANY}\}}", ""),  # invisible or struck out
    # math delimiters, and where ``=`` is aligned; a row's end stays, without its space: ``\\[2pt]``
    (r"(\\\\)(?:\s*\[-?[\d.]+ ?[a-z]{2}\])?|\\[()\[\]]|(?<!\\)(?:\$|&(?=\s*=)|(?<==)&)", r"\1"),
    (r"\\(?:text|page|f)?color(?:box)?\s*\{[^{}]*\}", ""),
    (r"\\left\s*\\\{(?=\s*\\begin\{a)|(\\end\{a\w+\})\s*\\right\s*\\\}|\\(?:left|right)\s*\.", r"\1"),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?|(?:display|text|script)style|limits|strut|[lL]arge|LARGE|[hH]uge"
     rf"|(?:foot|script)size|small|tiny|normalsize|bf|it|rm|sf|tt|bfseries|boldmath){_END}", ""),
    # ``10,\!000``
    (r"(?<=\d),\s*\\!\s*(?=\d{3})", ""),
    (r"\\!", ""),
    (rf"(?<!\\)\\(?:[,;:> \n]|(?:q?quad|thinspace|enspace|space){_END})|~|\\$|\s+", " "),
    (r"\\hspace\*?\{[^{}]*\}", " "),
    # ``\mathbf{R}``, ``\Bbb R``
    (rf"\\(?:mathbf|bf)\s*\{{([RZQNC])\}}|\\Bbb\s*\{{?([RZQNC])(?:\}}|{_END})", r"\\mathbb{\1\2}"),
    (r"\\mathbb\s*([A-Z])(?![A-Za-z])", r"\\mathbb{\1}"),
    # ``1{,}000``
    (r"\{([,:])\}", r"\1"),
    (r'^\s*["`*]+|(?<!\^)["`*]+\s*$', ""),  # Markdown
)  # fmt: skip
_WRAPPERS = _compile(  # until nothing changes
    (r"\\(?:math(?:bf|it|sf|tt|normal)|boldsymbol|bm|pmb|underline|ensuremath|boxed|fbox|framebox|emph)\s*"
     rf"\{{({_ANY})\}}", r"\1"),
    (r"\\(?:text(?:bf|it|rm|sf|tt|sc|normal|up|md)|[mh]box|math(?:rm|up)|operatorname\*?)\s*\{([^{}]*)\}",
     r"\\text{\1}"),
    # ``\text{sin}`` is a function, ``\text{e}`` a number.
    (rf"\\text\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1 "),
    (r"\\text\s*\{\s*([eid])\s*\}", r" \1 "),
    (r"\\text\s*\{\s*([A-H]{2,})\s*\}", r"\1"),  # several choices
    # ``5\text{km}/\text{h}``, ``5\frac{\text{m}}{\text{s}}``, ``5\text{m}\cdot\text{s}^{-1}``: one unit
    (r"(?<=[\d}])(\s*)\\text\s*\{([^{}]*)\}\s*/\s*\\text\s*\{([^{}]*)\}", r"\1\\text{\2/\3}"),
    (r"(?<=\d)(\s*)\\[dt]?frac\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}",
     r"\1\\text{\2/\3}"),
    (r"(?<=[\d}])(\s*)\\text\s*\{([^{}]*)\}\s*(?:\\cdot)?\s*\\text\s*\{([^{}]*)\}\s*\^\s*\{-(\d)\}",
     r"\1\\text{\2/\3}^\4"),
    # ``5\text{cm^2}``
    (r"(?<=[\d}])(\s*)\\text\s*\{([A-Za-z/ ]*)\^\{?(\d)\}?\s*\}", r"\1\\text{\2}^\3"),
    # ``\text{10}`` is no word.
    (r"\\text\s*\{([^{}A-Za-z]*|[^{}]*\d[^{}]*)\}(?!\^|\s*/)", r" \1 "),
    (r"(^|[^\d\s}])\s*\\text\s*\{(\s*\(?[A-Za-z][).:]{0,2}\s*)\}", r"\1 \2 "),  # after a number it is a unit
    (r"\\text\s*\{([^{}]*\w)\s+(and|or)\s*\}", r"\\text{\1}\\text{ \2 }"),
    # ``60(\text{cm}^2)``
    (r"(?<=\d)\s*\(\s*(\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?)\s*\)\s*$", r"\1"),
    # ``5\text{kg}\cdot\text{cm}``
    (r"\\text\s*\{([^{}]*)\}\s*\\cdot\s*\\text\s*\{([^{}]*)\}", r"\\text{\1 \2}"),
    (rf"^\s*\{{({_ANY})\}}\s*$", r"\1"),
)  # fmt: skip
_SPELLING = _compile(  # one name for one thing
    (rf"\\(?:[dtc]frac|nicefrac|sfrac){_END}", r"\\frac"),
    (rf"\\[dt]binom{_END}", r"\\binom"),
    # ``{1 \over 2}``, ``{n \choose k}``
    (rf"^\s*\{{?([^{{}}]*?)\\over{_END}([^{{}}]*)\}}?\s*$", r"\\frac{\1}{\2}"),
    (r"\{?\s*(\w+)\s*\\choose\s*(\w+)\s*\}?", r"\\binom{\1}{\2}"),
    (rf"\\(?:leqslant|leqq?){_END}|<=", r"\\le "),
    (rf"\\(?:geqslant|geqq?){_END}|>=", r"\\ge "),
    (rf"\\lt{_END}", "<"),
    (rf"\\gt{_END}", ">"),
    (rf"\\neq{_END}|!=", r"\\ne "),
    (rf"\\lbrace{_END}", r"\\{"),
    (rf"\\rbrace{_END}", r"\\}"),
    (rf"\\langle{_END}", "("),
    (rf"\\rangle{_END}", ")"),
    (rf"\\[lr]?vert{_END}", "|"),
    # ``v_{\max}``, ``v_\text{in}``
    (rf"_\s*(\{{)?\s*\\(?:(max|min){_END}|text\s*\{{([A-Za-z]+)\}})\s*(?(1)\}})", r"_{\2\3}"),
    (r":=|\\coloneqq", "="),
    (r"(?<=[\w)}])\s*\*\*\s*(?=[\w(-])", "^"),  # Python's power
    # ``(0,1) U (2,3)``
    (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
    (rf"\\colon{_END}", ":"),
    (rf"\\div{_END}", "/"),
    (rf"\\var(phi|epsilon|theta|rho|sigma|kappa){_END}", r"\\\1"),
    (rf"\\vee{_END}", r"\\lor "),
    (rf"\\varnothing{_END}|\\\{{\s*\\\}}", r"\\emptyset"),
    (rf"\^\s*(?:\{{\s*\\circ\s*\}}|\\circ{_END})|\\degree{_END}", r"^\\circ "),
    # ``20^\circ C``
    (r"\^\\circ\s*(?:\\text\s*\{\s*([CF])\s*\}|([CF])(?![A-Za-z]))",
     lambda m: rf"\text{{ degree {'celsius' if 'C' in (m[1], m[2]) else 'fahrenheit'}}}"),
    (rf"\\[lc]?dots[bcmio]?{_END}|\.\.\.", r"\\ldots "),
    # ``(-1, +\infty)``
    (r"(?:^|(?<=[(\[,=]))\s*\+\s*(?=\\infty|\d)", ""),
    (r"\\log_\s*\{?\s*e\s*\}?", r"\\ln "),
    (rf"\\lg{_END}", r"\\log_{10}"),
    (r"\\(sin|cos|tan)\s*\^\s*\{\s*-1\s*\}", r"\\arc\1 "),
    # ``sqrt10``, ``sin x``, ``pi``: commands without their backslash.
    (r"(?<![\\A-Za-z])sqrt\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
    (rf"(?<![\\A-Za-z])({_FUNCTIONS}|pi|sqrt|infty){_END}", r"\\\1"),
    (r"\\exp\s*\(([^()]*)\)", r"e^{\1}"),
    (rf"(?i)(?<![\\A-Za-z])(?:\\text\s*\{{\s*inf(?:inity)?\s*\}}|(?:inf(?:inity)?|oo){_END})", r"\\infty "),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*\[2\]", r"\\sqrt"),
    # ``[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}]`` and ``[[1,2],[3,4]]``, ``Matrix([[1,2],[3,4]])``
    (r"[(\[]\s*\\begin\{(array)\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*[)\]]",
     r"\\begin{pmatrix}\2\\end{pmatrix}"),
    (r"\\(begin|end)\{(?:b|small)matrix\}", r"\\\1{pmatrix}"),
    (r"^\s*(?:(?:array|Matrix)\()?\[\s*\[([^\[\]]*(?:\]\s*,\s*\[[^\[\]]*)+)\]\s*\]\)?\s*$",
     lambda m: rf"\begin{{pmatrix}}{re.sub(r'\]\s*,\s*\[', r'\\\\', m[1]).replace(',', '&')}\end{{pmatrix}}"),
    # ``]0,1[`` is ``(0,1)``, and ``[0,1[`` is ``[0,1)``.
    (r"(?<![\w)])\]\s*([^\[\](),]+),([^\[\](),]+)([\[\]])", lambda m: f"({m[1]},{m[2]}" + "])"[m[3] == "["]),
    (r"(\[[^\[\](),]+,[^\[\](),]+)\[", r"\1)"),  # ]0,1[ and [0,1[
    (r"\\%|\s*\\text\{\s*(?:percent(?:age)?|per cent|pct)\.?\s*\}|(?<=\d)\s*(?:per ?cent(?:age)?|pct)\b|%",
     r"\\%"),
    # ``\begin{cases} x=1 \\ y=2 \end{cases}`` is a list; a row that begins with ``=`` continues the last.
    (r"\\begin\{(cases|array|split|(?:align|gather)(?:ed)?\*?)\}(?:\{[lcr|]+\})?\s*&?"
     rf"((?:{_MATRIX}|(?!(?:\\\\\s*)?\\end\{{\1\}})(?:\\\\\s*&|[^&]))*+)(?:\\\\\s*)?\\end\{{\1\}}",
     lambda m: re.sub(rf"({_MATRIX})|,?\s*\\\\\s*&?(\s*=)?", lambda row: row[1] or row[2] or ",", m[2])),
    (r"\(\s*-\s*\\infty\s*,\s*\\infty\s*\)", r"\\mathbb{R}"),
    (r"\\mathbb\{R\}\s*(?:\^\s*\{?\s*\+|_\s*\{\s*>\s*0)\s*\}?", r"(0,\\infty)"),
    # ``\mathbb{Z}/6\mathbb{Z}`` is ``\mathbb{Z}_{6}``.
    (r"\\mathbb\{Z\}\s*/\s*\(?\s*(\d+)\s*(?:\\mathbb\{Z\})?\s*\)?", r"\\mathbb{Z}_{\1}"),
    # A column is a list: ``\begin{pmatrix} 1 \\ 2 \end{pmatrix}`` is ``(1,2)``.
    (r"^\\begin\{pmatrix\}((?:(?!\\end)[^&,])*)\\end\{pmatrix\}$",
     lambda m: f"({m[1].replace(chr(92) * 2, ',')})"),
    (rf"\\equiv{_END}", "="),
    (r"\\(max|min|gcd|lcm)\s*\\\{([^{}]*)\\\}", r"\\\1(\2)"),
    # ``\mathbb{R}^\times`` is ``\mathbb{R}^{*}``.
    (rf"\^\s*(?:\{{\s*(?:\*|\\(?:times|ast))\s*\}}|\*|\\(?:times|ast){_END})", r"^{*}"),
    (r"(\\mathbb\{[A-Z]\})\s*\\times\s*\1(?![_^/])", r"\1^{2}"),
    (rf"\\oplus{_END}", r"\\times "),
)  # fmt: skip
_LEADS = _compile(  # what stands before the answer
    # ``The final answer is 5``, ``\text{Option B}``
    (r"(?i)^\s*(?:\\text\s*\{\s*)?(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|ans|result|option|choice)\b\.?\s*"
     r"(?:is|equals)?\s*[:=]?\s*(?:\}|(?=[^{}]*$|[^}]*\{))", ""),
    (r"(?i)^\s*\\text\s*\{\s*(?:option|choice|answer:?)\s+([^{}]*)\}\s*$", r"\1"),
    (rf"^\s*(?:=|\\(?:approx|therefore|Rightarrow|implies|iff){_END})\s*", ""),
    # ``x \in (0,1)``
    (r"^\s*[A-Za-z]\s*(?:\\in|\sin\s)\s*(?=[(\[\\])", ""),
    # ``\{x \in \mathbb{R} \mid x>1\}`` is ``x>1``, ``\{2k\pi \mid k \in \mathbb{Z}\}`` is ``2k\pi``.
    (r"^\s*\\\{\s*[A-Za-z](?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\\mid|:|\|)(.*(?:[<>]|\\[lg]e).*)\\\}\s*$",
     r"\1"),
    (r"^\s*\\\{\s*(?:[a-z]\s*(?:\\mid|:|\|)\s*[a-z]\s*=)?(.*?)\s*(?:\\mid|[:|,])\s*[kmn]\s*\\in\s*\\mathbb\{Z\}\s*\\\}\s*$",
     r"\1"),
    (r"^\s*\(?\s*([A-Z])\s*\)\s*$", r"\1"),  # (A) is the choice A
    (r"[\s;,]*(?<!\.)\.?\s*$", ""),
    (r"(?<=[a-z]{2})!+$", ""),
)  # fmt: skip
_NUMBERS = _compile(  # numbers as people write them
    # ``1,234,567``, ``1.234.567``
    (r"^([+-]?[1-9]\d{0,2}(?:[,' ]\d{3})+(?:\.\d+)?)$", lambda m: re.sub("[,' ]", "", m[1])),
    (r"^([+-]?[1-9]\d{0,2}(?:\.\d{3}){2,})$", lambda m: m[1].replace(".", "")),
    # ``1.5e-3``, ``3 x 10^5``
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]\+?(-?\d+)(?!\w)", r"\1\\cdot10^{\2}"),
    (r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)", r"\\cdot "),
    # ``1 1/2`` and ``1\frac{1}{2}`` are sums.
    (r"(?<![\w.}/^])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\d.}^])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),
    # ``0.\dot{1}2\dot{3}``, ``0.\overline{3}``, ``0.1(6)`` and ``0.333\ldots`` are fractions.
    (r"(\d*)\.(\d*)\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?",
     lambda m: _repeating(m[1], m[2], m[3] + m[4] + m[5])),
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", lambda m: _repeating(m[1], m[2], m[3])),
    (r"(\d+)\.(\d*)\((\d+)\)", lambda m: _repeating(m[1], m[2], m[3])),
    (r"(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,})\4+)\s*\\ldots", lambda m: _repeating(m[1], m[2], m[3] or m[4])),
    (r"(?<!\d)\.(?=\d)", "0."),
    # ``007``
    (r"(?<![\d.:])0+(?=\d)", ""),
    (r"^-0$", "0"),
    (r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\\frac{\1\\pi}{180})"),  # inside an expression: of a function
)  # fmt: skip
_LAYOUT = _compile(
    # A space stays between a command and a letter, and between digits: ``\pi x``, ``1 2``.
    (r"(\\[A-Za-z]+)\s+(?=[A-Za-z])|(?<=\d)(\s)\s*(?=\d)|\s+",
     lambda m: m[1] + " " if m[1] else m[2] or ""),
    (r"([\^_])(\d+|[A-Za-z])", r"\1{\2}"),
    (r"\^-(\d+)", r"^{-\1}"),
)  # fmt: skip

# ``5\text{ cm}^2``, ``5 cm``
_TEXT_UNIT = re.compile(r"(.*\S)\s*\\text\s*\{([^{}]*)\}\s*(?:\^\s*\{?\s*(\d)\s*\}?)?\s*")
_BARE_UNIT = re.compile(r"(.*[\d})\]])((?:[\s./]*+[^\W\d_]++)++)\.?(?:\s*\^\s*\{?\s*(\d)\s*\}?)?\s*")
_REMARK = re.compile(
    r"(?is)(?<=\S)[\s,;]*\(?\s*(?:\\text\s*\{[\s,;(]*(?:by|here|with equality|for (?:all|any|every|each)"
    r"|i\.e\.|as (?:desired|required|claimed)|since|because|where|which|obtained|achieved|attained|using)"
    r"|(?<![\\A-Za-z])(?:since|because|where|obtained|achieved|attained))\b.*"
    r"|(?<=\S)[\s,;]*\(?\s*(?<![\\A-Za-z])[kmn]\s*\\in\s*\\mathbb\{[ZN]\}(?:[_^]\{?[+\d]\}?)?\s*\)?[\s.;]*$"
)
"""A reason or a condition after an answer."""
_DOUBT = re.compile(r"(?i)\b(?:or|not|and|if|else|otherwise|unless|maybe|perhaps|except|but)\b")
_GREEK = re.compile(r"GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)")
# ``-\$5``, ``5€``, ``30^\circ``
_SIGN_UNIT = re.compile(r"([+-]?)\s*(\\\$|[€£¥])\s*(.*)|(.*?)\s*(\\\$|[€£¥¢])\s*|(.*?)\s*(\^\\circ)\s*")
_INTEGER = re.compile(r"(?<![\w.}/^-])-?\d+(?![\d.^/])$")
# ``101_2``, ``(1F)_{16}``
_BASE = re.compile(r"\(?([0-9A-F]*\d[0-9A-F]*)\)?\s*_\s*\{?\s*\(?(\d\d?)\)?\s*\}?")
# ``3 \pmod 7``
_MODULUS = re.compile(
    r"(.*?)[\s,]*(?:\\pmod|\(\s*\\?(?:bmod|mod)|\(?\s*\\text\s*\{[\s(]*mod(?:ulo)?\s*\}?)\s*\{?(\d+)[\s})]*"
)
_SIZE = re.compile(rf"(?<=\d)\s*(\\text\s*\{{\s*)?({'|'.join(SIZES)})s?\b\s*", re.IGNORECASE)
_BASE_NAMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "ten": 10}
_BASE_WORD = re.compile(rf"_\s*\{{\s*(?:\\text\s*\{{)?\s*({'|'.join(_BASE_NAMES)})\s*\}}+")
_FUNCTION = re.compile(rf"\\(?:{_FUNCTIONS})")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_CONNECTIVE = re.compile(
    r"\s*,?\s*(?:\\text\s*\{\s*,?\s*(and|or)\s*,?\s*\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z]))\s*|\s*;\s*"
)
_INEQUALITY = re.compile(rf"[<>]|\\(?:le|ge|ne){_END}")
_PROSE = re.compile(
    r"\\text\s*\{([^{}]*)\}|(?<![\\A-Za-z{])(?:(?![A-H]{4})[A-Za-z]{4,}|[A-Z][a-z]{2,}|(?i:yes|no|to))(?![A-Za-z}])"
)
"""Words among mathematics."""
_LIST = re.compile(r"\s*(\\\{|[(\[])?(.*?)(\\\}|[)\]])?\s*", re.DOTALL)
_PHRASE = re.compile(r"[^\W\d_]+(?:[\s-]+[^\W\d_]+)*")
_WORDS = re.compile(r"\s*([A-Za-z]+(?:[\s-]+[A-Za-z]+)*)\s*")
_NOUNS = "equation|system|function|series|sequence|limit|integral|triangle|answer|number"
_SENTENCES = _compile(  # words around an answer of words
    # ``the limit exists``, ``such a number exists``
    (rf"(?i)^(?:the |this |(?:such )?an? )?(?:{_NOUNS}|there|it) (?=exists?$)", ""),
    (r"(?i)(?<=\w) (?:always )?(?:wins(?: the game)?|has a winning strategy|(?<!not )exists?)$", ""),
    # Not behind an article, or else nothing is left of ``the function``.
    (r"(?i)(?<=\w)(?<!\bthe)(?<!\ba)(?<!\ban) (?:player|number|triangle|function)$", ""),
    (rf"(?i)^(?:(?:the|this) (?:{_NOUNS}) (?:ha(?:s|ve) |is )?(?=\w)|(?:there|it) (?:is|are|exists?) "
     r"|(?:the|an?|on) (?=\w{3}))+", ""),
)  # fmt: skip
_SHORT_WORDS = {"yes", "no", "odd", "one", "two", "six", "ten", "all", "any", "dne", "nan"}
_SAME_WORDS: dict[str, str] = dict.fromkeys(
    ("dne", "thelimitdoesnotexist", "limitdoesnotexist"), r"\text{doesnotexist}"
)
_SAME_WORDS |= dict.fromkeys(("infinite", "infinitelymany", "infinitelymanysolutions"), r"\infty")
_SAME_WORDS |= dict.fromkeys(("allrealnumbers", "allreals", "therealnumbers", "realnumbers"), r"\mathbb{R}")
_SAME_WORDS |= dict.fromkeys(
    ("nosolution", "nosolutions", "norealsolution", "norealsolutions", "emptyset", "none"), r"\emptyset"
)
_SAME_WORDS |= {"notpossible": r"\text{impossible}", "nointegersolution": r"\text{nointegersolutions}"}
_SAME_WORDS |= {"convergent": r"\text{converges}", "divergent": r"\text{diverges}"}


@lru_cache(maxsize=1 << 16)
def normalize(answer: str) -> str:
    """Return ``answer`` in normal form: two answers that differ only in spelling have the same one."""
    # Most answers are numbers, and need none of the rules.
    if answer.isdecimal() and answer.isascii():
        return answer.lstrip("0") or "0"
    text = answer if answer.isascii() else _apply(_CHARACTERS, answer)
    text = _apply(_MARKUP, text)
    # Wrappers may stand in each other: ``\textbf{\text{5}}``.
    while (unwrapped := _apply(_WRAPPERS, text)) != text:
        text = unwrapped
    # What leads an answer may hide a spelling, and a spelling a lead: twice.
    text = delimit(_apply(_LEADS, _apply(_SPELLING, _apply(_LEADS, _REMARK.sub(_without_remark, text)))))
    size = _SIZE.sub(lambda match: rf"\cdot10^{{{SIZES[match[2].lower()]}}}" + (match[1] or ""), text)
    # Units first: their words must not be taken for those of the answer.
    value, unit = _split_units(size)
    value = _words(_CONNECTIVE.sub(lambda match: _connect(match, value), value))
    value = _apply(_LAYOUT, _apply(_NUMBERS, value.strip()))
    return (value or "0") + rf"\unit{{{unit}}}" if unit and value else value


def _without_remark(match: re.Match[str]) -> str:
    before = match.string[: match.start()]
    return match[0] if _DOUBT.search(match[0]) else "}" * (before.count("{") - before.count("}"))


def _ascii(sign: str) -> str:
    """Return ``sign`` as LaTeX: digits of any script, fractions, and look-alikes of ASCII. Others stay."""
    if sign in _SIGNS:
        return _SIGNS[sign]
    if greek := _GREEK.fullmatch(unicodedata.name(sign, "")):
        name = greek[2].lower().replace("lamda", "lambda")
        return rf"\{name if greek[1] == 'SMALL' else name.capitalize()} "
    if unicodedata.category(sign)[0] == "M":
        return ""  # vowel signs and accents: words are only compared
    if (digit := unicodedata.decimal(sign, None)) is not None:
        return str(digit)
    if unicodedata.category(sign) in ("Cf", "Zs"):  # marks of direction, spaces of any width
        return " " if unicodedata.category(sign) == "Zs" else ""
    plain = unicodedata.normalize("NFKC", sign)
    if unicodedata.decomposition(sign).startswith("<fraction>"):
        return r"\frac{{{}}}{{{}}}".format(*plain.split("⁄"))
    return "".join(_SIGNS.get(each, each) for each in plain)  # ``℃``


def _repeating(whole: str, start: str, block: str) -> str:
    # 0.1(6): 10 x 9 = 90 nines, 16 - 1 = 15, and 15/90 = 1/6.
    nines = 10 ** len(start) * (10 ** len(block) - 1)
    tail = int(start + block) - int(start or "0") + int(whole or "0") * nines
    common = gcd(tail, nines)
    return rf"\frac{{{tail // common}}}{{{nines // common}}}"


def _connect(match: re.Match[str], text: str) -> str:
    """Return a comma, as a list has it; between inequalities return ``and`` or ``or``."""
    word = match[1] or match[2]
    return {"or": r"\lor ", "and": r"\land "}[word] if word and _INEQUALITY.search(text) else ", "


def _words(text: str) -> str:
    r"""Words as ``\text{lowercase}``; letters that may be variables stay."""
    if (whole := _WORDS.fullmatch(text)) and _is_word(whole[1]):
        text = rf"\text{{{text}}}"
    text = _PROSE.sub(lambda match: _PHRASE.sub(_word, (match[1] or match[0]).strip(" .")), text)
    return text.replace(r"}\text{", "")


def _is_word(text: str) -> bool:
    longest = max(re.split(r"[\s-]+", text), key=len)
    return len(longest) > 3 or longest.lower() in _SHORT_WORDS or (len(longest) == 3 and longest.istitle())


def _word(match: re.Match[str]) -> str:
    if len(match[0]) == 1:
        return match[0]  # a name or a choice
    word = re.sub(r"[\s-]", "", _apply(_SENTENCES, match[0])).lower()
    return word.upper() if len(word) == 1 else _SAME_WORDS.get(word, rf"\text{{{word}}}")


# --- units


def _split_units(text: str) -> tuple[str, str]:
    """Return the value and the name of its unit; for a list, the one unit of all its members."""
    opening, inside, closing = re.fullmatch(_LIST, text).groups("")  # pyright: ignore
    parts = [_split_unit(part) for part in _CONNECTIVE.sub(",", inside).split(",")]
    # ``3, 4 cm`` has its unit at the end alone, and is split as a whole below.
    if len(parts) > 1 and len({unit for _, unit in parts}) == 1 and parts[0][1]:
        return opening + ", ".join(value for value, _ in parts) + closing, parts[0][1]
    return _split_unit(text)


def _split_unit(text: str) -> tuple[str, str]:
    """Return the value and the name of the unit after it or the currency before it, "" for none."""
    text = _BASE_WORD.sub(lambda match: f"_{{{_BASE_NAMES[match[1]]}}}", text).strip()
    # ``10 \pmod 7`` is 3 of unit mod7: the residue counts, whatever its representative.
    if (match := _MODULUS.fullmatch(text)) and is_numeric(match[1]) and int(match[2]):
        return _INTEGER.sub(lambda value: str(int(value[0]) % int(match[2])), match[1]), f"mod{match[2]}"
    if match := _SIGN_UNIT.fullmatch(text):
        sign, before, amount, value, after, degrees, _ = match.groups()
        value = (sign or "") + (amount or value or degrees or "")
        name = CURRENCIES.get(before or after, "degree")
        return (value, name) if is_numeric(value) and not _FUNCTION.search(value) else (text, "")
    # Digits above the base are no number of that base: ``9_2`` stays.
    if (match := _BASE.fullmatch(re.sub(r"\\text\{(\w)\}|\s", r"\1", text))) and (
        int(match[2]) <= 36 and all(int(digit, 16) < int(match[2]) for digit in match[1])
    ):
        digits = match[1] if match[1].isdecimal() else str(int(match[1], int(match[2])))
        return digits, f"base{match[2]}"
    if match := _TEXT_UNIT.fullmatch(text):
        name = unit_name(match[2], match[3] or "")
    elif match := _BARE_UNIT.fullmatch(text):
        name = unit_name(match[2], match[3] or "", bare=True)
    # A value with variables has only units that are known: ``2x\text{ apples}`` stays.
    if match and name and (is_numeric(match[1]) or is_known(name)):
        return match[1], name
    return text, ""


def is_numeric(text: str) -> bool:
    """Return True if no variable or word is in the text, or after its last ``=``."""
    text = text.rpartition("=")[2]
    return not _LETTER.search(text.replace(r"\text", "")) and any(map(str.isalnum, text))
