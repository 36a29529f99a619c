"""A process that is killed while its environment is in mid-call leaves no process, and its step resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import megatron_eqlen.environments.python_tool as python_tool
from megatron_eqlen.environments.load import conversations
from megatron_eqlen.recipe import EnvironmentRecipe
from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.rollout.harvest_plan import HarvestPlan
from megatron_eqlen.rollout.record import recorder
from megatron_eqlen.rollout.record.reader import read_progress
from tests.kit import verifiers_stub
from tests.kit.length_bias import QUESTION
from tests.kit.processes import are_gone, command_line, descendants, within
from tests.pure.test_agents import FIRST, Speaking
from tests.pure.test_environments import TEMPLATES, tokenizer_with
from tests.pure.test_forks import recipe

CODE = "globals().setdefault('n', []).append(1) or len(n)"
CALL = json.dumps({"name": "python", "arguments": {"code": CODE}})
SECTIONS = {
    "python": {"sandbox": "best_effort", "timeout": 100.0, "longest_output": 100},
    "verifiers": {"python": sys.executable, "config": "{}"},
}
"""Options of the environments."""
IN_CALL = {"python": "rewards.sandbox.zygote", "verifiers": "sleep 600"}
"""Of the command line of a process of a call."""


def step(folder, name, config):
    """Harvest one step, or the rest of it, whose record is in ``folder``."""
    tokenizer = tokenizer_with(folder.parent / "tokenizer", TEMPLATES["plain"])
    options = SECTIONS[name] | ({"config": json.dumps(config)} if name == "verifiers" else {})
    section = EnvironmentRecipe(name=name, options=options, max_turns=3, max_given_tokens=80, timeout=300.0)
    settings = recipe(sampling="independent", objective="grpo")
    rollout = settings.rollout.model_copy(update={"max_response_length": 900})
    settings = settings.model_copy(update={"environment": section, "rollout": rollout})
    ids = tokenizer.apply_chat_template(FIRST)
    prompts = [replace(QUESTION, prompt_id=f"q{n}", number=n, token_ids=ids, gold='"x"') for n in range(2)]
    speak, progress = conversations(settings, tokenizer), read_progress(folder, prompts, settings)
    ends = tokenizer.eos_token_ids
    plan = HarvestPlan(prompts, settings, ends, seed=0, progress=progress, conversations=speak)
    said = f"<tool_call>{CALL}</tool_call>" if name == "python" else "hm"
    with recorder.Recorder(folder / "rank-0.arrow") as observer:
        try:
            return harvest(Speaking(tokenizer, said), plan, [observer])
        finally:
            speak.close()


def step_that_is_killed(folder, name, config):
    """The Python tool hangs in its second call; a fork of the process keeps its sockets open."""
    python_tool.RUN_CELLS = "import time\nif {before!r}: time.sleep(600)\n" + python_tool.RUN_CELLS
    recorder.INTERVAL = 0.1
    run = python_tool.Sandbox.run

    def run_beside_a_fork(self, *arguments):
        if not os.fork():
            time.sleep(60)
            os._exit(0)
        return run(self, *arguments)

    python_tool.Sandbox.run = run_beside_a_fork
    step(folder, name, config)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_kill_in_mid_call_leaves_no_process_and_the_step_resumes(name, tmp_path, monkeypatch):
    verifiers_stub.write(tmp_path / "stub")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"), prepend=os.pathsep)
    folder, hold = tmp_path / "step-00000001", tmp_path / "hold"
    hold.touch()
    call = f"step_that_is_killed(Path({str(folder)!r}), {name!r}, {{'hold': {str(hold)!r}}})"
    code = f"from pathlib import Path; from {__name__} import *; {call}"
    victim = subprocess.Popen([sys.executable, "-c", code])

    def in_call():
        return [pid for pid in descendants(victim.pid) if IN_CALL[name] in command_line(pid)]

    count = 4 * (2 if name == "python" else 1)  # a program beside its zygote
    assert within(90, lambda: len(in_call()) >= count or victim.poll() is not None)
    time.sleep(1.0)  # the record of the first turn is there
    assert victim.poll() is None
    started = descendants(victim.pid)
    forks = {pid for pid in started if command_line(pid) == command_line(victim.pid)}
    victim.kill()
    victim.wait()
    assert within(20, are_gone(started - forks))
    for pid in forks:
        os.kill(pid, signal.SIGKILL)
    hold.unlink()
    whole, _ = step(tmp_path / "whole" / "step", name, {})
    resumed, metrics = step(folder, name, {})
    assert resumed == whole
    assert metrics["harvest/resumed_tokens"] > 0
    assert metrics["environment/replays"] == (4 if name == "python" else 0)
