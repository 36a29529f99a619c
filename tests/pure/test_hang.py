"""The report of a hang names the rank that the others wait for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.processes import hang
from megatron_eqlen.processes.watchdog import Watchdog, remove_quiet
from megatron_eqlen.training.flight_recorder import of_entries
from tests.kit.processes import within


def group(entered: int | None, waits: bool, name="0", ranks=(0, 1), operation="gloo:all_reduce") -> dict:
    waited = {"number": entered, "operation": operation, "sizes": [[3]], "at": "x.py:1 in f"}
    members = {"group": name, "called": f"group{name}", "ranks": list(ranks)}
    return members | {"entered": entered, "waits_in": waited if waits else None}


def facts(rank: int, *groups: dict, stages=("train",), inside="time.py:1 in sleep") -> dict:
    at = {"at": f"megatron_eqlen/work.py:{rank} in work", "in": inside}
    place = {"rank": rank, "host": f"n{rank}", "pid": 1000 + rank, "silent_seconds": 600.0}
    return place | {"stages": list(stages), "at": at, "collectives": list(groups)}


def cause(*ranks: dict, world: int | None = None) -> str:
    return hang.first_cause({status["rank"]: status for status in ranks}, world or len(ranks))


def test_a_rank_that_misses_a_collective_is_named_with_its_place():
    said = cause(facts(0, group(17, True)), facts(1, group(16, False)))
    assert said == (
        "rank 1 did not come to gloo:all_reduce number 17 of group group0 (ranks 0, 1), in which rank 0 "
        "waited: rank 1 is in stage train for 600 s at megatron_eqlen/work.py:1 in work, there in "
        "time.py:1 in sleep"
    )


@given(st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))))
def test_a_chain_of_waiting_ranks_leads_to_the_one_at_its_end(case):
    """Rank order[0] waits for order[1], which waits for order[2], ...; the last one is busy."""
    world, order = case
    ranks = []
    for at, rank in enumerate(order):
        mine = [group(5, True, f"pair{at}", (rank, order[at + 1]))] if at + 1 < world else []
        if at:
            mine.append(group(4, False, f"pair{at - 1}", (order[at - 1], rank)))
        ranks.append(facts(rank, *mine))
    assert cause(*sorted(ranks, key=lambda report: report["rank"])).startswith(
        f"rank {order[-1]} did not come to"
    )


def test_ranks_that_wait_for_each_other_are_all_named():
    said = cause(
        facts(0, group(3, True, "a"), group(7, False, "b")),
        facts(1, group(2, False, "a"), group(8, True, "b")),
    )
    assert said.startswith("ranks wait for each other: rank 0 in gloo:all_reduce number 3 of group groupa")
    assert "rank 1 in gloo:all_reduce number 8 of group groupb (ranks 0, 1), to which rank 0 did not" in said


def test_different_collectives_under_one_number_are_a_difference():
    said = cause(facts(0, group(3, True)), facts(1, group(3, True, operation="gloo:barrier")))
    assert said == (
        "ranks do different things as number 3 of group group0: gloo:all_reduce on rank 0; gloo:barrier on "
        "rank 1"
    )


def test_a_rank_without_facts_comes_first():
    assert cause(facts(0, group(17, True)), world=2).startswith("rank 1 wrote no facts")


def test_where_nobody_waits_in_a_collective_the_rank_that_is_busy_is_named():
    waiting = facts(0, inside="torch/distributed/distributed_c10d.py:1 in recv")
    assert cause(waiting, facts(1)).startswith("rank 1 is in stage train")
    assert cause(facts(0, stages=())).startswith("rank 0 is between stages")


def test_what_the_recorder_has_forgotten_is_no_reason_to_blame_a_rank():
    assert cause(facts(0, group(17, True)), facts(1, group(None, False))).startswith("rank 1 is in stage")


@pytest.mark.parametrize(("oldest", "entered"), [(0, 0), (100, None)])
def test_a_group_that_a_full_recorder_does_not_show_is_not_known(oldest, entered):
    entry = {
        "record_id": oldest,
        "process_group": ("1", "undefined"),
        "retired": True,
        "is_p2p": False,
        "collective_seq_id": 5,
    }
    found = {group["group"]: group for group in of_entries([entry], {"1": [0, 1], "2": [0]})}
    assert found["1"]["entered"] == 5
    assert found["1"]["called"] == "1"
    assert found.get("2", {"entered": 0})["entered"] == entered


def test_the_index_has_the_cause_and_a_line_for_every_rank(tmp_path):
    for report in (facts(0, group(17, True)), facts(1, group(16, False))):
        (tmp_path / f"rank-{report['rank']}.json").write_text(json.dumps(report))
    lines = hang.explain(hang.read(tmp_path), world=3).splitlines()
    assert lines[0].startswith("no progress on any rank for 600 s: rank 2 wrote no facts")
    assert [line.partition(":")[0].split(",")[0] for line in lines[2:5]] == [
        "rank 0 on n0",
        "rank 1 on n1",
        "rank 2",
    ]
    assert "waits in gloo:all_reduce number 17 of group0" in lines[2]


def test_what_killed_tries_left_is_removed_and_nothing_else(tmp_path):
    for name, text in (("killed/rank-0.txt", ""), ("hung/rank-0.txt", "stacks"), ("notes.txt", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    remove_quiet(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hung", "notes.txt"]


def test_stacks_of_a_thread_that_was_only_late_are_removed(tmp_path):
    """Otherwise the other ranks would take them for this rank's report."""
    dog = Watchdog(0, 2, 2.0)
    dog.start(tmp_path / "try")
    stacks = tmp_path / "try/rank-0.txt"
    stacks.write_text("Timeout (0:00:04)!\n")
    assert within(20, lambda: not stacks.read_text())
    dog.stop()
