"""LiveCodeBench's verdicts: programs with the verdict of its own checker, found by running it."""

import json

import pytest

from megatron_eqlen.objectives.recipes import load
from megatron_eqlen.rewards.code.grader import CodeGrader, extract_as_livecodebench
from megatron_eqlen.rewards.code.livecodebench import MEMORY_MB
from megatron_eqlen.rewards.code.tests import CodeTests
from tests.kit import ROOT, TABLES

TABLE = json.loads((TABLES / "livecodebench_programs.json").read_text())["problems"]
CASES = [(case, problem["tests"]) for problem in TABLE for case in problem["programs"]]


def gold(tests: dict, seconds: float | None = None) -> str:
    """Return the gold that the reader makes of a row's texts."""
    inputs, outputs, function = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if function:
        inputs = [[json.loads(line) for line in text.split("\n")] for text in inputs]
        outputs = [json.loads(text) for text in outputs]
    return CodeTests(
        inputs, outputs, function, time_limit=seconds, memory_mb=MEMORY_MB, livecodebench=True
    ).to_json()


def verdicts(strict: bool) -> dict[str, bool]:
    grader = CodeGrader(workers=2, lcb_strict=strict)
    texts = [f"```python\n{case['program']}\n```" for case, _ in CASES]
    grades = grader.grade(texts, [gold(tests, case.get("seconds")) for case, tests in CASES])
    grader.close()
    return {case["name"]: grade.reward == 1.0 for (case, _), grade in zip(CASES, grades, strict=True)}


def test_lcb_strict_says_what_the_official_checker_says():
    expected = {case["name"]: case.get("strict", case["official"]) for case, _ in CASES}
    assert verdicts(strict=True) == expected
    assert [case["name"] for case, _ in CASES if "strict" in case] == ["async"]  # needs a socket to start


@pytest.mark.slow
def test_our_rules_differ_from_the_official_ones_only_where_the_table_says():
    assert verdicts(strict=False) == {case["name"]: case.get("ours", case["official"]) for case, _ in CASES}


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```\nbetter:\n```py\nb\nc\n```", "b\nc"),
        ("````python\na\n````", "a"),
        ("~~~\na\n~~~", None),
        ("```python\nnever closed", None),
        ("```python\na\n```\nand\n```python\nnever closed", "and"),
        ("```python\na\n```\nUse ```b``` too", ""),
        ("<think>\n```\na\n```\n</think>\nnothing", None),
    ],
)
def test_the_official_extraction_takes_what_lies_between_the_last_two_fences(text, program):
    assert extract_as_livecodebench(text) == program


def test_outputs_of_all_tests_together_may_be_large():
    """The output exceeds one test's limit: the checker's process reports all tests together."""
    tests = CodeTests([""] * 3, ["x" * (8 << 20)] * 3, livecodebench=True).to_json()
    grader = CodeGrader(workers=1, lcb_strict=True)
    (grade,) = grader.grade(["```python\nprint('x' * (8 << 20))\n```"], [tests])
    grader.close()
    assert grade.verdict == "passed", grade.detail


@pytest.mark.parametrize("strict", [False, True])
def test_dev_null_opens_for_writing(strict):
    quiet = (
        "import os, sys\ndef f(x):\n    with open(os.devnull, 'w') as null:\n        print(x, file=null)\n"
        "    os.write(os.open(os.devnull, os.O_WRONLY), b'x')\n    return x\n"
    )
    tests = gold({"inputs": ["1"], "outputs": ["1"], "fn_name": "f"})
    grader = CodeGrader(workers=1, lcb_strict=strict)
    (grade,) = grader.grade([f"```python\n{quiet}```"], [tests])
    grader.close()
    assert grade.verdict == "passed", grade.detail


def test_rules_are_in_force_for_livecodebench_problems_alone():
    """Programs of other sets must import their names, and their exit status counts."""
    grader = CodeGrader(workers=1)
    programs = ["print(gcd(4, 6))", "import sys\nprint(2)\nsys.exit(1)"]
    texts = [f"```python\n{program}\n```" for program in programs]
    plain, lcb = (CodeTests([""], ["2"], livecodebench=flag).to_json() for flag in (False, True))
    grades = grader.grade(texts * 2, [plain] * 2 + [lcb] * 2)
    grader.close()
    assert [grade.verdict for grade in grades] == ["runtime_error"] * 2 + ["passed"] * 2


def test_lcb_strict_and_a_sandbox_server_are_refused_together():
    recipe = ROOT / "recipes" / "tiny_cpu.yaml"
    overrides = ["reward.lcb_strict=true", "reward.sandbox_url=http://sandbox:8080"]
    with pytest.raises(ValueError, match=r"reward.lcb_strict: true runs programs on this machine only"):
        load(recipe, overrides)
