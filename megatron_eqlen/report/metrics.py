"""A step's metrics on disk: ``metrics.jsonl`` (one line a step), TensorBoard, and wandb where asked.

A line is handed to the operating system whole, in one write: a process killed at any moment leaves at most
one torn last line. A run that resumes at an earlier step takes back the lines and events after it, so no
step appears twice.
"""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from megatron_eqlen.types import Metrics

FILE = "metrics.jsonl"

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes into a run folder; rank 0 has one.

    ``step`` is the number of steps that the run has behind it: what was written after it is cut off.
    Raises ValueError if ``wandb_project`` is given and wandb is not installed.
    """

    def __init__(
        self, folder: Path, step: int = 0, wandb_project: str | None = None, run_name: str = ""
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import; reading needs no TensorBoard

        folder.mkdir(parents=True, exist_ok=True)
        self.wandb = _start_wandb(folder, wandb_project, run_name) if wandb_project else None
        _cut_after(folder / FILE, step)
        self.file = open(folder / FILE, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self.tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of ``step`` (counted from 1). What is no finite number becomes null."""
        now = time.time()
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = memoryview(json.dumps({"step": step, "time": now, **finite}).encode() + b"\n")
        while line:  # a full disk raises; a signal may shorten a write
            line = line[self.file.write(line) :]
        for name, value in metrics.items():
            self.tensorboard.add_scalar(name, value, step, walltime=now)
        self.tensorboard.flush()
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)

    def close(self) -> None:
        self.file.close()
        self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


def read_metrics(folder: Path) -> list[dict[str, float | None]]:
    """One dict a step with ``step``, ``time`` (Unix seconds) and the metrics; empty without the file.

    A torn last line is left out with a warning. Raises ValueError with file and line for anything else
    that is no record of a step.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        logger.warning("%s: dropped a torn last line of %d bytes", path, len(data) - len(complete))
    return [_record(line, f"{path}:{number}") for number, line in enumerate(complete.splitlines(), 1)]


def _record(line: bytes, where: str) -> dict[str, float | None]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or "step" not in record:
        raise ValueError(f"{where}: expected a JSON object with a step, found {line[:80]!r}")
    return record


def _cut_after(path: Path, step: int) -> None:
    """Keep the records up to ``step``; the file is replaced whole, so a crash leaves the old or the new."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path.parent) if record["step"] <= step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    partial.replace(path)


def _start_wandb(folder: Path, project: str, run_name: str) -> Any:
    """The wandb run of this folder: a new one, or the one that an earlier start made."""
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f"report.wandb_project: {project!r} needs wandb, which is not installed (pip install wandb)"
        ) from None
    id_file = folder / "wandb_id"
    if not id_file.exists():
        id_file.write_text(wandb.util.generate_id(), encoding="utf-8")
    run_id = id_file.read_text(encoding="utf-8").strip()
    return wandb.init(project=project, name=run_name or None, dir=str(folder), id=run_id, resume="allow")
