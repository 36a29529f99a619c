"""A process that is killed while its environment is in mid-call leaves no process, and its step resumes."""

import json
import os
import sys
from dataclasses import replace

import pytest

from megatron_eqlen.environments import python_tool
from megatron_eqlen.environments.load import conversations
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.recipe import EnvironmentRecipe
from megatron_eqlen.record import recorder
from megatron_eqlen.record.reader import read_progress
from tests.kit import verifiers_stub
from tests.kit.jobs import Child
from tests.kit.length_bias import QUESTION
from tests.kit.processes import are_gone, command_line, descendants, within
from tests.pure.test_agents import FIRST, Speaking
from tests.pure.test_environments import TEMPLATES, tokenizer_with
from tests.pure.test_forks import recipe

CODE = "globals().setdefault('n', []).append(1) or len(n)"
CALL = json.dumps({"name": "python", "arguments": {"code": CODE}})
SECOND = "echo $((EQLEN_SEED % 90)) >> drawn; cat drawn; [ $(wc -l < drawn) != 2 ] || sleep ${HANG:-0}"
RUN = json.dumps({"name": "run", "arguments": {"command": SECOND}})
VERIFIERS = "recipes.verifiers_tasks:VerifiersTask"
SAYS = {name: f"<tool_call>{call}</tool_call>" for name, call in (("python", CALL), ("workspace", RUN))}
SAYS[VERIFIERS] = "hm"
IN_CALL = {"python": "graders.sandbox.zygote", "workspace": "sleep 600", VERIFIERS: "sleep 600"}
"""Part of the command line of each process of a call; of the Python tool: a program, the fork of its zygote
that serves it, and the zygote."""
PROMPT = replace(QUESTION, gold='"x"')
SETTINGS = recipe(sampling="independent", objective="grpo")


def step(folder, name, config):
    """Harvest one step, or the rest of it, whose record is in ``folder``."""
    tokenizer = tokenizer_with(folder.parent / "tokenizer", TEMPLATES["plain"])
    options = {"python": sys.executable, "config": json.dumps(config)}
    if name == "python":
        options = {"sandbox": "best_effort", "timeout": 100.0}
    if name == "workspace":
        template = folder.parent / "template"
        template.mkdir(exist_ok=True)
        hang = {"HANG": str(config.get("hang", 0))}
        options = {"template": str(template), "timeout": 200.0, "variables": hang}
    limits = {"max_turns": 3, "max_given_tokens": 80, "timeout": 300.0}
    section = EnvironmentRecipe(name=name, options=options, **limits)
    rollout = SETTINGS.rollout.model_copy(update={"max_response_length": 900})
    settings = SETTINGS.model_copy(update={"environment": section, "rollout": rollout})
    prompts = [replace(PROMPT, token_ids=tokenizer.encode(tokenizer.render_chat(FIRST)))]
    speak, progress = conversations(settings, tokenizer), read_progress(folder, prompts, settings)
    speak = replace(speak, kept=folder)
    ends = tokenizer.eos_token_ids
    plan = HarvestPlan(prompts, settings, ends, seed=0, progress=progress, conversations=speak)
    with recorder.Recorder(folder / "rank-0.arrow") as observer:
        try:
            return harvest(Speaking(tokenizer, SAYS[name]), plan, [observer])
        finally:
            speak.close()


def step_that_is_killed(folder, name, config):
    """A tool hangs in its second call."""
    python_tool.RUN_CELLS = "import time\nif {before!r}: time.sleep(600)\n" + python_tool.RUN_CELLS
    recorder.INTERVAL = 0.1
    step(folder, name, config)


def recorded(folder, answered):
    """Return the number of tracks on disk, with an answer."""
    partial = read_progress(folder, [PROMPT], SETTINGS).partial if folder.exists() else ()
    tracks = [tokens for rollout in partial for tokens in rollout.tracks.values()]
    return sum(len(tokens) > tokens.generated or not answered for tokens in tracks)


@pytest.mark.parametrize("name", IN_CALL)
def test_a_kill_in_mid_call_leaves_no_process_and_the_step_resumes(name, tmp_path, monkeypatch):
    verifiers_stub.write(tmp_path / "stub")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"), prepend=os.pathsep)
    folder, hold = tmp_path / "step-00000001", tmp_path / "hold"
    hold.touch()
    call = f"step_that_is_killed(Path({str(folder)!r}), {name!r}, {{'hold': {str(hold)!r}, 'hang': 600}})"
    code = f"from pathlib import Path; from {__name__} import *; {call}"
    victim = Child(["-c", code], {}, [0, 1, 2], ())

    def in_call():
        return [pid for pid in descendants(victim.pid) if IN_CALL[name] in command_line(pid)]

    of_tool = name != VERIFIERS
    # first calls look like second ones: all of them are over once their answers are on disk
    assert within(240, lambda: recorded(folder, answered=of_tool) == 2 or victim.poll() is not None, 0.2)
    assert within(240, lambda: len(in_call()) == (6 if name == "python" else 2) or victim.poll() is not None)
    assert victim.poll() is None
    started = descendants(victim.pid)
    victim.kill()
    assert within(20, are_gone(started))
    hold.unlink()
    whole, _ = step(tmp_path / "whole" / "step", name, {})
    resumed, metrics = step(folder, name, {})
    assert resumed == whole
    assert metrics["harvest/resumed_tokens"] > 0
    assert metrics["environment/replays"] == (2 if of_tool else 0)
