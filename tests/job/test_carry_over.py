"""Runs whose steps end before their streams do: every pair is trained once, whatever happens in between."""

from collections import Counter
from pathlib import Path

from megatron_eqlen.job import Job, load
from megatron_eqlen.objectives.units import comparison_units
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from tests.kit.jobs import run, start_ranks
from tests.kit.talking import ANSWERED
from tests.kit.train_runs import NO_EVALUATION, column, command, metrics, same_weights, train, wait_for_steps

CARRIED = (
    "rollout.carry_over=true", "rollout.tokens_per_step=400", "rollout.max_response_length=80",
    "loss.rollout_is=token", "steps=4", NO_EVALUATION,
)  # fmt: skip


def check_that_every_pair_is_trained_once(folder: Path) -> None:
    recipe = load(folder / "recipe.yaml")
    trained, pairs, ended, versions = Counter(), {}, set(), set()
    for number, step in enumerate(sorted((folder / "streams").glob("step-*"))):
        for stream in read_step(step):
            if not stream.suspended:
                assert stream.key not in pairs
                pairs[stream.key] = len(pairs_of(stream))
                for unit in comparison_units(stream, recipe, Job(recipe).objective)[1]:
                    trained[stream.key, unit.members[0].tokens["logprobs"].tobytes()] += 1
            ended |= {(stream.key, response.tobytes()) for _, response in stream.ended()}
            versions |= {(number, version) for s in stream.parts for version in s.tokens["versions"].tolist()}
    assert set(trained.values()) == {1}
    assert Counter(key for key, _ in trained) == Counter(pairs), "and all of them"
    assert sum(column(folder, "reward/calls")) <= len(ended), "nothing was graded twice"
    assert any(version < number for number, version in versions), "some tokens were older than their step"


def test_suspended_streams_continue_in_the_next_step_also_of_a_run_that_stopped_and_of_its_record(home):
    whole = train(home, "carried", *CARRIED)
    assert column(whole, "harvest/carried_tokens")[0] == 0
    assert min(column(whole, "harvest/carried_tokens")[1:]) > 0
    check_that_every_pair_is_trained_once(whole)
    said = run(*command(home, "carried-2", *CARRIED, "steps=2")).stdout
    assert "rollouts are suspended and not trained" in said
    assert same_weights(train(home, "carried-2", *CARRIED), whole)
    replay = train(home, "replayed", *CARRIED, "--replay", str(whole / "streams"))
    assert same_weights(replay, whole)


def test_a_run_with_suspended_streams_and_environments_is_killed_and_resumes_with_fewer_replicas(home):
    """Suspended and killed streams get new environments, which are told what was said."""
    arguments = (*CARRIED, *ANSWERED)
    ranks = start_ranks(2, *command(home, "killed-2", "cluster.processes_per_node=2", *arguments))
    wait_for_steps(home / "killed-2", 2, *ranks)
    for rank in ranks:
        rank.kill()
    resumed = train(home, "killed-2", *arguments)
    check_that_every_pair_is_trained_once(resumed)
    assert sum(column(resumed, "environment/replays")) > 0
    assert sum(column(resumed, "reward/unscored")) == 0, "and each said the same again"
    compared = [
        r["mismatch/compared_abs_diff"] for r in metrics(resumed) if "mismatch/compared_abs_diff" in r
    ]
    assert 0 < max(compared) < 1e-4, "trainer and engine saw the same tokens"
