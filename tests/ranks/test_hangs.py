"""Provoked hangs of each kind: the run folder or the screen then says where the run hangs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_eqlen.processes.run_state import read_state
from megatron_eqlen.processes.watchdog import HUNG
from tests.kit.jobs import Job, start
from tests.kit.processes import within

BEGIN = """
import atexit, sys, threading
from pathlib import Path
from megatron_eqlen.processes import watchdog
home = Path(sys.argv[1])
dog = watchdog.Watchdog(0, 1, 1.0)
dog.start(home / "hang" / "1")
never = threading.Event().wait
"""
ENGINE = """
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.types import Prompt
from tests.kit.report_runs import recipe

class Engine:
    max_num_seqs, max_model_len, vocab_size, policy_version = 8, 300, 300, 0
    def submit(self, *_): ...
    def step(self): never()

with dog.stage("harvest"):
    prompts = [Prompt("p", [1], "", "math", "1")]
    harvest(Engine(), HarvestPlan(prompts, recipe(home), {9}, seed=0))
"""
GRADER = """
from dataclasses import replace
from megatron_eqlen.rewards.scoring import Scorer
from tests.kit.report_runs import example_group, make_tokenizer, recipe

made = recipe(home, reward={"workers": 1})
scorer = Scorer(made.reward, make_tokenizer(home), 1)
group = example_group()
group.prompt = replace(group.prompt, grader="tests.kit.rubrics:never")
for one in group.parts:
    one.grade = None
with dog.stage("score"):
    scorer.score([group], 600.0)
"""
FILE = """
import os, pathlib
os.mkfifo(home / "fifo")  # nobody writes to it: it blocks as a file on a disk that does not answer
with dog.stage("checkpoint"):
    pathlib.Path(home / "fifo").read_text()
"""
DISK = """
print("begun", flush=True)
with dog.stage("checkpoint"):
    while True:
        (home / "checkpoint").write_text("x")
        threading.Event().wait(0.02)
        watchdog.beat()
"""
KINDS = {
    "engine": (ENGINE, "in stage harvest", "megatron_eqlen/harvest/driver.py"),
    "grader": (GRADER, "in stage score", "megatron_eqlen/rewards/"),
    "file": (FILE, "in stage checkpoint", "pathlib"),
}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> Iterator[dict[str, tuple[Path, Job]]]:
    """Start all hanging jobs at once: they wait most of the time."""
    homes = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    begun = {kind: (home, start("-c", BEGIN + KINDS[kind][0], home)) for kind, home in homes.items()}
    yield begun
    for _, job in begun.values():
        job.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hang_is_told_with_its_stage_and_line(jobs, kind):
    home, job = jobs[kind]
    _, stage, place = KINDS[kind]
    assert job.wait() == HUNG, job.stderr
    (hang,) = read_state(home).hangs
    cause = hang.partition("; see ")[0]
    assert re.search(rf"rank 0 has made no progress for \d+ s {stage}", cause)
    assert place in (home / "hang/1/rank-0.txt").read_text()
    assert f"eqlen: {cause}" in job.stderr


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """Mount a file system of its own, which can be frozen."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(4 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system of a test's own needs root and a loop device: {error}")
    yield folder
    subprocess.run(["fsfreeze", "--unfreeze", folder], check=False, capture_output=True)
    assert within(
        10, lambda: subprocess.run(["umount", folder], check=False, capture_output=True).returncode == 0
    )


def test_a_disk_that_blocks_is_told_on_the_screen(disk):
    """Nothing can be written to the folder of hangs; the process ends when the disk is back at the latest."""
    job = start("-c", BEGIN + DISK, disk)
    assert within(60, lambda: "begun" in job.stdout)
    subprocess.run(["fsfreeze", "--freeze", disk], check=True)
    assert within(60, lambda: "most recent call first" in job.stderr)
    assert "in _declare" in job.stderr
    subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
    assert job.wait() == 1
