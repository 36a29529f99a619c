"""``slurm/train.sbatch`` when jobs, ranks, nodes and networks end: on a real SLURM, with a trainer that only
counts its steps (``trainer.py``)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_eqlen.processes.run_state import read_state
from tests.kit.processes import command_line, running, within
from tests.slurm.bed import Bed
from tests.slurm.trainer import STEPS

ROOT = Path(__file__).parents[2]
TRAINER = Path(__file__).with_name("trainer.py")
SCRIPT = ROOT / "slurm/train.sbatch"
ENVIRONMENT = {"EQLEN_PYTHON": str(TRAINER), "PYTHONPATH": str(ROOT), "PROCESSES_PER_NODE": "1"}
ENVIRONMENT |= {"EQLEN_CHECK": "0"}


class Job:
    """A submitted run and its files."""

    def __init__(self, bed: Bed, run: Path, submit: Callable[[], str], faults: dict | None = None):
        self.bed, self.run = bed, run
        self.run.mkdir(parents=True)
        if faults:
            (self.run / "faults.json").write_text(json.dumps(faults))
        self.id = submit()

    @property
    def metrics(self) -> list[dict]:
        return _lines(self.run / "metrics.jsonl")

    @property
    def tries(self) -> list[dict]:
        return _lines(self.run / "tries.jsonl")

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self.run.parent.rglob("*.out"))

    def wait_for_steps(self, count: int) -> None:
        self.bed.wait(lambda: len(self.metrics) >= count, f"{count} steps")

    def wait_for_restart(self, restart: int) -> None:
        self.bed.wait(
            lambda: any(attempt["restart"] == restart for attempt in self.tries), f"restart {restart}"
        )

    def go_on(self) -> None:
        """End the wait of a try that ``holds_at`` a step."""
        (self.run / "go-on").touch()

    def finished_with(self, restarts: int) -> None:
        """Assert that it has taken every step once, in order, and that none of its processes runs."""
        self.bed.wait_for(self.id, "COMPLETED", "FAILED")
        assert self.bed.state(self.id) == "COMPLETED", self.log
        assert [record["step"] for record in self.metrics] == list(range(1, STEPS + 1))
        assert self.bed.job(self.id)["Restarts"] == str(restarts), self.log
        assert self.is_gone()

    def is_gone(self) -> bool:
        """Return True if none of its processes runs on any node, soon."""
        return within(60, lambda: not any(str(self.run) in command_line(pid) for pid in running()))


def _lines(path: Path) -> list[dict]:
    """Return the lines that are whole: the last one may be half written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def of_train(bed: Bed, folder: Path, options: tuple, faults: dict | None, environment: dict[str, str]) -> Job:
    """Submit a run from ``folder``."""
    run = folder / "run"
    arguments = ("--nodes=2", *options, SCRIPT, run)
    return Job(bed, run, lambda: bed.submit(*arguments, folder=folder, **ENVIRONMENT | environment), faults)


@pytest.fixture
def submit(bed, tmp_path):
    jobs = []

    def submit(*options: str, faults: dict | None = None, **environment: str) -> Job:
        jobs.append(of_train(bed, tmp_path, options, faults, environment))
        return jobs[-1]

    yield submit
    for job in jobs:
        bed.run("scancel", "--full", job.id)


def submitted(*options: str, faults: dict | None = None, **environment: str) -> Any:
    """Mark a test whose ``job`` does nothing to the nodes. Jobs mostly wait for SLURM to start them again, so
    all of these are submitted before the first such test and run side by side."""
    return pytest.mark.submitted(options, faults, environment)


@pytest.fixture(scope="module")
def side_by_side(request, cluster, tmp_path_factory):
    """Return the jobs, by their tests' names."""
    jobs = {}
    for item in request.session.items:
        if item.path == request.path and (mark := item.get_closest_marker("submitted")):
            jobs[item.name] = of_train(cluster, tmp_path_factory.mktemp("job"), *mark.args)
    yield jobs
    for job in jobs.values():
        cluster.run("scancel", "--full", job.id)


@pytest.fixture
def job(request, side_by_side) -> Job:
    return side_by_side[request.node.name]


