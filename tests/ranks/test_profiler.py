"""Output of a recipe's ``profile``: traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron_eqlen.recipe import ProfileRecipe
from megatron_eqlen.training import profiler
from megatron_eqlen.training.profiler import Profiler


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
