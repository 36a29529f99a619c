"""LiveCodeBench's verdicts: programs with the verdict of its own checker, found by running it."""

import json

import pytest

from megatron_eqlen.graders.code.grader import CodeGrader
from megatron_eqlen.graders.code.rules import MEMORY_MB
from megatron_eqlen.graders.code.tests import CodeTests
from megatron_eqlen.recipe import RewardRecipe
from tests.kit import TABLES
from tests.kit.marks import MORE
from tests.kit.programs import PYTHON

TABLE = json.loads((TABLES / "livecodebench_programs.json").read_text())["problems"]
CASES = [(case, problem["tests"]) for problem in TABLE for case in problem["programs"]]


def gold(tests: dict, seconds: float | None = None) -> str:
    """Return the gold that the reader makes of a row's texts."""
    inputs, outputs, function = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if function:
        inputs = [[json.loads(line) for line in text.split("\n")] for text in inputs]
        outputs = [json.loads(text) for text in outputs]
    return CodeTests(
        inputs, outputs, function, time_limit=seconds, memory_mb=MEMORY_MB, rules="livecodebench"
    ).to_json()


def verdicts(cases: list[tuple[dict, dict]]) -> dict[str, bool]:
    grader = CodeGrader(RewardRecipe(workers=2, code_python=PYTHON))
    texts = [f"```python\n{case['program']}\n```" for case, _ in cases]
    grades = grader.grade(texts, [gold(tests, case.get("seconds")) for case, tests in cases])
    grader.close()
    return {case["name"]: grade.reward == 1.0 for (case, _), grade in zip(cases, grades, strict=True)}


@pytest.mark.parametrize("step", [1 if MORE else 4])  # all of them each week
def test_our_rules_differ_from_the_official_ones_only_where_the_table_says(step):
    cases = CASES[::step]
    assert verdicts(cases) == {case["name"]: case.get("ours", case["official"]) for case, _ in cases}


def test_rules_are_in_force_for_livecodebench_problems_alone():
    """Programs of other sets must import their names, and their exit status counts."""
    grader = CodeGrader(RewardRecipe(workers=1, code_python=PYTHON))
    programs = ["print(gcd(4, 6))", "import sys\nprint(2)\nsys.exit(1)"]
    texts = [f"```python\n{program}\n```" for program in programs]
    plain, lcb = (CodeTests([""], ["2"], rules=rules).to_json() for rules in ("plain", "livecodebench"))
    grades = grader.grade(texts * 2, [plain] * 2 + [lcb] * 2)
    grader.close()
    assert [grade.verdict for grade in grades] == ["runtime_error"] * 2 + ["passed"] * 2
