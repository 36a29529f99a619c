"""``eqlen submit`` on a real SLURM: the script that it writes is one that sbatch takes and nodes run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.processes.run_state import read_state
from megatron_eqlen.report.status import RunStatus
from tests.kit import ROOT
from tests.kit.processes import within
from tests.slurm.test_train_sbatch import TRAINER, Job


@pytest.fixture
def submit(bed, tmp_path, monkeypatch, capsys):
    """Submit a run on CPUs with ``eqlen submit`` as on the controller's machine; return its job."""
    (tmp_path / "base").mkdir()
    shutil.copy(ROOT / "megatron_eqlen/hf/configs/qwen3-0.6b.json", tmp_path / "base/config.json")
    (tmp_path / "recipe.yaml").write_text(
        f"name: small\nsteps: 1\nmodel: {{path: {tmp_path}/base}}\n"
        f"data: {{sources: [{{name: sums, path: {tmp_path}, reader: jsonl}}]}}\n"
        f"cluster: {{device: cpu, cpus_per_process: 2, time: '30'}}\n"
    )
    (tmp_path / "bin").mkdir()
    bed.program(tmp_path / "bin/sbatch", "/usr/bin/sbatch")
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for name, value in (environ | {"EQLEN_PYTHON": str(TRAINER), "RESTART_PAUSE": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    jobs = []

    def submit(
        *arguments: str, faults: dict | None = None, before: Callable[[Path], None] = lambda run: None
    ) -> Job:
        run = tmp_path / f"run{len(jobs) or ''}"

        def eqlen() -> str:
            before(run)
            assert cli.main(["submit", "recipe.yaml", f"run_dir={run}", *arguments]) == 0
            return capsys.readouterr().out.partition(":")[0].removeprefix("job ")

        jobs.append(Job(bed, run, eqlen, faults))
        return jobs[-1]

    yield submit
    for job in jobs:
        bed.run("scancel", "--full", job.id)


def test_a_run_on_two_nodes_ends_and_is_not_started_again(submit, bed):
    job = submit("cluster.nodes=2", "--", "--comment", "two words")
    job.finished_with(restarts=0)
    assert len({attempt["node"] for attempt in job.tries}) == 2
    assert (bed.job(job.id)["CPUs/Task"], bed.job(job.id)["TimeLimit"]) == ("2", "00:30:00")
    assert "Comment=two words" in bed.run("scontrol", "show", "job", job.id)
    assert (job.run / f"slurm-{job.id}.out").exists()
    assert {path.name for path in job.run.glob("checked-*")} == {
        f"checked-{attempt['node']}" for attempt in job.tries
    }


def test_status_says_that_a_job_was_cancelled_before_it_trained(submit, bed):
    job = submit()
    (job.run / "hold-check").touch()
    bed.wait(lambda: list(job.run.glob("checked-*")), "the check")
    bed.run("scancel", job.id)
    bed.wait_for(job.id, "CANCELLED")
    assert within(60, lambda: read_state(job.run).cancelled)
    assert RunStatus(job.run).condition == "cancelled"


def test_near_the_time_limit_before_servers_are_up_the_job_starts_again(submit, bed):
    job = submit("--servers=2", before=lambda run: (run / "hold-servers").touch())
    bed.wait((job.run / "starts").exists, "the servers")
    bed.run("scancel", "--batch", "--signal=USR1", job.id)
    bed.wait(lambda: bed.job(job.id)["Restarts"] == "1", "the next try")
    (job.run / "hold-servers").unlink()
    job.finished_with(restarts=1)
    assert read_state(job.run).stalled_tries == 1


def test_trainer_and_servers_start_continue_and_end_together(submit, monkeypatch):
    """The trainer fails in its first try; in the second a server dies, is started again and taken back."""
    monkeypatch.setenv("STEP_SECONDS", "0.5")
    job = submit("--servers=2", faults={"0": {"dies_at": 1}})
    job.wait_for_restart(1)
    starts = [line.split() for line in (job.run / "starts").read_text().splitlines()]
    port, node = starts[-1]
    assert len(starts) == 4
    assert node != job.tries[-1]["node"]
    (job.run / f"crash-{node}-{port}").touch()
    job.finished_with(restarts=1)
    assert (job.run / "starts").read_text().splitlines()[4:] == [f"{port} {node}"]
