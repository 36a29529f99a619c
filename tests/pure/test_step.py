"""A step is a value: the results of each verb are in the step that it returns, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_eqlen.job import load
from megatron_eqlen.metrics import MetricError
from megatron_eqlen.processes import distributed
from megatron_eqlen.processes.events import EventWriter
from megatron_eqlen.processes.timeline import Timeline
from megatron_eqlen.processes.watchdog import Watchdog
from megatron_eqlen.report.progress import Progress
from megatron_eqlen.run.run import Run
from megatron_eqlen.run.step import Batch, Step
from megatron_eqlen.training.policy import Policy
from tests.kit import ROOT
from tests.kit.report_runs import example_group, example_stream


def test_two_steps_exist_at_once_and_neither_sees_the_other():
    first, second = Step(0, policy_version=0), Step(1, policy_version=0)
    fuller = first.add(Batch([example_stream()], {"harvest/generated_tokens": 9}, {"drawn": 1}))
    other = second.add(Batch([example_group()], {"harvest/generated_tokens": 6}, {"drawn": 2}))
    fuller = fuller.log({"time/train": 1.0})
    assert (first.rollouts, first.metrics, first.prompts) == ((), {}, 0)
    assert fuller.metrics == {"harvest/generated_tokens": 9, "time/train": 1.0}
    assert other.metrics == {"harvest/generated_tokens": 6}
    assert (fuller.name, other.name) == ("step-00000000", "step-00000001")
    assert (fuller.data_position, other.data_position) == ({"drawn": 1}, {"drawn": 2})


def test_batches_of_a_step_follow_one_another_and_add_up():
    step = Step(0, policy_version=0)
    for tokens, seconds in ((9, 1.0), (6, 2.0)):
        metrics = {"harvest/generated_tokens": tokens, "time/harvest": seconds}
        step = step.add(Batch([example_stream()], metrics, None))
    assert step.metrics == {"harvest/generated_tokens": 15, "time/harvest": 3.0}
    assert (len(step.rollouts), step.prompts) == (2, 1)


def test_a_metric_that_nothing_declares_is_an_error():
    with pytest.raises(MetricError, match="harvest/generated_tokns"):
        Step(0, 0).add(Batch([], {"harvest/generated_tokns": 1.0}, None)).metrics  # noqa: B018


def test_a_step_that_begins_while_another_is_open_has_the_next_number(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "agree", lambda ask: ask())  # a rank alone
    recipe = load(ROOT / "recipes/tiny_cpu.yaml", [f"run_dir={tmp_path}"])
    session: Any = SimpleNamespace(recipe=recipe, timeline=Timeline(), progress=Progress(recipe.budget, ""))
    session.events, session.keep_date = EventWriter(), lambda run: None
    session.watchdog, session.watch, session.enter = Watchdog(0, 1, None), str, id
    run = Run(session)
    policy = cast(Policy, SimpleNamespace(version=5, chunks=[]))
    assert [(step.number, step.policy_version) for step in (run.begin(policy), run.begin(policy))] == [
        (0, 5),
        (1, 5),
    ]
    assert run.steps == 0, "begun, not done"
