"""A stand-in for the package ``verifiers``, as far as its worker uses it; ``write`` puts it into a folder."""

from pathlib import Path

SOURCE = '''
import asyncio, contextlib, os, subprocess, sys, types
from dataclasses import dataclass, field
import openai

ModelContext = EvalClientConfig = SamplingConfig = types.SimpleNamespace

@dataclass
class Data:
    prompt: str = "q"
    @classmethod
    def model_validate(cls, value):
        return cls(str(value))

class Task:
    def __init__(self, data, task):
        self.data = data
    @classmethod
    def data_type(cls):
        return Data

class Taskset:
    @classmethod
    def task_type(cls):
        return Task

class Environment:
    """Plays two turns; where the file ``hold`` is, a tool hangs in a session of its own."""
    taskset = Taskset()
    config = types.SimpleNamespace(taskset=types.SimpleNamespace(task=None))
    def __init__(self, hold):
        self.hold = hold
    @contextlib.asynccontextmanager
    async def serving(self):
        yield
    def slots(self, task):
        return [task]
    async def run_slot(self, task, context):
        client = openai.AsyncOpenAI(base_url=context.client.base_url, api_key="any")
        messages = [{"role": "user", "content": "q"}]
        for turn in range(2):
            said = await client.chat.completions.create(model="m", messages=messages)
            messages += [said.choices[0].message, {"role": "user", "content": "more"}]
            if task.data.prompt == "dies":
                os._exit(3)
            if task.data.prompt == "fails":
                raise ValueError("no task")
            if self.hold and os.path.exists(self.hold):
                tool = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
                await tool.wait()
        return types.SimpleNamespace(errors=[], traces=[types.SimpleNamespace(reward=0.5, errors=[])])

def resolve_env_config(config):
    if "id" in config:
        sys.exit(4)
    return config

def load_environment(config):
    return Environment(config.get("hold"))
'''


def write(folder: Path) -> None:
    """``folder`` is for PYTHONPATH."""
    again = "from verifiers.v1 import *\n"
    for name, text in {"__init__": SOURCE, "clients": again, "utils/loaders": again}.items():
        path = folder / "verifiers" / "v1" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
