"""``eqlen check``: every state of every check, on simulated machines, and the checks that count for a recipe.
``tests/job`` checks this machine."""

from __future__ import annotations

import re
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from subprocess import TimeoutExpired
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer

from megatron_eqlen.check import CHECKS, check, look, machine, software
from megatron_eqlen.check.finding import Check, Finding, Place
from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.environments.environment import Environment, Observation
from megatron_eqlen.graders.sandbox.probe import find_python
from megatron_eqlen.graders.sandbox.program import Isolation
from megatron_eqlen.hf.folder import WeightsError
from megatron_eqlen.job import Job, load
from megatron_eqlen.megatron_cpu import packages
from megatron_eqlen.plan.memory import memory
from megatron_eqlen.recipe import RecipeError
from tests.kit import ROOT
from tests.kit.tiny_models import save_tiny
from tools.tokenizer_maker import write_hf_tokenizer

LARGE = ROOT / "recipes/qwen3_32b.yaml"


@pytest.fixture
def large(tmp_path) -> Place:
    """Return a run on 8 GPUs of 80 GB, in a folder of its own."""
    return Place(Job(load(LARGE, [f"run_dir={tmp_path}/run"])), tmp_path / "run", short=False)


@pytest.fixture
def anywhere(tmp_path) -> Place:
    return Place(None, tmp_path, short=False)


def with_recipe(place: Place, *overrides: str) -> Place:
    return Place(Job(load(LARGE, overrides)), place.folder, place.short)


