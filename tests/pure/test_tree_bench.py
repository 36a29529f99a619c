"""The benchmarks count what they say they count."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from tools.benchmarks import host, packing, trees


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