@submitted(STEP_SECONDS="2")
def test_before_the_time_limit_it_stops_with_a_checkpoint_and_continues_in_a_new_try(job, cluster):
    """SLURM's signal at the time limit, sent by hand: it goes to the batch script alone."""
    job.wait_for_steps(2)
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.finished_with(restarts=1)
    assert "stopped-0" in {path.name for path in job.run.iterdir()}


def test_a_stop_file_of_before_it_begins_ends_it_unless_an_earlier_try_left_it(submit, bed):
    job = submit("--begin=now+1hour", EQLEN_CHECK="1")
    (job.run / "hold-check").touch()
    (job.run / "STOP").write_text("1.0\n")  # as this script does near the limit
    bed.run("scontrol", "update", f"job={job.id}", "StartTime=now")
    bed.wait(lambda: list(job.run.glob("checked-*")), "the check")
    assert not (job.run / "STOP").exists()
    (job.run / "STOP").touch()
    (job.run / "hold-check").unlink()
    bed.wait_for(job.id, "COMPLETED")
    assert f"stopped before it began, as {job.run}/STOP asked: submit it again to go on" in job.log
    assert not job.tries
    assert not (job.run / "STOP").exists()


@submitted(faults={"0": {"dies_at": 2, "rank": 1}})
def test_a_rank_that_dies_takes_the_others_along_and_the_run_continues(job):
    job.finished_with(restarts=1)
    assert "not finished (status" in job.log


@submitted("--nodes=1", faults={"0": {"dies_at": STEPS}}, STEP_SECONDS="0")
def test_a_failure_at_the_very_end_is_mended_by_another_try(job):
    """The job ends well, so that jobs which depend on it start."""
    job.finished_with(restarts=1)


@submitted(faults={"always": {"dies_at": 2}}, MAX_STALLED="2")
def test_a_fault_that_does_not_heal_is_given_up(job, cluster):
    cluster.wait_for(job.id, "FAILED")
    assert "2 tries took no new step: given up" in job.log
    assert (read_state(job.run).given_up or "?") in job.log
    assert [record["step"] for record in job.metrics] == [1, 2]
    assert {attempt["restart"] for attempt in job.tries} == {0, 1, 2}  # the first took two steps


@submitted(faults={str(n): {"dies_at": n + 1} for n in range(9)}, MAX_RESTARTS="2")
def test_restarts_are_counted(job, cluster):
    cluster.wait_for(job.id, "FAILED")
    assert "after 2 restarts: given up" in job.log


HELD = {"0": {"holds_at": 1}}
"""The first try waits after its first step, until ``go_on``: what happens to it happens in mid-run."""


def test_checkout_and_run_lie_in_folders_with_spaces(bed, tmp_path):
    run, scripts = tmp_path / "a run", shutil.copytree(ROOT / "slurm", tmp_path / "a checkout/slurm")
    arguments = ("--nodes=1", scripts / "train.sbatch", run)
    job = Job(bed, run, lambda: bed.submit(*arguments, folder=tmp_path, **ENVIRONMENT))
    job.finished_with(restarts=0)


def test_scancel_ends_it_for_good(submit, bed):
    job = submit(faults=HELD)
    job.wait_for_steps(1)
    bed.run("scancel", job.id)
    bed.wait_for(job.id, "CANCELLED")
    assert job.is_gone()
    assert len(job.metrics) == 1


def test_a_preempted_run_resumes_when_the_nodes_are_free_again(submit, bed, tmp_path):
    job = submit("--partition=low", faults=HELD)
    job.wait_for_steps(1)
    bed.run("srun", "--partition=high", "--nodes=3", "--exclusive", "sleep", "1", folder=tmp_path)
    job.finished_with(restarts=1)


def test_a_drained_node_is_left_to_its_step_and_not_taken_again(submit, bed):
    job = submit(faults={"0": {"holds_at": 1, "dies_at": 3}})
    job.wait_for_steps(1)
    drained = job.tries[0]["node"]
    bed.run("scontrol", "update", f"nodename={drained}", "state=drain", "reason=test")
    try:
        job.go_on()
        job.finished_with(restarts=1)
    finally:
        bed.run("scontrol", "update", f"nodename={drained}", "state=resume")
    assert job.metrics[2]["restart"] == 0
    assert drained not in {attempt["node"] for attempt in job.tries if attempt["restart"] == 1}


