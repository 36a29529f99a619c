"""The code grader: extraction, LiveCodeBench's comparison rules, verdicts, a sandbox server, refusals."""

import json
import time
import tracemalloc
from dataclasses import replace

import pytest

from megatron_eqlen.graders import CODE, WORKERS
from megatron_eqlen.graders.code import tests as code_tests
from megatron_eqlen.graders.code.grader import CodeGrader, extract_program
from megatron_eqlen.graders.code.tests import CodeTests, same_output
from megatron_eqlen.graders.sandbox import probe
from megatron_eqlen.graders.sandbox.client import SandboxError
from megatron_eqlen.graders.sandbox.program import Isolation, Limits
from megatron_eqlen.recipe import RewardRecipe
from tests.kit.programs import PYTHON

ADD = CodeTests(["2 3\n", "4 5\n", "6 7\n"], ["5\n", "9\n", "13\n"]).to_json()
ADD_FUNCTION = CodeTests([[2, 3], [4, 5]], [5, 9], function="add").to_json()


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


def code_grader(**keys):
    return CodeGrader(RewardRecipe(code_python=PYTHON, **{"workers": 1} | keys))


@pytest.fixture(scope="module")
def grader():
    grader = code_grader(workers=2, code_timeout=2.0, code_memory_mb=512)
    yield grader
    grader.close()


CHECKER = """
import sys
from pathlib import Path

def main():
    with open(sys.argv[1]) as given, open(sys.argv[2], encoding="utf-8") as correct:
        total, count = int(given.read()), len(correct.readline().split())
    found = [int(word) for word in Path(sys.argv[3]).read_text().split()]
    print(1 if len(found) == count and sum(found) == total else 0)

if __name__ == "__main__":
    main()
"""


def test_where_several_outputs_are_right_the_problems_checker_decides(grader):
    """It reads input, correct output and the program's output by the names in its arguments."""
    gold = CodeTests(["7\n", "9\n"], ["3 4\n", "4 5\n"], checker=CHECKER).to_json()
    programs = ["print(1, int(input()) - 1)", "print(3, 4)", "print(int(input()))", "print('1')\nprint('?')"]
    grades = grader.grade([fenced(program) for program in programs], [gold] * 4)
    assert [grade.verdict for grade in grades] == ["passed"] + ["wrong_answer"] * 3
    assert grades[1].detail == "test 2 of 2: the checker, finished: '0\\n'"
    assert "the checker, runtime_error: " in grades[3].detail
    with pytest.raises(ValueError, match="checker: expected a program, and no function"):
        CodeTests([[1]], [1], function="f", checker=CHECKER)


@pytest.mark.parametrize(("text", "program"), [
    ("```python\nx = 1\n```", "x = 1\n"), ("```\na\n```\nbetter:\n```py\nb\n```", "b\n"),
    ("```python\na\n```</think>\n```python\nb\n```", "b\n"), ("```python\na\n```</think> no program", None),
    ("```python\nnever closed", None),
    ("```python\na\n```\nthen\n```python\nnever closed", "a\n"),
    ("```python\ncut off\n```python\nb\n```", "b\n"), ("````python\na\n````", "a\n"),
    ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
    ("~~~python\na\n~~~", "a\n"), ("~~~\n```\na\n~~~~", "```\na\n"),
    ("```python\na\n``` And that is it.", "a\n"), ("  ```Python3\na\n  ```", "a\n"),
    ("```python\na\n```\nUse ```b``` as well", "a\n"), ("```python\n\n```", None), ("x = 1", None),
    ("", None),
])  # fmt: skip
def test_the_last_fenced_block_after_thinking(text, program):
    assert extract_program(text) == program


@pytest.mark.parametrize("line", ["~" * 400_000 + "`", "`" * 400_000 + "x`", " " * 400_000, "~~~ x" * 80_000])
def test_extraction_takes_linear_time(line):
    started = time.process_time()
    assert extract_program(line) is None
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(("printed", "expected", "same"), [
    ("5\n", "5", True), ("  5  \n\n", "5\n", True), ("3.0", "3", True), ("1e2 2", "100 2.0", True),
    ("0.3000001", "0.3", False), ("Yes", "YES", False), ("1 2", "1\n2", False), ("1\n2", "1\n2\n3", False),
    ("1  2", "1 2", True),
    ("a  b", "a b", False),  # text lines are compared as they are
    ("nan", "nan", True), ("", "", True), ("1 2 3", "1 2", False),
    ("inf 1.0", "Infinity 1", True), ("-inf 1", "inf 1", False), ("nan 1", "NaN 1", False),
])  # fmt: skip
def test_livecodebench_comparison(printed, expected, same):
    assert same_output(printed, expected) is same


