"""Output of a recipe's ``profile``: traces, snapshots of a GPU's memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_eqlen.recipe import ProfileRecipe
from megatron_eqlen.training import profiler
from megatron_eqlen.training.profiler import Profiler, snapshot_when_out_of_memory


def test_a_trace_is_of_the_recipes_steps_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler.dist, "get_rank", lambda: 0)
    tracer = Profiler(tmp_path, ProfileRecipe(steps=[2]))
    for step in (1, 2, 3):
        tracer.begin(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(3).sum()
        tracer.end(step)
    (file,) = tmp_path.iterdir()
    assert file.name == "step-00000002-rank-0.json.gz"
    with gzip.open(file, "rt") as trace:
        events = json.load(trace)["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "user_annotation"] == ["step 2"]


class Memory:
    """torch.cuda.memory, without a GPU."""

    def __init__(self) -> None:
        self.recording = False

    def _record_memory_history(self, enabled: str | None = "all", **options: object) -> None:
        self.recording = enabled is not None

    def _dump_snapshot(self, path: str) -> None:
        assert self.recording
        Path(path).touch()


def test_a_trace_that_was_cut_off_while_it_was_written_is_none(tmp_path, monkeypatch):
    class Cut:
        def stop(self) -> None: ...

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text("{")
            assert not list(tmp_path.glob("*.json.gz"))
            raise KeyboardInterrupt

    monkeypatch.setattr(profiler.dist, "get_rank", lambda: 0)
    tracer = Profiler(tmp_path, ProfileRecipe(steps=[2]))
    tracer._profile = Cut()
    with pytest.raises(KeyboardInterrupt):
        tracer.end(2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "left"), [(torch.OutOfMemoryError, True), (RuntimeError, False)])
def test_memory_that_runs_out_leaves_a_snapshot_and_the_error(tmp_path, monkeypatch, error, left):
    memory = Memory()
    monkeypatch.setattr(torch.cuda, "memory", memory)
    monkeypatch.setattr(profiler.dist, "get_rank", lambda: 3)
    with pytest.raises(error, match="tried to allocate"), snapshot_when_out_of_memory(tmp_path / "profile"):
        raise error("tried to allocate 2 GiB")
    assert [path.name for path in tmp_path.glob("*/*")] == ["out-of-memory-rank-3.pickle"] * left
    assert not memory.recording


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpus_snapshot_holds_what_was_allocated(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(torch.OutOfMemoryError), snapshot_when_out_of_memory(tmp_path):
        torch.empty(2**50, device="cuda")
    assert (tmp_path / "out-of-memory-rank-0.pickle").stat().st_size > 0