def test_a_node_that_loses_power_is_replaced(submit, bed):
    job = submit(faults=HELD)
    job.wait_for_steps(1)
    lost = next(attempt["node"] for attempt in job.tries if attempt["rank"] == 1)
    bed.crash(lost)
    job.finished_with(restarts=1)
    assert f"\nlost node {lost}: SLURM has it as down\n" in job.log
    assert lost not in {attempt["node"] for attempt in job.tries if attempt["restart"] == 1}
    bed.start(lost)


def test_a_node_back_from_a_crash_before_slurm_has_missed_it_does_not_keep_the_job(submit, bed):
    """SLURM does not notice that the task is lost, and srun would wait for its end."""
    job = submit(faults=HELD, SLURM_WAIT="1")
    job.wait_for_steps(1)
    lost = next(attempt["node"] for attempt in job.tries if attempt["rank"] == 1)
    bed.crash(lost)
    bed.start(lost)
    (job.run / "peer-lost").touch()
    job.go_on()
    job.finished_with(restarts=1)
    assert f"\nlost node {lost}: its ranks ended without a word\n" in job.log


def test_a_node_off_the_network_is_replaced_and_comes_back_to_nothing(submit, bed):
    """The node keeps running while it is cut off, and sees the run folder. Its rank must write nothing once
    the job runs elsewhere, and its batch script must not start the job yet again."""
    job = submit("--nodes=1", faults={"0": {"outlived_at": 1}}, STEP_SECONDS="1")
    job.wait_for_steps(1)
    cut = job.tries[0]["node"]
    bed.cut(cut)
    job.wait_for_restart(1)
    assert job.tries[1]["node"] != cut
    # healed before that, SLURM may end the old try before it finds out by itself
    bed.wait(lambda: "has taken this run over" in job.log, "the old try's refusal to write")
    bed.heal(cut)
    job.finished_with(restarts=1)
    assert [record["restart"] for record in job.metrics] == sorted(
        record["restart"] for record in job.metrics
    )


def test_another_job_leaves_a_run_that_is_held_as_it_is(submit, bed):
    """One begins while the run is held; another had begun before, and its ranks meet the lock."""
    early = submit("--nodes=1", faults=HELD, EQLEN_CHECK="1")
    (early.run / "hold-check").touch()
    bed.wait(lambda: list(early.run.glob("checked-*")), "the check")
    arguments = ("--nodes=1", SCRIPT, early.run)
    held = bed.submit(*arguments, folder=early.run.parent, **ENVIRONMENT)
    early.wait_for_steps(1)
    bed.run("scancel", "--batch", "--signal=USR1", held)
    bed.wait((early.run / "STOP").exists, "the stop near the limit")
    (early.run / f".torchrun/{held}.0").mkdir(parents=True)
    late = bed.submit(*arguments, folder=early.run.parent, **ENVIRONMENT)
    (early.run / "hold-check").unlink()
    for job in (late, early.id):
        bed.wait_for(job, "COMPLETED", "FAILED")
        assert (bed.state(job), bed.job(job)["Restarts"]) == ("FAILED", "0")
    assert early.log.count(f"left as it is: job {held} holds {early.run}: submit it again") == 2
    assert (early.run / "STOP").read_text() == f"{held}.0\n"
    assert (early.run / f".torchrun/{held}.0").is_dir()
    early.id = held
    early.go_on()
    early.finished_with(restarts=1)


def test_a_node_that_is_not_ready_is_left_out_of_the_next_try(submit, bed):
    job = submit(faults={"unready": ["n1"]}, EQLEN_CHECK="1")
    job.finished_with(restarts=1)
    assert {attempt["node"] for attempt in job.tries} == {"n2", "n3"}
    assert bed.job(job.id)["ExcNodeList"] == "n1"
    assert "left out from now on: n1" in job.log