def checked(grader, cases):
    """Grade (program, tests, verdict) and compare the verdicts."""
    golds = [tests if isinstance(tests, str) else tests.to_json() for _, tests, _ in cases]
    grades = grader.grade([fenced(program) for program, *_ in cases], golds)
    assert [grade.verdict for grade in grades] == [verdict for *_, verdict in cases], grades
    return grades


@pytest.mark.parametrize("rules", ["apps", "plain", "livecodebench"])
def test_decimals_on_stdout_have_the_tolerance_of_apps_by_its_rules_alone(grader, rules):
    """numpy.allclose, which its checker takes: |a - b| <= 1e-8 + 1e-5 |b|."""
    close = [("0.3000001", "0.3"), ("1000.009", "1000"), ("0.00000001", "0")]
    other = [
        ("5", "inf"),
        ("-inf", "inf"),
        ("1000.011", "1000"),
        ("0.00000003", "0"),
        ("1e400", "1"),
        ("1e9999999", "1"),
        ("x", "X"),
    ]
    checked(grader, [
        (f"print({text!r})", CodeTests([""], [want], rules=rules),
         "passed" if rules == "apps" and (text, want) in close else "wrong_answer")
        for text, want in close + other
    ])  # fmt: skip


VERDICTS = {
    "passed": "print(sum(map(int, input().split())))",
    "wrong_answer": "print(5)",
    "runtime_error": "a, b = map(int, input().split())\nprint(a + b if a < 6 else a / 0)",
    "compile_error": "print(",
    "memory_limit": "x = bytearray(10**9)",
    "output_limit": "import sys\nwhile True:\n    sys.stdout.write('x' * 10**6)",
}


def test_verdicts_and_the_first_failing_test(grader):
    grades = checked(grader, [(program, ADD, verdict) for verdict, program in VERDICTS.items()])
    assert [grade.reward for grade in grades] == [1.0] + [0.0] * (len(VERDICTS) - 1)
    details = dict(zip(VERDICTS, (grade.detail for grade in grades), strict=True))
    assert details["passed"] == ""
    assert details["wrong_answer"] == r"test 2 of 3: expected '9\n', found '5\n'"
    assert details["runtime_error"].startswith("test 3 of 3:")
    assert "ZeroDivisionError" in details["runtime_error"]
    assert "SyntaxError" in details["compile_error"]
    assert all(grade.grader == "code-5" for grade in grades)
    (wrong,) = checked(grader, [("def add(a, b):\n    return a - b", ADD_FUNCTION, "wrong_answer")])
    assert wrong.detail == "test 1 of 2: expected 5, found '-1'"
    assert [grade.verdict for grade in grader.grade(["I cannot."], [ADD])] == ["no_answer"]


