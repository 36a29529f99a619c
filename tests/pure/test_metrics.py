"""Metrics are merged as declared beside their name, and no name is undeclared."""

import ast
import itertools
import math
import mmap
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.harvest.meter import rollout_metrics
from megatron_eqlen.metrics import DECLARED, MetricError, at_once, check, counts, in_turn, metric, over_ranks
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.training import peak_memory
from megatron_eqlen.types import Part, Prompt, Rollout
from tests.kit import ROOT

STAGES = {declared.name.split("/")[0] for declared in DECLARED} - {"evaluation"}


def segment(length: int, finish_reason: str | None = "stop", given: int = 0) -> Part:
    """Return a part whose last ``given`` tokens are of an environment, and all of which have a mask."""
    columns = {"given": [[]] * (length - given) + [[0]] * given, "kept": [[1] * (length + 1)] * length}
    return Part(Tokens.of(list(range(length)), [0.0] * length, **columns), finish_reason)


names = map(str, itertools.count())


def prompt() -> Prompt:
    return Prompt(next(names), [1, 2, 3], "", "", "")


def stream(*lengths: int) -> Rollout:
    pairs = [(segment(length, given=length // 2), segment(length, None, length // 2)) for length in lengths]
    return kit.stream(prompt(), 0, 0, pairs, "truncated", segment(3, "length", given=1))


def group(lengths: list[int]) -> Rollout:
    return kit.group(prompt(), 0, [segment(n, "stop" if n % 2 else "length", n // 2) for n in lengths])


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
streams = (lengths | st.just([])).map(lambda lengths: stream(*lengths))
rollouts = st.lists(streams, max_size=5) | st.lists(lengths.map(group), max_size=5)


@given(rollouts, st.integers(0, 5))
def test_two_replicas_together_report_what_one_would(rollouts, cut):
    """The merge covers sums, maxima, and means of any count, wherever the rollouts are divided."""
    parts = [rollout_metrics(rollouts[:cut]), rollout_metrics(rollouts[cut:])]
    for merge in (at_once, in_turn):
        assert merge(parts) == pytest.approx(rollout_metrics(rollouts))


def test_routes_are_counted_of_prompts_too():
    """Each token has the numbers of 2 experts in each of 5 layers, a byte each."""
    prefix, tokens = (Tokens.of([1] * count, routes=np.zeros((count, 5, 2), np.uint8)) for count in (3, 4))
    rollout = kit.group(prompt(), 0, [Part(tokens, "stop")], prompt_columns=prefix)
    assert rollout_metrics([rollout])["harvest/route_bytes"] == (3 + 4) * 5 * 2
    assert "harvest/route_bytes" not in rollout_metrics([group([4])])


def test_the_slowest_rank_of_each_stage_is_named_and_the_most_memory_counts():
    ranks = [
        {"time/train": 2.0, "time/sync": 5.0, "memory/peak/train": 7.0, "loss/total": 1.0},
        {"time/train": 3.0, "time/sync": 4.0, "memory/peak/train": 4.0, "memory/reserved/train": 9.0},
    ]
    assert over_ranks(ranks) == {
        "memory/peak/train": 7.0, "memory/reserved/train": 9.0, "time/slowest/train": 3.0,
        "time/slowest_rank/train": 1.0, "time/slowest/sync": 5.0, "time/slowest_rank/sync": 0.0,
    }  # fmt: skip
    assert over_ranks(ranks[:1]) == {"memory/peak/train": 7.0}, "alone, no rank is the slowest"
    assert check(over_ranks(ranks))


def test_a_stage_that_needs_memory_is_seen_to_and_the_next_begins_anew():
    peak_memory.begin()
    # pages of its own: a buffer may fit into memory that the heap already has, and add nothing
    mmap.mmap(-1, 96 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()
    with_buffer = peak_memory.measured("train")["memory/peak/train"]
    peak_memory.begin()
    assert with_buffer - peak_memory.measured("train")["memory/peak/train"] > 64 << 20


def test_a_gpu_without_memory_says_who_holds_it_beside_the_plan_and_which_keys_need_less(monkeypatch):
    for name, answer in {
        "is_available": True, "mem_get_info": (2e9, 80e9), "memory_allocated": 50e9, "memory_reserved": 60e9,
        "max_memory_allocated": 55e9, "max_memory_reserved": 61e9,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    text = peak_memory.shortage("train", {"train": 70e9})
    assert text.startswith("stage train, for which the plan counts 70.0: 78.0 of 80.0 GB are in use; PyTo")
    assert "reserved 60.0, of which tensors hold 50.0" in text
    assert "packing.max_tokens_per_row" in text
    measured = peak_memory.measured("train", {"train": 70e9})
    assert measured.keys() == {f"memory/{kind}/train" for kind in ("peak", "reserved", "device", "planned")}
    assert (measured["memory/device/train"], measured["memory/planned/train"]) == (78e9, 70e9)
    assert check(measured)


def test_keys_that_need_less_memory_are_keys_of_a_recipe():
    keys = [key for text in peak_memory.LESS.values() for key in re.findall(r"[a-z_]+\.[a-z_]+", text)]
    for key in keys:
        section, name = key.split(".")
        assert name in getattr(Recipe.model_fields[section].annotation, "model_fields", ()), key


def test_what_covers_the_whole_run_is_the_newest():
    parts = [{"data/prompts_drawn": 8.0, "data/source/sums/epochs": 0.5}, {"data/prompts_drawn": 16.0}]
    assert at_once(parts) == in_turn(parts) == {"data/prompts_drawn": 16.0, "data/source/sums/epochs": 0.5}


def test_maxima_are_not_averaged():
    parts = [{"objective/segment_length_max": 3.0}, {"objective/segment_length_max": 9.0}]
    assert at_once(parts) == in_turn(parts) == {"objective/segment_length_max": 9.0}


def test_seconds_overlap_at_once_and_add_up_in_turn():
    parts = [
        {"harvest/seconds": 1.0, "harvest/generated_tokens": 100, "harvest/tokens_per_second": 100.0},
        {"harvest/seconds": 3.0, "harvest/generated_tokens": 60, "harvest/tokens_per_second": 20.0},
    ]
    assert at_once(parts) == {
        "harvest/seconds": 3.0, "harvest/generated_tokens": 160, "harvest/tokens_per_second": 120.0,
    }  # fmt: skip
    assert in_turn(parts) == {
        "harvest/seconds": 4.0, "harvest/generated_tokens": 160, "harvest/tokens_per_second": 40.0,
    }  # fmt: skip


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
@pytest.mark.parametrize("name", ["loss/ratio_max", "loss/policy", "train/lr", "engine/live_replicas"])
def test_no_merge_loses_a_nan(name, values):
    for merge in (at_once, in_turn):
        assert math.isnan(merge([{name: value} for value in values])[name])


def test_an_undeclared_name_is_an_error_that_names_the_nearest():
    with pytest.raises(
        MetricError, match=r"'harvest/pair' is not declared in metrics.yaml .*nearest: 'harvest/pairs'"
    ):
        check({"harvest/pairs": 1.0, "harvest/pair": 1.0})
    assert counts(metric("reward/source/a/b/mean").merge) == ["reward/source/a/b/ended"]


def test_every_weight_is_itself_a_declared_sum_and_every_other_way_is_known():
    for way in {way for declared in DECLARED for way in (declared.merge, declared.in_turn)}:
        assert counts(way) or way in ("sum", "max", "min", "last"), way
        for count in counts(way.replace("*", "any")):
            assert "sum" in (metric(count).merge, metric(count).in_turn), count


def test_every_name_in_the_package_is_declared():
    """A report that looks for a metric that nobody writes would silently show nothing."""
    for path in (ROOT / "megatron_eqlen").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_name(node.value):
                assert metric(node.value).unit, f"{path}:{node.lineno}"


def is_name(text: str) -> bool:
    stage, slash, rest = text.partition("/")
    return stage in STAGES and bool(slash) and rest.isidentifier()
