"""A process that is killed while its environment is in mid-call leaves no process, and its step resumes."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

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


def step(folder, config):
    """Harvest one step, or the rest of it, whose record is in ``folder``."""
    tokenizer = tokenizer_with(folder.parent / "tokenizer", TEMPLATES["plain"])
    options = {"python": sys.executable, "config": json.dumps(config)}
    limits = {"max_turns": 3, "max_given_tokens": 80, "timeout": 300.0}
    section = EnvironmentRecipe(name="verifiers", options=options, **limits)
    settings = recipe(sampling="independent", objective="grpo")
    rollout = settings.rollout.model_copy(update={"max_response_length": 900})
    settings = settings.model_copy(update={"environment": section, "rollout": rollout})
    ids = tokenizer.apply_chat_template(FIRST)
    prompts = [replace(QUESTION, prompt_id=f"q{n}", number=n, token_ids=ids, gold='"x"') for n in range(2)]
    speak, progress = conversations(settings, tokenizer), read_progress(folder, prompts, settings)
    ends = tokenizer.eos_token_ids
    plan = HarvestPlan(prompts, settings, ends, seed=0, progress=progress, conversations=speak)
    with recorder.Recorder(folder / "rank-0.arrow") as observer:
        try:
            return harvest(Speaking(tokenizer, "hm"), plan, [observer])
        finally:
            speak.close()


def step_that_is_killed(folder, config):
    recorder.INTERVAL = 0.1
    step(folder, config)


def test_a_kill_in_mid_call_leaves_no_process_and_the_step_resumes(tmp_path, monkeypatch):
    verifiers_stub.write(tmp_path / "stub")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"), prepend=os.pathsep)
    folder, hold = tmp_path / "step-00000001", tmp_path / "hold"
    hold.touch()
    call = f"step_that_is_killed(Path({str(folder)!r}), {{'hold': {str(hold)!r}}})"
    code = f"from pathlib import Path; from {__name__} import *; {call}"
    victim = subprocess.Popen([sys.executable, "-c", code])

    def in_call():
        return [pid for pid in descendants(victim.pid) if "sleep 600" in command_line(pid)]

    assert within(90, lambda: len(in_call()) >= 4 or victim.poll() is not None)
    time.sleep(1.0)  # the record of the first turn is there
    assert victim.poll() is None
    started = descendants(victim.pid)
    victim.kill()
    victim.wait()
    assert within(20, are_gone(started))
    hold.unlink()
    whole, _ = step(tmp_path / "whole" / "step", {})
    resumed, metrics = step(folder, {})
    assert resumed == whole
    assert metrics["harvest/resumed_tokens"] > 0
