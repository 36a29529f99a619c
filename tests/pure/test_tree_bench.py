"""The benchmarks' counts are right."""

from __future__ import annotations

import argparse
import sys

import pytest
import torch

from megatron_eqlen.engines.protocol import Request
from tests.kit.marks import EACH_WEEK
from tests.kit.tree_samples import pack
from tools import bench
from tools.benchmarks import clock, gpu, scale, trees
from tools.benchmarks.scripted import ScriptedEngine


def run(benchmark, *options: str) -> list[dict]:
    threads = torch.get_num_threads()
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    try:
        return benchmark.run(parser.parse_args(options))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("words", "said"), [
    ("trees --pairs 3 0", "argument --pairs: expected a number from 1 on, found 0"),
    ("gpu --head-dims -1", "argument --head-dims: expected a number from 1 on, found -1"),
    ("servers --kept 0 -1", "argument --kept: expected a number from 0 on, found -1"),
    ("scale --gpus 8 7", "argument --gpus: expected a multiple of 8, found 7"),
])  # fmt: skip
def test_a_number_that_nothing_can_be_measured_with_is_named(capsys, monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    with pytest.raises(SystemExit):
        bench.main()
    assert capsys.readouterr().err.endswith(f"error: {said}\n")


def test_trees_against_2n_and_n_plus_1(capsys):
    small = ["--hidden", "64", "--layers", "1", "--vocabulary", "64", "--repeat", "1"]
    case = ["--pairs", "3", "--prompts", "11", "--segment", "5", "--lengths", "equal"]
    results = run(trees, *small, *case)
    prompt, segment = 10, 5
    forks = [prompt + i * segment for i in range(3)]
    tokens = {
        "tree": prompt + 6 * segment,
        "2N": sum(2 * (fork + segment) for fork in forks),
        "N+1": prompt + 3 * segment + sum(fork + segment for fork in forks),
    }
    assert {result["layout"]: result["tokens"] for result in results} == tokens
    for result in results:
        assert result["token_ratio"] == pytest.approx(tokens[result["layout"]] / tokens["tree"])
        assert result["efficiency"] == pytest.approx(result["speedup"] / result["token_ratio"])
    assert "N+1" in capsys.readouterr().out


@pytest.mark.parametrize(("pairs", "bound"), [(6, 0.88), (12, 0.84)])
def test_the_bound_of_trees_against_2n_is_what_a_hand_finds(pairs, bound):
    """The closed form in ``trees``' docstring leaves out half a token of each query in its pairs."""
    parser = argparse.ArgumentParser()
    trees.add_arguments(parser)
    args = parser.parse_args([])
    model, prompt, side = trees.model_config(args), 1024, 100
    hidden, width = args.hidden, args.hidden * 3
    a = 2 * (hidden * (2 * hidden + 2 * hidden // 4) + 3 * hidden * width)
    c, h = 2 * hidden, args.hidden * args.vocabulary
    numbers = range(1, pairs + 1)
    tokens = prompt + 2 * pairs * side, sum(2 * (prompt + i * side) for i in numbers)
    seen = (
        prompt**2 / 2 + sum(2 * side * (prompt + (i - 0.5) * side) for i in numbers),
        sum((prompt + i * side) ** 2 for i in numbers),
    )
    flops = [2 * a * t + 4 * c * s + 2 * h * 2 * pairs * side for t, s in zip(tokens, seen, strict=True)]
    by_hand = flops[1] / flops[0] / (tokens[1] / tokens[0])
    made = [trees.stream(pairs, prompt, False, side, args.vocabulary)]
    rows = [pack(made, 1 << 20, layout=layout)[0] for layout in ("tree", "expanded")]
    found = [sum(trees.forward_flops(row, model) for row in each) for each in rows]
    counted = [sum(row.num_tokens for row in each) for each in rows]
    assert found[1] / found[0] / (counted[1] / counted[0]) == pytest.approx(by_hand, rel=2e-3)
    assert by_hand == pytest.approx(bound, abs=5e-3)


@EACH_WEEK
def test_what_rank_0_gets_grows_with_the_gpus_and_what_it_makes_does_not():
    options = ["--median", "60", "--limit", "96", "--shorter", "4", "--replicas", "1", "--requests"]
    few, many = run(scale, "--gpus", "8", "16", *options)
    growth = {name: many["sizes"][name] / few["sizes"][name] for name in few["sizes"]}
    for name in ("million tokens", "MB of prompts", "MB of skeletons"):
        assert growth[name] == pytest.approx(2, rel=0.1), name
    assert growth["MB recorded"] == pytest.approx(1, rel=0.1)


def test_what_rank_0_does_is_measured_with_sampling_masks_too():
    options = ["--median", "40", "--limit", "64", "--shorter", "4", "--replicas", "1", "--requests"]
    sizes = run(scale, "--gpus", "8", "--kept", "3", *options)[0]["sizes"]
    # the masks of trained tokens have been received: ids and log-probs alone have less than 4 bytes a token
    assert sizes["MB exchanged"] > 6 * sizes["million tokens"] > 0


def test_no_two_requests_of_the_scripted_engine_tell_the_same_story():
    """Otherwise a record of them would be smaller than one of a model's tokens."""
    engine = ScriptedEngine(median=300, prompt=1, kept=3)
    for seed in range(4):
        engine.submit(Request(str(seed), [1], 100, seed))
    texts = {name: [] for name in engine.requests}
    for _ in range(50):
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
            (mask,) = delta.columns["kept"]
            assert delta.token_ids[0] in mask
            assert list(mask) == sorted(set(mask))
    windows = [tuple(text[at : at + 8]) for text in texts.values() for at in range(len(text) - 7)]
    assert len(set(windows)) == len(windows) > 100


SMALL = ["--positions", "256", "--pairs", "3", "--head-dims", "16", "--hidden", "64", "--layers", "1"]
SMALL += ["--vocabulary", "64", "--matrix", "32", "--dtype", "float32", "--repeat", "1"]


def test_parts_of_a_step_are_measured_against_what_their_mathematics_takes(monkeypatch):
    """A GPU has larger parts. Here: 3 pairs of sides of 32 tokens, and the used part of the prompt of 64."""
    monkeypatch.setattr(gpu, "DELTA_HEADS", 2)
    monkeypatch.setattr(gpu, "DELTA_DIM", 16)
    monkeypatch.setattr(gpu, "matrix_product", lambda args: 2e12)
    results = {result["part"]: result for result in run(gpu, *SMALL)}
    prompt, side = 63, 32
    pairs = prompt * (prompt + 1) / 2
    pairs += sum(2 * (side * (prompt + i * side) + side * (side + 1) / 2) for i in range(3))
    flops = {
        "attention, heads of 16": 3.5 * 4 * 8 * 16 * pairs,
        "delta rule": 3 * 8 * 2 * 16 * 16 * 256,
        "head and loss": 3 * 2 * 256 * 64 * 64,
    }
    for part, expected in flops.items():
        seconds = (results[part]["forward_ms"] + results[part]["backward_ms"]) / 1e3
        assert results[part]["TFLOP/s"] * 1e12 * seconds == pytest.approx(expected)
        assert results[part]["positions"] == 256
    assert results["head and loss"]["of_yardstick"] == pytest.approx(results["head and loss"]["TFLOP/s"] / 2)
    none, full = (results[f"layers, recompute {recompute}"] for recompute in ("none", "full"))
    work = [result["TFLOP/s"] * (result["forward_ms"] + result["backward_ms"]) for result in (none, full)]
    assert work[0] == pytest.approx(work[1]), "recomputed work does not count"


def test_a_gpus_work_counts_in_the_call_that_asks_for_it(monkeypatch):
    """A GPU works on after a call has returned: a slow first call does not lengthen the one that counts."""
    now, queued = 0.0, [100.0, 1.0]

    def synchronize() -> None:
        nonlocal now
        now, pending[:] = now + sum(pending), []

    pending: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    assert clock.fastest(lambda: pending.append(queued.pop(0)), 1) == 1.0
