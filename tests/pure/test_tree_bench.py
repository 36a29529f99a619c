"""The benchmarks count what they say they count."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest
import torch

from megatron_eqlen.rollout.recorder import read_step
from tests.kit.report_runs import example_stream, prompt
from tools.benchmarks import host, packing, run_commands, trees
from tools.benchmarks.scripted import ScriptedEngine


def run(benchmark, tmp_path, *options: str) -> list[dict]:
    file = tmp_path / "results.json"
    threads = torch.get_num_threads()
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    benchmark.run(parser.parse_args([*options, "--json", str(file)]))
    torch.set_num_threads(threads)
    return json.loads(file.read_text(encoding="utf-8"))["results"]


def test_trees_against_2n_and_n_plus_1(tmp_path, capsys):
    small = ["--hidden", "64", "--layers", "1", "--vocabulary", "64", "--repeat", "1"]
    case = ["--pairs", "3", "--prompts", "11", "--segment", "5", "--lengths", "equal"]
    results = run(trees, tmp_path, *small, *case)
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


def test_what_context_parallel_ranks_send_of_a_trunk_with_leaves(tmp_path):
    """Two ranks of a row whose leaves are as long as its trunk: never more than everything."""
    case = ["--pairs", "6", "--prompts", "128", "--segment", "500", "--context", "2", "--dtype", "bfloat16"]
    for result in run(trees, tmp_path, *case):
        assert result["all_gather_MB"] == result["positions"] / 2 * 2 * 2 * 64 * 2 / 1e6
        assert 0 < result["of_all_gather"] < 0.8
        assert result["received_MB"] <= result["all_gather_MB"]
        assert 1 <= result["area_max/mean"] < 1.15


def test_packing_of_simulated_streams(tmp_path):
    small = ["--streams", "40", "--data-parallel", "2", "--limit", "400", "--prompt", "100"]
    for result in run(packing, tmp_path, *small, "--medians", "60", "--repeat", "1"):
        assert 0.9 < result["fill"] <= 1
        assert 1 <= result["max/mean cost"] < 1.2
        assert result["expanded/tree"] > 1


def test_the_host_benchmark_shows_a_quadratic_cost_as_one_and_projects_the_largest_size():
    sizes = [host.Size(tokens, {"trees": tokens**2}) for tokens in (10, 40, 160)]
    assert host.line("trees", sizes)["growth"] == pytest.approx(2)
    assert host.line("trees", sizes)["s at the paper's size"] == pytest.approx(160 * host.STEP_TOKENS)


def test_the_run_that_commands_are_measured_on_has_two_recorded_steps_of_the_size_asked_for(tmp_path):
    rollouts = [example_stream(), replace(example_stream(), prompt=prompt(5))]
    size = sum(len(segment) for rollout in rollouts for segment in rollout.segments())
    run_commands.record_steps(tmp_path, rollouts, tokens=3 * size)
    for step in ("step-00000000", "step-00000499"):
        found = read_step(tmp_path / step)
        assert sum(len(segment) for rollout in found for segment in rollout.segments()) == 3 * size
        assert len({rollout.prompt_id for rollout in found}) == 6


def test_no_two_requests_of_the_scripted_engine_tell_the_same_story():
    """Else a record of them is smaller than one of a model's tokens."""
    engine = ScriptedEngine(median=300, prompt=1, kept=3)
    for seed in range(4):
        engine.submit(str(seed), [1], 100, seed)
    texts = {name: [] for name in engine.requests}
    for _ in range(50):
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
            (mask,) = delta.sampling_mask
            assert delta.token_ids[0] in mask
            assert list(mask) == sorted(set(mask))
    windows = [tuple(text[at : at + 8]) for text in texts.values() for at in range(len(text) - 7)]
    assert len(set(windows)) == len(windows) > 100
