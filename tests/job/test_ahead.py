"""Training while a real server generates ahead (``rollout.staleness``)."""

from itertools import accumulate
from pathlib import Path

import pytest

from megatron_eqlen.processes import events
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.types import RolloutKey
from tests.job.test_carry_over import CARRIED, check_that_every_pair_is_trained_once
from tests.kit.jobs import start
from tests.kit.train_runs import column, command, metrics, train, wait_for_steps
from tests.pure.test_rollout_harvest import versions_of


def check_steps(folder: Path, steps: int, staleness: int) -> None:
    """Assert that each step trained its own prompts, of weights that were not too old, and that an update
    made one version."""
    numbers = []
    for step in range(steps):
        rollouts = read_step(folder / f"streams/step-{step:08d}")
        numbers += sorted({rollout.prompt.number for rollout in rollouts})
        assert len(rollouts) == 4 * 2
        assert min(version for rollout in rollouts for version in versions_of(rollout)) >= max(
            step - staleness, 0
        )
        assert all(segment.grade is not None for rollout in rollouts for segment, _ in rollout.ended())
    assert numbers == list(range(4 * steps)), "each prompt once"
    assert column(folder, "step") == [*range(1, steps + 1)]


def test_two_ranks_train_on_what_a_server_generates_ahead(home, served):
    asked = (*served, "rollout.staleness=1", "loss.rollout_is=token", "evaluation.every=2", "steps=4")
    asked += ("rollout.max_response_length=80",)  # so that every step trains
    folder = train(home, "ahead", *asked, ranks=2)
    check_steps(folder, 4, staleness=1)
    assert column(folder, "mismatch/logprob_abs_diff_max")[0] < 1e-4, (
        "the first step is of the weights that it trains"
    )
    assert min(column(folder, "train/grad_norm")) > 0
    stages = [event["stage"] for event in events.read(folder) if "began" in event]
    assert stages.count("harvest") == stages.count("train") == 4
    # of two ranks and a server; the budget does not pay for evaluations
    worked = [record["time/step"] - record.get("time/evaluate", 0.0) for record in metrics(folder)]
    assert column(folder, "time/gpu_hours") == pytest.approx([3 * n / 3600 for n in accumulate(worked)])
    assert [number for number in range(4) if "time/evaluate" in metrics(folder)[number]] == [1, 3]
    speeds = [n / (3 * s) for n, s in zip(column(folder, "objective/effective_samples"), worked, strict=True)]
    assert column(folder, "objective/effective_per_gpu_second") == pytest.approx(speeds)


def test_killed_and_stopped_in_the_middle_of_an_overlap_a_run_loses_and_repeats_nothing(home, served):
    """The streams that are suspended at that moment are neither lost nor repeated."""
    folder, limits = home / "overlap", ("rollout.staleness=2", "rollout.max_staleness=2", "steps=8")
    asked = (*served, *CARRIED, *limits)
    killed = start(*command(home, "overlap", *asked))
    wait_for_steps(folder, 2, killed)
    killed.kill()
    stopped = start(*command(home, "overlap", *asked))
    wait_for_steps(folder, 4, stopped)
    (folder / "STOP").touch()
    assert stopped.wait() == 0, stopped.stderr
    assert 4 <= len(metrics(folder)) < 8
    assert (folder / f"streams/step-{len(metrics(folder)):08d}").is_dir(), "the next step has begun"
    train(home, "overlap", *asked)
    assert not list((folder / "streams").glob("stale-*"))
    check_that_every_pair_is_trained_once(folder)
    assert sum(column(folder, "harvest/carried_tokens")) > 0
    versions = [0, *accumulate(map(int, column(folder, "train/updates")))]
    drawn: dict[RolloutKey, int] = {}
    for step in range(8):
        for rollout in read_step(folder / f"streams/step-{step:08d}"):
            drawn_in = drawn.setdefault(rollout.key, step)
            assert step - drawn_in <= 2
            assert min(versions_of(rollout)) >= versions[max(drawn_in - 2, 0)]
    assert 0 < max(record.get("staleness/max", 0) for record in metrics(folder)) <= 2 + 2
