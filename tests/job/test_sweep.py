"""A real sweep: killed in the middle it resumes, and each of its runs equals that of `eqlen train`."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_eqlen.cli import sweep as command
from megatron_eqlen.experiments import runner
from tests.kit.jobs import Job
from tests.kit.train_runs import STEPS, column

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


ENDS_AFTER_A_STEP = """
import os, signal, sys
from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.report.metrics import MetricsWriter
write = MetricsWriter.write
def write_and_end(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
MetricsWriter.write = write_and_end
sys.exit(main())
"""
"""``eqlen`` that is killed when its run has taken a step."""


def start_job(arguments: Sequence[str], environ: dict[str, str], log: Path) -> Job:
    return Job(["-m", "megatron_eqlen.cli", *arguments], environ)


def start_job_and_kill_grpo(arguments: Sequence[str], environ: dict[str, str], log: Path) -> Job:
    """End the sweep, as Ctrl-C does, when GRPO's run has taken its first step."""
    if not log.parent.name.startswith("grpo"):
        return start_job(arguments, environ, log)
    assert Job(["-c", ENDS_AFTER_A_STEP, *arguments], environ).wait() == -signal.SIGKILL
    raise KeyboardInterrupt


def test_a_sweep_continues_where_it_was_killed_and_matches_what_the_reference_spent(
    home, trained, capsys, monkeypatch
):
    (home / "sweep.yaml").write_text(SWEEP.format(folder=home))
    plan = command.read(home / "sweep.yaml", [])
    monkeypatch.setattr(runner, "start_process", start_job_and_kill_grpo)
    with pytest.raises(KeyboardInterrupt):
        command.run(plan, 1)
    eqlen, grpo = (home / f"sweep/recipe/{method}-seed0" for method in ("eqlen", "grpo"))
    ended = (eqlen / "metrics.jsonl").read_bytes()
    before = column(grpo, "loss/total")[0]

    monkeypatch.setattr(runner, "start_process", start_job)
    assert command.run(command.read(home / "sweep.yaml", []), 1) == 0
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
    assert "EqLen-GRPO" in (home / "sweep/tables.md").read_text()