def gpus(monkeypatch, count: int, free_gib: float = 79.0, gib: float = 79.6, computes: float = 64.0) -> None:
    """Simulate that many GPUs on this machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    sizes = (int(free_gib * 2**30), int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: sizes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="H100"))
    monkeypatch.setattr(machine, "multiplied", lambda device: computes)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Echo(Environment):
    def step(self, message):
        return Observation(message)

    def grade(self):
        return 0.5


class Alone(Echo):
    def fork(self):
        return None


class Deaf(Echo):
    def step(self, message):
        return message


# ---- the command -------------------------------------------------------------------------------------


def said(state: str, *, needed: bool = True, in_short: bool = True) -> Check:
    finding = Finding(state, "as found", "do this")  # type: ignore[arg-type]
    return Check(f"a {state} thing", lambda place: finding, lambda place: needed, in_short)


def test_the_status_is_1_only_if_something_needed_is_missing_or_fails(capsys):
    fine = [said("ok"), said("slow"), said("missing", needed=False), said("failed", needed=False)]
    assert check(None, checks=fine) == 0
    printed = capsys.readouterr().out
    assert "missing  a missing thing     as found (not needed here) -> do this\n" in printed
    assert printed.endswith(": ready for what every run needs\n")
    for state in ("missing", "failed"):
        assert check(None, checks=[*fine, said(state)]) == 1
        assert f"NOT READY for what every run needs: a {state} thing" in capsys.readouterr().out


def test_in_short_what_is_slow_to_find_out_is_left_out_and_only_troubles_are_printed(capsys):
    assert check(None, True, [said("ok"), said("slow"), said("failed", in_short=False)]) == 0
    slow, last = capsys.readouterr().out.splitlines()
    assert slow.startswith("slow")
    assert last == f"{socket.gethostname()}: ready for what every run needs"


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"), RuntimeError("NCCL error"), TimeoutExpired("nvidia-smi", 30),
])  # fmt: skip
def test_a_check_that_breaks_is_a_finding(anywhere, error):
    def breaks(place: Place) -> Finding:
        raise error

    found = finding(look(Check("it", breaks), anywhere))
    assert found.state == "failed"
    assert str(error) in found.text


def test_a_check_that_hangs_is_named_while_it_does(anywhere, monkeypatch, capsys):
    monkeypatch.setattr("megatron_eqlen.check.PATIENCE", 0)
    said: list[str] = []

    def hangs(place: Place) -> Finding:
        while not said:
            said.extend(filter(None, [capsys.readouterr().out]))
        return Finding("ok", "there")

    look(Check("it", hangs), anywhere)
    assert re.fullmatch(r"slow +it +not done after 0 s\n", said[0])


def test_warnings_of_libraries_are_not_shown(anywhere, recwarn):
    def warns(place: Place) -> Finding:
        warnings.warn("Transformer Engine is not installed", stacklevel=1)
        return Finding("ok", "there")

    assert look(Check("it", warns), anywhere) == Finding("ok", "there")
    assert not recwarn.list


def test_a_recipe_for_gpus_is_not_ready_without(no_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", str(LARGE), "--short", "cluster.nodes=1"]) == 1
    printed = capsys.readouterr().out
    assert "missing  gpus " in printed
    assert "cluster.device=cpu" in printed
    assert "failed   inputs              RecipeError: model.path: models/Qwen3-32B does not exist" in printed
    assert re.search("NOT READY for qwen3_32b: inputs,.* gpus", printed)
    assert cli.main(["check", str(LARGE), "cluster.device=cpu", "cluster.nodes=1"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("models/Qwen3-32B") == 1, (
        "what is missing is said once, not by all that would read it"
    )
    assert "NOT READY for qwen3_32b: inputs\n" in printed


# ---- software ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("installed", "fault", "state"), [
    (True, "", "ok"), (False, "not installed", "missing"), (True, "OSError: libcudart", "failed"),
])  # fmt: skip
def test_a_package_is_there_absent_or_broken(anywhere, monkeypatch, installed, fault, state):
    found = packages.PackageState(packages.TRANSFORMER_ENGINE, "2.1", installed, fault)
    monkeypatch.setattr(packages, "find", lambda package: found)
    told = finding(software.package(packages.TRANSFORMER_ENGINE, anywhere))
    assert (told.state, told.todo) == (state, "" if state == "ok" else packages.TRANSFORMER_ENGINE.without)


def test_transformer_engine_is_needed_where_the_optimizers_state_is_in_bfloat16(large):
    (item,) = [item for item in CHECKS if item.name == "transformer_engine"]
    precise = ("optimizer.offload=false", "optimizer.precision=bfloat16")
    assert (item.needed(large), item.needed(with_recipe(large, *precise))) == (False, True)


def test_fla_is_only_looked_for_where_the_model_has_what_it_computes(large):
    assert software.package(packages.FLA, large) is None
    hybrid = Place(Job(load(ROOT / "recipes/qwen3_next_80b.yaml")), large.folder, short=True)
    assert software.package(packages.FLA, hybrid) is not None


@pytest.mark.parametrize(("isolation", "state"), [
    ((True, True, False), "ok"), ((False, True, True), "missing"),
])  # fmt: skip
def test_the_sandbox_is_tried_where_answers_are_programs(large, anywhere, monkeypatch, isolation, state):
    monkeypatch.setattr(software, "offered_isolation", lambda python: Isolation(*isolation))
    monkeypatch.setattr(software, "find_python", str)
    found = finding(software.sandbox(anywhere))
    assert found.state == state
    (item,) = [item for item in CHECKS if item.name == "code sandbox"]
    code = with_recipe(large, "data.sources.0.grader=code")
    assert software.sandbox(code) == found
    assert item.needed(code)
    relaxed = with_recipe(large, "data.sources.0.grader=code", "reward.code_sandbox=best_effort")
    assert not item.needed(relaxed)


def test_a_recipe_that_runs_programs_needs_their_python(large, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    find_python.cache_clear()
    checks = [entry for entry in CHECKS if entry.name == "code python"]
    code = with_recipe(large, "data.sources.0.grader=code")
    assert check(code.job, short=True, checks=checks) == 1
    assert "reward.code_python: expected CPython 3.11" in (told := capsys.readouterr().out)
    assert "tools/setup programs" in told
    own = with_recipe(large, "data.sources.0.grader=code", f"reward.code_python={sys.executable}")
    assert check(own.job, short=True, checks=checks) == 0


# ---- GPUs --------------------------------------------------------------------------------------------


GPUS = {
    "counted": (machine.gpus, {"count": 8}, "ok", "8 x H100"),
    "too few": (machine.gpus, {"count": 4}, "failed",
     "4 GPUs for 8 processes a node (cluster.processes_per_node)"),
    "one that computes nonsense": (machine.gpus, {"count": 8, "computes": float("nan")}, "failed",
     "GPU 0 computes nan for 64 (leave the node out; nvidia-smi -q)"),
    "memory for the plan": (machine.gpu_memory, {"count": 8}, "ok", ""),
    "memory that others hold": (machine.gpu_memory, {"count": 8, "free_gib": 20}, "failed",
     "(nvidia-smi shows which processes have the rest)"),
    "too little memory": (machine.gpu_memory, {"count": 8, "free_gib": 39, "gib": 40}, "failed",
     "of 40.8 GB usable"),
}  # fmt: skip


@pytest.mark.parametrize("case", GPUS)
def test_gpus_are_counted_compute_and_hold_the_plan(large, monkeypatch, case):
    check_of_it, there, state, text = GPUS[case]
    gpus(monkeypatch, **there)
    found = finding(check_of_it(large))
    assert found.state == state
    assert text in f"{found.text} ({found.todo})"


def test_without_a_recipe_gpus_are_counted_and_for_cpus_their_memory_is_said(large, anywhere, monkeypatch):
    gpus(monkeypatch, 4)
    assert machine.gpus(anywhere).state == "ok"
    gpus(monkeypatch, 8, free_gib=39, gib=40)
    elsewhere = finding(machine.gpu_memory(with_recipe(large, "cluster.device=cpu")))
    assert (elsewhere.state, elsewhere.text) == ("ok", "41.9 GB free of 42.9 GB")


def test_servers_that_would_not_fit_on_these_gpus_may_be_on_others(large, monkeypatch):
    gpus(monkeypatch, 8)
    server = ["rollout.engine=server", "rollout.servers=[http://a:1]", "rollout.gpu_memory_utilization=0.99"]
    served = with_recipe(large, *server)
    assert served.job is not None
    assert memory(served.job).problems()[0].startswith("servers on ")
    assert finding(machine.gpu_memory(served)).state == "ok"


def finding(found: Finding | None) -> Finding:
    assert found is not None
    return found


def test_nccls_sum_is_that_of_all_gpus(anywhere, monkeypatch):
    gpus(monkeypatch, 8)
    monkeypatch.setattr(machine.nccl, "version", lambda: (2, 30, 4))
    monkeypatch.setattr(machine, "reduced_by_nccl", lambda: [8.0] * 8)
    assert machine.collectives(anywhere) == Finding("ok", "NCCL 2.30.4 between 8 GPUs")
    monkeypatch.setattr(machine, "reduced_by_nccl", lambda: [8.0] * 7 + [7.0])
    assert finding(machine.collectives(anywhere)).state == "failed"


# ---- the machine -------------------------------------------------------------------------------------


def test_a_run_for_gpus_is_refused_without(large, no_gpu, monkeypatch):
    none = r"cluster.device: gpu, found no GPU on .*: cluster.device=cpu trains"
    with pytest.raises(RecipeError, match=none):
        machine.refuse_unfit(large.recipe.cluster)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RecipeError, match=r"processes_per_node: 8 processes need a GPU each, found 2 on"):
        machine.refuse_unfit(large.recipe.cluster)
    monkeypatch.setenv("RANK", "3")
    machine.refuse_unfit(large.recipe.cluster)


@pytest.mark.parametrize(("processes", "said"), [(2, ""), (3, "WARNING: "), (8, "WARNING: "), (9, None)])
def test_processes_that_share_cores_are_told_and_many_refused(large, monkeypatch, capsys, processes, said):
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    crowded = load(ROOT / "recipes/tiny_cpu.yaml", [f"cluster.processes_per_node={processes}"])
    text = f"cluster.processes_per_node: {processes} processes share 2 cores"
    if said is None:
        with pytest.raises(RecipeError, match=f"{text}: expected at most 4 processes a core"):
            machine.refuse_unfit(crowded.cluster)
    else:
        machine.refuse_unfit(crowded.cluster)
        assert capsys.readouterr().err == (said and f"{said}{text}: they will wait for each other\n")


def test_cores_and_memory_are_what_the_machine_and_its_cgroup_leave(large, anywhere, monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    slow = machine.cores(large)
    assert (slow.state, slow.text) == ("slow", "8 for 8 processes, expected 16")
    assert machine.cores(anywhere).state == "ok"
    monkeypatch.setattr(machine.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**28))
    monkeypatch.setattr(machine, "memory_limit", lambda: float("inf"))
    assert machine.host_memory(large).state == "ok"
    monkeypatch.setattr(machine, "memory_limit", lambda: 64e9)
    short = machine.host_memory(large)
    assert (short.state, short.text[:30]) == ("failed", "64.0 GB, the plan needs 826 GB")
    assert machine.host_memory(anywhere) == Finding("ok", "64.0 GB")


def test_dockers_shared_memory_is_refused_and_space_counts_what_is_written(large, anywhere, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    assert machine.shared_memory(anywhere).state == "failed"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(1e12)))
    short = machine.space(large)
    assert short.state == "failed"
    assert "1000 GB free" in short.text
    monkeypatch.setattr(machine, "_size", lambda folder: int(0.6e12))
    assert machine.space(large).state == "ok"


@pytest.fixture
def trained(tmp_path, large) -> Callable[..., Place]:
    """Return a function that makes a place with overrides, for a model and five questions that are here."""
    model, path = tmp_path / "model", tmp_path / "rows.jsonl"
    save_tiny(model, "qwen3", num_hidden_layers=1, eos_token_id=1, vocab_size=384)
    write_hf_tokenizer(model, ["What is 1 + 1?"] * 8)
    path.write_text("".join(f'{{"question": "{n} + 1?", "answer": {n + 1}}}\n' for n in range(10, 15)))
    rows = f"data.sources=[{{name: rows, reader: jsonl, path: {path}}}]"
    keys = ("data.prompts_per_step=4", "evaluation.benchmarks=[]", "evaluation.every=0")
    return partial(with_recipe, large, f"model.path={model}", rows, *keys)


def test_prompts_are_made_and_answers_to_them_graded(trained):
    place = trained()
    assert re.search(r"^rows: 5 rows; prompts of (\d+) to \1 tokens$", software.prompts(place).text)
    graded = Finding("ok", "rows (math): right 1, wrong 0, empty 0, without its form 0")
    assert software.rewards(place) == graded


def test_answers_that_an_environment_grades_are_no_doubt_of_the_datas_grader(trained):
    place = trained(f"environment.name={__name__}:Echo", 'data.instruction="Answer: X"')
    assert place.prompts
    graded = software.rewards(place)
    assert graded.state == "ok"
    assert graded.text.startswith(f"asked where {__name__}:Echo leaves the grade to them: rows (math): ")
    place = trained("environment.name=python", 'data.instruction="Answer: X"')
    assert place.prompts
    read = software.rewards(place)
    assert (read.state, "the prompt asks for Answer: ..., the grader" in read.text) == ("failed", True)


def test_a_marker_that_no_response_can_contain_is_found(trained):
    marker = "tree_sampling={fork: marker, marker: <|im_end|>}"
    with pytest.raises(ValueError, match=r"marker: '<\|im_end\|>': expected text that a response can "):
        software.inputs(trained("sampling=tree", "objective=rloo", marker))


@pytest.mark.parametrize(("settings", "told"), [
    ([f"environment.name={__name__}:Echo"], "Echo answers 'Hello.'; rewards: 0.5"),
    ([f"environment.name={__name__}:Deaf"], "expected an Observation"),
    ([f"environment.name={__name__}:Alone"], "Alone.fork: expected an Environment, found 'None'"),
    (["environment.name=workspace", "environment.options={template: ., test: echo no pytest; false}"],
     r"rewards: 0 ('no pytest\n(exit status 1)')"),
])  # fmt: skip
def test_an_environment_answers_a_turn(trained, monkeypatch, tmp_path, settings, told):
    place = trained(*settings)
    monkeypatch.chdir(tmp_path)
    assert place.prompts
    assert told in finding(look(Check("environment", software.environment), place)).text


def test_a_tokenizer_without_a_chat_template_is_found(trained, tmp_path):
    (tmp_path / "model/chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=f"^{tmp_path / 'model'}: expected a chat template"):
        software.prompts(trained())


def test_a_tokenizer_with_tokens_that_have_no_embedding_is_found(trained, tmp_path):
    """Tensor parallelism would train on such a token in silence."""
    size = max(Tokenizer.from_file(str(tmp_path / "model/tokenizer.json")).get_vocab().values())
    save_tiny(tmp_path / "model", "qwen3", num_hidden_layers=1, eos_token_id=1, vocab_size=size)
    with pytest.raises(
        ValueError, match=f"model: expected at most vocab_size {size} tokens, found {size + 1}"
    ):
        software.inputs(trained())


def test_missing_tensors_are_found_except_in_short(trained, tmp_path):
    (tmp_path / "model/model.safetensors").unlink()
    with pytest.raises(WeightsError, match=f"^{tmp_path / 'model'}: "):
        software.inputs(trained())
    assert software.inputs(replace(trained(), short=True)).text.endswith("are there")


def test_benchmark_questions_in_the_training_data_are_said_and_stop_no_run(tmp_path, large):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "What is 1 + 1?", "answer": 2}\n')
    rows = f"{{name: rows, reader: jsonl, path: {path}}}"
    place = with_recipe(large, f"data.sources=[{rows}]", f"evaluation.benchmarks=[{rows}]")
    (check_of_it,) = [item for item in CHECKS if item.name == "benchmarks apart"]
    found = look(check_of_it, place)
    assert (found.state, check_of_it.needed(place), check_of_it.in_short) == ("failed", False, False)
    assert "data source rows holds 1 of the 1 questions of benchmark rows" in found.text


@pytest.mark.parametrize(("overrides", "told"), [
    ((), "can begin or resume"),
    (("parallel.tensor=2", "cluster.processes_per_node=2"), "LayoutError: parallel.tensor: "),
    (("run_dir=/dev/null/run",), "/dev/null"),
    (("rollout.engine=server", "rollout.servers=[http://a:1]"), "VLLM_API_KEY: expected a secret"),
    (("data.max_prompt_length=4000", "packing.max_tokens_per_row=9000"), "more than the model"),
])  # fmt: skip
def test_what_training_would_refuse_at_its_start_is_found(tmp_path, monkeypatch, capsys, overrides, told):
    monkeypatch.setattr("megatron_eqlen.check.CHECKS", [])
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    save_tiny(tmp_path / "model", "qwen3", num_hidden_layers=1, num_key_value_heads=1)
    keys = [f"model.path={tmp_path}/model", f"run_dir={tmp_path}/run", "data.max_prompt_length=48"]
    status = cli.main(["check", str(ROOT / "recipes/tiny_cpu.yaml"), *keys, *overrides])
    printed = capsys.readouterr().out
    assert re.search(told, printed), printed
    assert status == bool(overrides)
