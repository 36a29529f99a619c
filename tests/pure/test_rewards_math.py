"""The math grader: which answers are right, and that no model output can hang or crash it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_eqlen.graders.math import grader as math
from megatron_eqlen.graders.math import match
from megatron_eqlen.graders.math.answer import normalize
from megatron_eqlen.graders.math.grader import MathGrader, extract_answer
from tests.kit import ROOT
from tests.kit.marks import MORE
from tests.kit.processes import are_gone, descendants, within


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(workers=2, timeout=2.5)
    yield grader
    grader.close()


@pytest.mark.parametrize(("text", "answer"), [
    (r"so \boxed{5}", "5"),
    (r"\boxed{4} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{4}</think>\boxed{5}", "5"),
    (r"<think>a</think>b</think>\boxed{5}", "5"),
    (r"\boxed{4}</think> I do not know", None),
    (r"\boxed{5} and \boxed{6", "5"),
    (r"\boxed{x and \boxed{5}", "5"),
    (r"\boxed{1 + \boxed{2}}", r"1 + \boxed{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed {5}", "5"),
    (r"}}} {{{ \boxed{5} }}}", "5"),
    (r"\boxed{}", None),
    ("the answer is 5", None),
    (r"\boxed 42, so", "42"),
    (r"$\boxed \frac{1}{2}$", r"\frac{1}{2}"),
    (r"\fbox{42}", "42"),
    (r"\boxed{41} or \boxed{42}", "41, 42"),
    (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
    (r"\boxed{42}, that is \boxed{42}", "42"),
    ("", None),
])  # fmt: skip
def test_the_last_balanced_box_after_thinking(text, answer):
    assert extract_answer(text) == answer


READINGS = [
    SimpleNamespace(**json.loads(line))
    for line in (ROOT / "tests/tables/math_readings.jsonl").read_text(encoding="utf-8").splitlines()
]


def test_answers_in_other_words_are_right_and_answers_that_differ_are_wrong(grader):
    """Functions, logarithms, equations, units, sentences: see tests/tables/math_readings.jsonl."""
    grades = grader.grade([rf"thus \boxed{{{each.answer}}}" for each in READINGS], [r.gold for r in READINGS])
    found = [(each.gold, each.answer, grade.verdict) for each, grade in zip(READINGS, grades, strict=True)]
    assert found == [(each.gold, each.answer, "correct" if each.right else "wrong") for each in READINGS]


def test_a_long_answer_is_brought_into_normal_form_by_a_worker(grader, monkeypatch):
    """In this process it would stop the engine's driver for up to 43 ms."""
    roots = r"\sqrt{" * 60 + "x" + "}" * 60
    terms = "+".join(f"x^{{{n}}}" for n in range(40))
    golds, answers = (
        [terms, terms, "5", "5"],
        [terms.replace("+", " + "), terms + "+7", r"\quad " * 50, roots],
    )

    def refuse(text: str) -> str:
        raise AssertionError(f"normal form of {len(text)} characters")

    monkeypatch.setattr(match, "normalize", refuse)
    grades = grader.grade([rf"\boxed{{{answer}}}" for answer in answers], golds)
    assert [grade.verdict for grade in grades] == ["correct", "wrong", "no_answer", "wrong"]
    assert grader.check_golds([terms, r"\quad " * 50]) == [None, "unparseable_gold"]


def test_an_object_as_python_prints_it_is_no_gold(grader):
    objects = ["Interval(0, 1)", "FiniteSet(1, 2)", "Point2D(1, 2)", "Poly(x**2, x, domain='ZZ')"]
    assert {*grader.check_golds(objects)} == {"unparseable_gold"}
    assert {*grader.check_golds(["(1, 2)", "Point A (1, 2)", r"\{1, 2\}", "Union"])} == {None}
    assert grader.check_golds(["{'orders': 1}"]) == [None], "an environment's"


def test_a_word_for_no_answer_is_no_gold(grader):
    r"""NuminaMath-1.5's rows without an answer have one of the first two: \boxed{proof} would be right."""
    golds = ["proof", "notfound", "Proof.", "See solution", "Not found", "proof by induction", "none"]
    assert grader.check_golds(golds) == ["unparseable_gold"] * 5 + [None] * 2


def test_a_difference_at_a_point_never_overrules_the_library():
    from math_verify import verify

    from megatron_eqlen.graders.math.numbers import surely_different
    from megatron_eqlen.graders.math.reading import read

    texts = {text for each in READINGS[:27] for text in (each.gold, each.answer) if "," not in text}
    answers = sorted(map(normalize, texts))
    answers += [
        "0.333333",
        "x",
        "x^{2}",
        r"\sqrt{x^{2}}",
        r"e^{\pi}",
        "-1",
        "2^{2000}",
        "2^{2000}+1",
        "2^{2001}",
    ]
    values = [value for value in map(read, answers) if value is not None]
    caught = [(gold, answer) for gold in values for answer in values if surely_different(gold, answer)]
    assert len(caught) > 150
    wrongly = [pair for pair in caught[::7] if verify(*pair, timeout_seconds=None)]
    assert wrongly == []


