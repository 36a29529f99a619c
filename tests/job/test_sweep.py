"""A real sweep: killed in the middle it resumes, and each of its runs equals that of `eqlen train`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_eqlen.sweep import command
from tests.kit.jobs import Job
from tests.kit.processes import within
from tests.kit.train_runs import STEPS, column, metrics

SWEEP = """
name: real
folder: {folder}/sweep
recipes: [recipe.yaml]
reference: eqlen
match: flops
methods:
  eqlen: {{label: EqLen-GRPO}}
  grpo: {{label: GRPO, set: {{sampling: independent}}}}
"""


class SweepJob(Job):
    run_folder: Path


class KilledAfterAStep(SweepJob):
    """Ends the sweep, as Ctrl-C does, when GRPO's run has taken its first step."""

    def poll(self) -> int | None:
        folder = self.run_folder
        if folder.name.startswith("grpo") and (folder / "metrics.jsonl").exists() and metrics(folder):
            os.kill(self.pid, signal.SIGKILL)
            assert within(10, lambda: super(KilledAfterAStep, self).poll() is not None)
            raise KeyboardInterrupt
        return super().poll()


def warm(kind: type[SweepJob]):
    def start_job(arguments: Sequence[str], environ: dict[str, str], log: Path) -> Job:
        job = kind(["-m", "megatron_eqlen.cli", *arguments], environ)
        job.run_folder = log.parent
        return job

    return start_job


def test_a_sweep_goes_on_where_it_was_killed_and_matches_what_the_reference_spent(home, trained, capsys):
    (home / "sweep.yaml").write_text(SWEEP.format(folder=home))
    plan = command.read(home / "sweep.yaml", [])
    with pytest.raises(KeyboardInterrupt):
        command.run(plan, 1, warm(KilledAfterAStep))
    eqlen, grpo = (home / f"sweep/recipe/{method}-seed0" for method in ("eqlen", "grpo"))
    ended = (eqlen / "metrics.jsonl").read_bytes()
    before = column(grpo, "loss/total")[0]

    assert command.run(command.read(home / "sweep.yaml", []), 1, warm(SweepJob)) == 0
    assert (eqlen / "metrics.jsonl").read_bytes() == ended, "a finished run is not repeated"
    assert column(grpo, "loss/total")[0] == before, "an unfinished run resumes"
    reference = column(eqlen, "total/flops")
    assert len(reference) == STEPS
    *earlier, last = column(grpo, "total/flops")
    assert max(earlier) < reference[-1] <= last, (
        "steps are no limit; the first step that reaches it is the last"
    )
    for name in ("loss/total", "reward/mean", "train/grad_norm", "total/flops"):
        assert column(eqlen, name) == column(trained, name), "the same run as alone"
    answers = [
        json.loads((run / "evaluation/after.json").read_text())[0]["answers"] for run in (eqlen, trained)
    ]
    assert answers[0] == answers[1]
    said = capsys.readouterr().out
    assert "[2/2] recipe/grpo-seed0 ended after" in said
    assert "EqLen-GRPO" in (home / "sweep/index.html").read_text()