NESTED, WRAPPED = (CodeTests([[1]], [value], "f") for value in ([[1, 2], [3]], [7]))
SEVEN = "def f(a):\n    return 7"
FUNCTIONS = [
    ("class Solution:\n    def add(self, a, b):\n        return a + b", ADD_FUNCTION, "passed"),
    ("def f(a):\n    return (1, 2), [3]", NESTED, "passed"),
    (SEVEN, replace(WRAPPED, rules="apps"), "passed"), (SEVEN, WRAPPED, "wrong_answer"),
    ("import numpy as np\ndef f(a):\n    return [np.sum(a), np.float32(1.5)]",
     CodeTests([[[1, 2]]], [[3, 1.5]], "f"), "passed"),
]  # fmt: skip
APPS = [  # the names that its checker imports, integer keys, wrapped values
    ("class Solution:\n    def f(self, xs: List[int]) -> Optional[int]:\n        return ceil(max(xs))",
     CodeTests([[[1, 2]]], [2], "f", rules="apps"), "passed"),
    ("def f(a):\n    return sum(a) + a[3]", CodeTests([[{"3": 4}]], [7], "f", rules="apps"), "passed"),
    ("def f(names):\n    return names['a']", CodeTests([[{"a": 4}]], [4], "f", rules="apps"), "passed"),
    ("def f(a):\n    return [(a, a)]", CodeTests([[1]], [[[[1, 1]]]], "f", rules="apps"), "passed"),
    ("def f(a):\n    return [1]", CodeTests([[1]], [1], "f", rules="apps"), "wrong_answer"),
    ("print(gcd(*map(int, stdin.readline().split())))", CodeTests(["4 6"], ["2"], rules="apps"), "passed"),
    ("print(2)\nsys.exit(1)", CodeTests([""], ["2"], rules="apps"), "runtime_error"),
]  # fmt: skip
NULL = {  # what a function returns, not what is left out
    "def f(a):\n    pass": "passed",
    "import os\ndef f(a):\n    os._exit(0)": "runtime_error",
    "import sys\ndef f(a):\n    sys.exit(0)": "runtime_error",
    "import os\nos._exit(0)": "runtime_error",
    "import os\nos.write(4, b'null')\nos._exit(0)": "runtime_error",
    "import os\nos.write(4, b'{\"result\": null}')\nos._exit(0)": "runtime_error",
    "import os\nos.write(4, b'result\\nnull')\ndef f(a):\n    pass": "runtime_error",
    "def f(a):\n    return 0": "wrong_answer",
}
ANNOTATED = "def f(a: 1 + 1): pass\nprint(f.__annotations__['a'], end='')"
AS_UNDER_PYTHON = [  # exit functions run, threads are waited for, stdout may be replaced
    *((program, CodeTests([""], ["7"]), "passed") for program in (
        "import atexit\natexit.register(print, 7)",
        "import atexit, io, sys\nsys.stdout = held = io.StringIO()\nprint(7)\n"
        "atexit.register(lambda: sys.__stdout__.write(held.getvalue()))",
        "import sys, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print(7))).start()\nsys.exit()",
        "import sys\nprint(7)\nsys.stdout.close()",
    )),
    (ANNOTATED, CodeTests([""], ["2"]), "passed"),
    ("from __future__ import annotations\n" + ANNOTATED, CodeTests([""], ["2"]), "wrong_answer"),
    ("while True:\n    pass", CodeTests([""], [""], time_limit=0.5), "time_limit"),  # of processor time
]  # fmt: skip


@pytest.mark.parametrize("cases", [
    FUNCTIONS, APPS, [(program, CodeTests([[1]], [None], "f"), end) for program, end in NULL.items()],
    AS_UNDER_PYTHON,
], ids=["functions", "APPS and TACO", "null", "as under Python"])  # fmt: skip
def test_programs_and_functions_have_the_verdicts_of_their_sets(grader, cases):
    checked(grader, cases)