def test_a_grade_says_what_it_saw(grader):
    (grade,) = grader.grade(["so \\boxed{1 +\n 1}"], ["3"])
    assert (grade.answer, grade.grader) == ("1 + 1", "either-9+math_verify-0.9.0")
    assert grade.seconds > 0


def test_a_response_that_is_no_text_is_refused(grader):
    """TRL's completions are chats where its prompts are."""
    with pytest.raises(TypeError, match=r"response: expected a text, found \[\{'role': 'assistant'"):
        grader.grade([[{"role": "assistant", "content": r"\boxed{5}"}]], ["5"])


TABLE = [
    SimpleNamespace(**json.loads(line))
    for line in (ROOT / "tests/tables/math_answers.jsonl").read_text(encoding="utf-8").splitlines()
]
KNOWN_DIFFERENCES = {
    ("10", r"\boxed{10\,\Omega}"),  # a letter of Greek is a variable
    (r"\text{May 5, 2024}", r"\boxed{may 5, 2024}"),  # three small letters are variables
    ("15", r"\boxed{15 \frac{m}{s}}"),  # letters of a fraction are variables
    ("-1<x<3", r"\boxed{3>x>-1}"),  # math-verify compares the parts in order
    (r"\mathrm{GL}_n(\mathbb{R})", r"\boxed{GL_n(\mathbb{R})}"),  # names of groups compare as text
    (r"-\ln|\cos x|+C", r"\boxed{\ln|\sec x|+C}"),  # SymPy does not simplify their difference
}
"""Right answers that we call wrong. There is no wrong answer that we call right."""


@pytest.mark.parametrize("step", [1 if MORE else 5])  # all of them each week
def test_the_table_of_answers_is_graded_as_people_grade_it(grader, step):
    """The table covers numbers, units, words, sets, equations, unicode, hedges: see
    tests/tables/math_answers.jsonl."""
    cases = TABLE[::step]
    grades = grader.grade([case.response for case in cases], [case.gold for case in cases])
    graded = {
        (case.gold, case.response): grade.reward != case.right
        for case, grade in zip(cases, grades, strict=True)
    }
    assert {case for case, differs in graded.items() if differs} == KNOWN_DIFFERENCES & graded.keys()


@pytest.mark.parametrize("step", [1 if MORE else 12])  # all of them each week
def test_a_gold_with_one_number_changed_accepts_no_answer(grader, step):
    """Numbers in a name, a unit or a condition do not change a value: such golds are left out."""
    cases = [
        case for case in TABLE[::step] if case.right and not re.search(r"[=:_]|\\(?:text|pmod)", case.gold)
    ]
    changed = [
        (case.gold[: number.start()] + str(int(number[0]) + 1) + case.gold[number.end() :], case.response)
        for case in cases
        for number in re.finditer(r"\d+", case.gold)
    ]
    grades = grader.grade([response for _, response in changed], [gold for gold, _ in changed])
    assert [pair for pair, grade in zip(changed, grades, strict=True) if grade.reward] == []


@pytest.mark.slow
def test_every_gold_of_the_table_equals_itself(grader):
    golds = sorted({case.gold for case in TABLE})[:: 1 if MORE else 6]
    assert [reason for reason in grader.check_golds(golds) if reason] == []
    grades = grader.grade([rf"\boxed{{{gold}}}" for gold in golds], golds)
    assert {grade.verdict for grade in grades} == {"correct"}


def test_an_answer_that_shows_nothing_is_no_answer(grader):
    texts = [r"\boxed{\phantom{42}}", r"\boxed{\ }", r"\boxed{\text{}}", r"\boxed{\cancel{42}}"]
    assert [grade.verdict for grade in grader.grade(texts, ["42"] * 4)] == ["no_answer"] * 4


def test_what_an_answer_quotes_is_not_searched_for_another(grader):
    """math-verify's own search finds ``final answer is $42$`` inside a box."""
    (grade,) = grader.grade([r"\boxed{43 final answer is $42$ I hope}"], ["42"])
    assert grade.reward == 0.0


