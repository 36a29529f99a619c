"""The pool of grader processes: order of the items, isolation between them, and the end of the pool."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from megatron_eqlen.graders.workers import pool as worker_process
from megatron_eqlen.graders.workers.pool import WorkerPool
from tests.kit.processes import are_gone, within

HANDLERS = "tests.kit.handlers"
PATIENT = 600.0
"""A wall-clock factor: on a busy machine only processor time may end an item."""


@pytest.fixture
def begun(tmp_path):
    return tmp_path / "begun"


@pytest.fixture
def make_pool(begun):
    pools = []

    def make(workers: int = 1) -> WorkerPool:
        pools.append(WorkerPool(HANDLERS, workers, {"log": str(begun)}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def names(begun: Path) -> list[str]:
    """Return the names of the items that began, in order."""
    return [line.split()[0] for line in begun.read_text().splitlines()]


def workers(begun: Path) -> list[int]:
    return [int(line.split()[1]) for line in begun.read_text().splitlines()]


def test_an_endless_loop_holds_up_one_worker_only(make_pool, begun):
    pool = make_pool(workers=2)
    loop = pool.submit({"name": "loop", "do": "loop"}, 60.0)
    others = [pool.submit({"name": f"{n}"}, 60.0) for n in range(20)]
    assert [other.result()["name"] for other in others] == [f"{n}" for n in range(20)]
    assert not loop.done()


def test_an_item_that_times_out_fails_or_kills_its_worker_costs_the_others_nothing(make_pool):
    pool = make_pool()
    items = [{"name": f"{n}", "do": {3: "loop", 5: "raise", 8: "die"}.get(n, "")} for n in range(40)]
    answers = [
        pool.submit(item, 0.2 if n == 3 else 60.0, wall_factor=PATIENT) for n, item in enumerate(items)
    ]
    answers = [answer.result() for answer in answers]
    assert answers[3].keys() == {"timeout", "seconds"}
    assert answers[5]["failure"] == "ValueError: 5"
    assert answers[8]["failure"] == "the worker died"
    assert all(answers[n]["name"] == f"{n}" for n in range(40) if n not in (3, 5, 8))


def test_a_worker_that_is_stopped_times_out_and_another_answers_the_next_item(make_pool, begun):
    pool = make_pool()
    pool.map([{"name": "first"}], 5.0)
    os.kill(workers(begun)[0], signal.SIGSTOP)
    assert pool.submit({"name": "silent"}, 0.2, wall_factor=2.0).result().keys() == {"timeout", "seconds"}
    assert pool.submit({"name": "next"}, 5.0).result()["name"] == "next"
    assert within(20, are_gone(workers(begun)[:1]))


def test_a_host_that_is_stopped_is_killed_with_its_workers_when_the_pool_is_closed(begun, monkeypatch):
    """The pool's thread is waiting for a new worker at that moment."""
    monkeypatch.setattr(worker_process, "END_SECONDS", 0.2)
    pool = WorkerPool(HANDLERS, 1, {"log": str(begun)})
    pool.map([{"name": "first"}], 5.0)
    stopped = [*workers(begun), pool._host.pid]
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    silent, waiting = (pool.submit({"name": name}, 0.2, wall_factor=2.0) for name in ("silent", "waiting"))
    assert silent.result()["timeout"]
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result()
    assert within(20, are_gone(stopped))


def test_an_item_whose_worker_dies_is_asked_again_as_often_as_it_may(make_pool, tmp_path):
    pool = make_pool()
    items = {"once": (f"die-once {tmp_path / 'died'}", 60.0), "always": ("die", 60.0), "slow": ("loop", 0.2)}
    once, always, slow = (
        pool.submit({"name": name, "do": do}, limit, wall_factor=PATIENT, attempts=2)
        for name, (do, limit) in items.items()
    )
    assert once.result()["name"] == "once"
    assert always.result()["failure"] == "the worker died"
    assert slow.result()["timeout"]


def test_a_worker_that_dies_without_an_item_is_replaced(make_pool, begun):
    pool = make_pool()
    pool.map([{"name": "first"}], 5.0)
    os.kill(workers(begun)[0], signal.SIGKILL)
    assert within(20, are_gone(workers(begun)))
    assert pool.submit({"name": "next"}, 5.0, attempts=2).result()["name"] == "next"


def test_a_pool_that_is_closed_while_items_are_under_way_leaves_no_process_and_no_thread(begun):
    pool = WorkerPool(HANDLERS, 2, {"log": str(begun)})
    answers = [pool.submit({"name": f"{n}", "do": "loop"}, 600.0) for n in range(4)]
    assert within(30, lambda: begun.exists() and len(workers(begun)) == 2)
    pool.close()
    for answer in answers:
        with pytest.raises(CancelledError):
            answer.result()
    assert are_gone([*workers(begun), pool._host.pid])()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(HANDLERS)]
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit({"name": "late"}, 1.0)


def test_a_pool_can_be_closed_before_its_host_has_started():
    pool = WorkerPool(HANDLERS, 1)
    answer = pool.submit({"name": "early"}, 1.0)
    pool.close()
    with pytest.raises(CancelledError):
        answer.result()


def test_a_host_that_cannot_start_is_the_error_of_every_item():
    pool = WorkerPool("tests.kit.no_such_module", 1)
    answers = [pool.submit({"name": f"{n}"}, 1.0) for n in range(3)]
    for answer in answers:
        with pytest.raises(RuntimeError, match="the grader host ended with status 1"):
            answer.result()
    pool.close()