def test_an_answer_far_larger_than_the_expected_one_is_not_parsed():
    """A forged result of millions of lists costs its text, not its objects."""
    lists, numbers = "[" + "[]," * 2_000_000 + "[]]", "[" + "1," * 2_000_000 + "1]"
    tests = CodeTests([[1], [1]], [[], 5], function="f")
    stdio = CodeTests(["", ""], ["1 2 3", "1\n2"])
    tracemalloc.start()
    answers = [tests.is_right(number, "", text) for number in (0, 1) for text in (lists, numbers)]
    answers += [stdio.is_right(0, "1 " * 2_000_000, None), stdio.is_right(1, "1\n" * 2_000_000, None)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answers == [False] * 6
    assert peak < 4 * len(numbers)


GIVEN, CALL = {"inputs": ["1"], "outputs": ["1"]}, {"inputs": [[1]], "outputs": [1], "function": "f"}


@pytest.mark.parametrize(("tests", "message"), [
    ({"inputs": [], "outputs": []}, "at least one test"),
    ({"inputs": ["1"], "outputs": []}, "1 inputs, but 0 outputs"),
    ({"inputs": [1], "outputs": ["1"]}, "test 0: expected the text"),
    (GIVEN | {"function": "f"}, "test 0: expected the list of f's arguments"),
    ({"inputs": "1", "outputs": "1"}, "inputs: expected a list, found '1'"),
    ({"inputs": ["1"]}, "outputs: expected a list, found None"),
    ({"inputs": ["1"], "outputs": [None]}, "test 0: expected the text"),
    (GIVEN | {"time_limit": 0}, "time_limit: expected a number above 0"),
    (GIVEN | {"time_limit": float("nan")}, "time_limit: .* found nan"),
    (GIVEN | {"time_limit": 1e300}, "time_limit: .* found 1e"),
    (GIVEN | {"time_limit": "2"}, "time_limit: .* found '2'"),
    (GIVEN | {"time_limit": True}, "time_limit: .* found True"),
    (GIVEN | {"memory_mb": -5}, "memory_mb: expected a whole number above 0"),
    (GIVEN | {"memory_mb": 1e18}, "memory_mb: .* at most"),
    (GIVEN | {"memory_mb": 0.5}, "memory_mb: expected a whole number"),
    *((CALL | {"function": name}, "function: expected a name") for name in ("", "f" * 5000, "lambda", ["f"])),
    (CALL | {"rules": 1}, "rules: expected one of plain"),
    (GIVEN | {"fn_name": "f"}, r"unknown \['fn_name'\]"),
    ([], "expected an object of tests"),
])  # fmt: skip
def test_bad_tests_are_refused_with_the_reason(tests, message):
    with pytest.raises(ValueError, match=message):
        CodeTests.from_json(json.dumps(tests))


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_absurdly_deep_tests_are_refused(depth):
    deep = "[" * depth + "]" * depth
    with pytest.raises(ValueError, match="nested deeper than 200 levels"):
        CodeTests.from_json(f'{{"inputs": [[1]], "outputs": [{deep}], "function": "f"}}')


def test_an_expected_output_above_the_usual_limit_can_be_printed(grader):
    size = Limits.output_bytes + 1
    printed = json.dumps({"inputs": [""], "outputs": ["x" * size]})
    returned = json.dumps({"inputs": [[]], "outputs": ["x" * size], "function": "f"})
    programs = [fenced(f"print('x' * {size})"), fenced(f"def f():\n    return 'x' * {size}")]
    grades = grader.grade(programs, [printed, returned])
    assert [grade.verdict for grade in grades] == ["passed", "passed"]
    (endless,) = grader.grade([fenced("while True:\n    print('x' * 10**6)")], [printed])
    assert endless.verdict in ("output_limit", "time_limit")


def test_an_expected_output_that_no_program_may_print_is_refused(monkeypatch):
    monkeypatch.setattr(code_tests, "LARGEST_OUTPUT", 10)
    CodeTests(["", ""], ["x" * 10, ""])
    with pytest.raises(ValueError, match="test 1: expected an output of at most 10 bytes, found 11"):
        CodeTests(["", ""], ["", "x" * 9 + "é"])
    with pytest.raises(ValueError, match="test 0: expected an output of at most 10 bytes, found 12"):
        CodeTests([[]], [[1000, 2000]], "f")


def test_tests_survive_the_trip():
    tests = CodeTests([[1, "x"]], [[None]], "f", 2.5, 512, "apps")
    assert CodeTests.from_json(tests.to_json()) == tests


def test_strict_refuses_a_machine_that_cannot_isolate(monkeypatch, caplog):
    weak = Isolation(landlock=False, seccomp=False, drop_user=False)
    monkeypatch.setattr(probe, "offered_isolation", lambda python: weak)
    with pytest.raises(ValueError, match="strict needs Landlock and seccomp, this machine offers rlimits"):
        code_grader().grade([fenced("x")], [ADD])
    accepting = code_grader(code_sandbox="best_effort")
    assert accepting.grade([fenced(VERDICTS["passed"])], [ADD])[0].verdict == "passed"
    assert "code sandbox: rlimits" in caplog.text
    accepting.close()


def test_a_sandbox_that_fails_twice_is_not_a_wrong_answer(monkeypatch):
    class Broken:
        def submit(self, item, seconds, read, wall_factor, attempts):
            assert attempts == 2
            return read({"failure": "SandboxError: fork", "seconds": 0.1})

    grader = CodeGrader(RewardRecipe(workers=1))
    monkeypatch.setattr(grader, "_pool", Broken())
    with pytest.raises(SandboxError, match="no verdict on a program in 2 attempts"):
        grader.grade([fenced("x")], [ADD])


def test_programs_of_other_trainers_are_graded_as_a_recipe_grades_them_by_default():
    section = RewardRecipe(workers=WORKERS)
    assert vars(CODE) == {name: getattr(section, name) for name in vars(CODE)}