ADVERSARIAL = {
    "nested boxes": r"\boxed{" * 3000 + "5" + "}" * 3000,
    "unclosed boxes": r"\boxed{" * 1_500_000,
    "10 MB of output": "x" * 10_000_000 + r"\boxed{6}",
    "10 MB of braces": "{}" * 5_000_000 + r"\boxed{6}",
    "a 10 MB answer": r"\boxed{" + "9" * 10_000_000 + "}",
    "huge powers": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "huge factorial": r"\boxed{(10^{10})!}",
    "parentheses": r"\boxed{" + "(" * 900 + "5" + ")" * 900 + "}",
    "fractions": r"\boxed{" + r"\frac{1}{" * 150 + "2" + "}" * 150 + "}",
    "a sum": r"\boxed{\sum_{k=1}^{10^{12}} k^{k}}",
    "an integral": r"\boxed{\int_0^1 \frac{x^{99} \sin(x^{77})}{\ln(1+x^{55})} dx}",
    "control characters": "\\boxed{\x00\x1b[2J\ud7ff}",
    "text wrappers": r"\boxed{" + r"\text{" * 300 + "5" + "}" * 300 + "}",
    "format strings": r"\boxed{%s{0}{{}}}",
    "code": r"\boxed{__import__('os').system('true')}",
}


@pytest.mark.slow  # some cost what they may
def test_no_answer_hangs_or_crashes_the_grader():
    """Every answer gets a verdict, and the next ordinary answer is graded normally."""
    with contextlib.closing(MathGrader(workers=2, timeout=1.5)) as impatient:
        grades = impatient.grade(list(ADVERSARIAL.values()), ["5"] * len(ADVERSARIAL))
        (after,) = impatient.grade([r"\boxed{\frac{2}{4}}"], [r"\frac{1}{2}"])
    assert after.verdict == "correct"
    verdicts = dict(zip(ADVERSARIAL, (grade.verdict for grade in grades), strict=True))
    assert verdicts["nested boxes"] in ("correct", "no_answer", "unparseable")  # cut to the last characters
    assert verdicts["unclosed boxes"] == "no_answer"
    assert verdicts["10 MB of output"] == verdicts["10 MB of braces"] == "wrong"
    assert verdicts["huge powers"] in ("timeout", "wrong", "unparseable")
    assert all(
        grade.reward == 0.0 for grade, name in zip(grades, ADVERSARIAL, strict=True) if "box" not in name
    )


def test_unusable_golds_are_told_apart(grader):
    golds = ["5", r"\frac{3}{4}", "Yes", r"\infty", r"\frac{", "{{{", "", "9" * 3000, r"x^2 + y^2 = 1"]
    reasons = grader.check_golds(golds)
    assert reasons[:4] == [None] * 4
    assert reasons[4] == reasons[5] == reasons[6] == reasons[7] == "unparseable_gold"
    assert reasons[8] is None


def test_workers_are_clean_processes(grader, monkeypatch):
    """Workers have no torch, vLLM or Megatron, and none of the trainer's environment."""
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    fresh = MathGrader(workers=1)
    fresh.grade([r"\boxed{5x}"], ["5"])
    started = {fresh.pool._host.pid, *descendants(fresh.pool._host.pid)}
    environment = b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in started)
    libraries = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in started)
    assert b"hunter2" not in environment
    assert "torch" not in libraries
    fresh.close()
    assert are_gone(started)()


def test_workers_end_with_the_trainer():
    """A trainer that is killed takes its graders with it, even one busy with a pathological answer."""
    script = (
        "from megatron_eqlen.graders.math.grader import MathGrader\n"
        "grader = MathGrader(workers=1, timeout=600)\n"
        "grader.grade([r'\\boxed{2x}'], ['5'])\n"
        "print(grader.pool._host.pid, flush=True)\n"
        "grader.grade([r'\\boxed{' + '(' * 900 + '}'], ['5'])\n"
    )
    root = str(ROOT)
    environment = os.environ | {"PYTHONPATH": root}
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    host = int(trainer.stdout.readline())
    pids = {host, *descendants(host)}
    assert len(pids) == 2
    time.sleep(0.3)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert within(30, are_gone(pids))


def test_the_same_answer_is_verified_once(grader, monkeypatch):
    grader.grade([r"\boxed{2y}"] * 3, ["3y"] * 3)
    monkeypatch.setattr(grader, "_pool", None)  # nobody is asked
    monkeypatch.setattr(math, "WorkerPool", None)
    assert [grade.verdict for grade in grader.grade([r"\boxed{2y}"] * 2, ["3y"] * 2)] == ["wrong"] * 2


@pytest.mark.parametrize(
    "prose",
    [
        "since the number of divisors is as given above, so that; ",
        "x+1 = ",
        "a.",
        r"\begin{cases}\begin{pmatrix}a\end{pmatrix}\\ & ",
    ],
)
def test_long_prose_after_a_number_is_normalized_in_a_moment(prose):
    """`normalize` runs in the trainer, where no time limit stops it."""

    def give_up(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 5.0)
    try:
        normalize.__wrapped__("5 " + (prose * 999)[:1900] + "!")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("text", ["5", "-5", "0", "-0", "007", "1,234,567", "x + 1", "A", "no"])
def test_normalize_is_idempotent(text):
    assert normalize(normalize(text)) == normalize(text)
