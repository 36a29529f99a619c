"""Why a run does not learn, said from its files alone."""

import json

import pytest

import tests.kit.rollouts as kit
from megatron_eqlen.report.diagnosis import diagnose
from megatron_eqlen.report.metrics import read_newest
from megatron_eqlen.types import Grade
from tests.kit.report_runs import make_tokenizer, prompt, recipe, segment, write_run

NONE, RIGHT, WRONG, SCORED = (
    Grade(reward, verdict, grader="mine:exact")
    for reward, verdict in ((0.0, "no_answer"), (1.0, "correct"), (0.0, "wrong"), (0.5, "scored"))
)
FAILED = Grade.unscored("late")
IDLE = {"train/updates": 0.0, "objective/units": 2.0, "objective/members": 4.0, "train/skipped_updates": 0.0}
CUT = None


@pytest.fixture
def told(tmp_path):
    """Return a function that diagnoses a run of a step with these responses, two a prompt."""
    tokenizer = make_tokenizer(tmp_path / "model")

    def diagnosed(*responses: tuple[str, Grade | None], model: str = "model", **metrics: float) -> str:
        run = tmp_path / f"run-{len([*tmp_path.iterdir()])}"
        parts = [segment(tokenizer, text, grade) for text, grade in responses]
        for part in parts:
            part.finish_reason = "stop" if part.grade else "length"
        groups = [kit.group(prompt(n), 0, parts[2 * n : 2 * n + 2]) for n in range(len(parts) // 2)]
        write_run(run, recipe(tmp_path / "model"), {"step-00000000": groups})
        record = {"step": 1, "time": 0.0} | IDLE | {name.replace("__", "/"): v for name, v in metrics.items()}
        (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        found = diagnose(run, recipe(tmp_path / model), read_newest(run, 24))
        return "; ".join(text for _, text in found)

    return diagnosed


@pytest.mark.parametrize(("responses", "wanted"), [
    ([("seven", NONE)] * 3 + [("eight", CUT)], [r"no \boxed{ in 3 responses", "3 no_answer, 1 truncated",
     "a.parquet#0: 'seven', gold '7'"]),
    ([(r"\boxed{7}", RIGHT)] * 4, ["all are right", "4 correct"]),
    ([(r"\boxed{8}", WRONG)] * 3 + [("ten", NONE)],
     ["all are wrong", "3 wrong, 1 no_answer", r"'\\boxed{8}'"]),
    ([("ten", Grade(0.0, "failed", detail="No module named pytest"))] * 2,
     ["2 failed", "'ten', 'No module named pytest'"]),
    ([("seven", CUT)] * 4, ["their answers would come after it", "max_response_length: 192", "0 of 4 hold"]),
    ([(r"\boxed{7} ten", CUT)] * 4, ["go on after their answer", "4 of 4 hold an answer"]),
    ([("seven", SCORED), ("ten", SCORED)] * 2, ["equal rewards: mine:exact gives the same", "4 scored"]),
    ([("seven", RIGHT)] * 2 + [("ten", WRONG)] * 2, ["differ between prompts only: 1 of 2 right"]),
    ([("seven", RIGHT)] * 2 + [("ten", NONE)] * 4,
     ["differ between prompts only: 1 of 3 right", "4 no_answer"]),
    ([("ten", FAILED)] * 3 + [(r"\boxed{7}", RIGHT)],
     ["all are right", "3 unscored, 1 correct", r"'\\boxed{7}'"]),
])  # fmt: skip
def test_a_step_without_a_gradient_is_told_its_cause_with_counts_and_an_example(told, responses, wanted):
    text = told(*responses)
    assert [part for part in wanted if part not in text] == [], text


def test_no_answers_are_counted_in_tokens_whose_text_is_not_known(told):
    text = told(*[(r"\boxed{7} ten", CUT)] * 4, model="gone")
    assert text.startswith("responses are cut at rollout.max_response_length: 192 (4 responses: 4 truncated)")
    assert "Token ids instead of text: " in text


def test_a_step_that_learns_is_told_nothing_and_what_is_left_out_is_told_beside_what_is_kept(told):
    learns = {"train__updates": 1.0, "objective__zero_advantage_fraction": 0.5}
    assert not told((r"\boxed{7}", RIGHT), ("ten", WRONG), **learns)
    assert not told((r"\boxed{7}", RIGHT), ("ten", WRONG), **learns, harvest__truncated_fraction=0.95)
    rare = [("ten", NONE)] * 19 + [(r"\boxed{7}", RIGHT)]
    many = learns | {"reward__verdict__no_answer": 0.95}
    assert told(*rare, **many).startswith("the form is not met: no \\boxed{")
    assert not told(*rare[-6:], **many), "five of six are no nine tenths"
    assert told(("a", RIGHT), ("b", WRONG), objective__members=2.0).endswith("have one member")
    assert told(*[("seven", NONE)] * 2, train__skipped_updates=2.0).startswith("2 updates were skipped")
    left = {"reward__unscored": 3.0, "reward__dropped_length": 90.0, "policy__response_length": 30.0}
    text = told((r"\boxed{7}", RIGHT), ("ten", WRONG), **learns, **left)
    assert text == "3 responses have no reward (reward.on_error: drop); left out were 90 tokens long, kept 30"


def test_equal_advantages_are_no_cause_where_the_teacher_alone_gives_them(tmp_path):
    record = IDLE | {"step": 1, "time": 0.0, "train/updates": 1.0, "objective/zero_advantage_fraction": 1.0}
    taught = recipe(tmp_path, teacher={"path": "teacher"}, loss={"advantage": "none"})
    assert [*diagnose(tmp_path, taught, [record])] == []
    both = recipe(tmp_path, teacher={"path": "teacher"})
    assert [text for _, text in diagnose(tmp_path, both, [record])] == [
        "none of its 2 comparison units has unequal rewards"
    ]


@pytest.mark.parametrize(("tree", "why"), [
    ({"fork": "tokens"}, ["no line forked: all responses end within tree_sampling.step_tokens"]),
    ({"fork": "marker", "marker": "So"},
     ["no line forked: 'So' (tree_sampling.marker) is in no response, or at its very end"]),
    ({"fork": "profile"}, []),
])  # fmt: skip
def test_trees_without_a_fork_are_told_why_whatever_is_trained(tmp_path, tree, why):
    of = recipe(tmp_path, sampling="tree", objective="rloo", tree_sampling=tree)
    learns = IDLE | {"step": 1, "time": 0.0, "train/updates": 1.0}
    for forks, told in ({"harvest/forks": 0.0}, why), ({"harvest/forks": 1.0}, []), ({}, []):
        assert [text for _, text in diagnose(tmp_path, of, [learns | forks])] == told


@pytest.mark.parametrize(("name", "values", "kind"), [
    ("loss/entropy", [1.0] * 6 + [0.05] * 3, "entropy"),
    ("loss/entropy", [0.6] * 4 + [0.3] * 4, None),
    ("loss/entropy", [0.03] * 4 + [0.01] * 3, "entropy"),
    ("policy/response_length", [400.0] * 4 + [50.0] * 3, "length"),
    ("policy/response_length", [400.0] * 4 + [300.0, 50.0, 300.0], None),
    ("train/grad_norm", [0.5] * 4 + [0.0] * 3, "gradient norm"),
    ("mismatch/kl", [1e-4] * 4 + [5e-3] * 3, "mismatch KL"),
    ("mismatch/kl", [1e-6] * 4 + [5e-5] * 3, None),
    ("mismatch/kl", [5e-3], None),
    ("mismatch/kl", [5e-3] * 4 + [2e-2] * 3, None),
])  # fmt: skip
def test_a_collapse_is_told_and_a_fluctuation_is_not(tmp_path, name, values, kind):
    learns = IDLE | {"train/updates": 1.0}
    records = [{"step": n + 1, "time": 0.0, name: value} | learns for n, value in enumerate(values)]
    told = [found for found, _ in diagnose(tmp_path, recipe(tmp_path), records)]
    assert told == ([kind] if kind else [])
