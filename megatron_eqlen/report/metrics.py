"""Metrics on disk: one JSON line a step, TensorBoard, and wandb where a recipe asks for it.

``metrics.jsonl`` is the record; TensorBoard's files are a picture of it and are drawn anew when a run resumes.
So a step that was taken again after a crash appears once in both.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_eqlen.types import Metrics

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes steps ``resumed_at + 1`` and on into ``folder``; what an earlier attempt wrote of them goes.

    ``resumed_at`` is the number of steps behind the checkpoint that the run goes on from.
    """

    def __init__(self, folder: Path, resumed_at: int = 0, wandb_project: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [record for record in read_metrics(path) if record["step"] <= resumed_at]
        _replace(path, kept)
        self._file = path.open("a", encoding="utf-8")
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"))
        for record in kept:
            self._draw(record)
        self._wandb = start_wandb(wandb_project, folder) if wandb_project else None

    def write(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of ``step``. A value that is no finite number is written as null."""
        record = {"step": step, "wall_time": time.time()}
        record |= {name: _finite(value) for name, value in sorted(metrics.items())}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self._draw(record)
        self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _draw(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name not in ("step", "wall_time") and value is not None:
                self._tensorboard.add_scalar(name, value, record["step"], walltime=record["wall_time"])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, none if there is no file. A torn last line is left out.

    Raises ValueError with file and line for any other line that is not a record.
    """
    if not path.exists():
        return []
    complete, _, torn = path.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        logger.warning("%s: dropped a torn last line", path)
    records = []
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number}: expected a JSON record, found {line[:80]!r} ({error})"
            ) from None
        if not isinstance(record, dict) or "step" not in record:
            raise ValueError(f"{path}:{number}: expected a record with a step, found {line[:80]!r}")
        records.append(record)
    return records


def start_wandb(project: str, folder: Path) -> Any:
    """A wandb run named like ``folder``, which a resumed run continues. Raises ValueError without wandb."""
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f"report.wandb_project: {project!r} needs the wandb package, which is not installed"
        ) from None
    name = "-".join(folder.parts[-2:])
    return wandb.init(project=project, id=name, name=name, dir=str(folder), resume="allow")


def _replace(path: Path, records: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    partial.replace(path)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
