"""The table of phases against a GPU's memory while the real loop runs, for every kind of engine, parking and
evaluation.

The trainer is a real ``Policy`` with real ``TrainerMemory``, of a model without parameters; the colocated
engine is a real ``ColocatedEngine`` with vLLM's own bookkeeping of sleep. What they say is on the GPU is
compared with the table at each call that needs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor.abstract import Executor

from megatron_eqlen.engines import colocated
from megatron_eqlen.engines.protocol import Request
from megatron_eqlen.engines.servers import ServerEngine
from megatron_eqlen.job import Job
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.phases import phases
from megatron_eqlen.run import loop
from megatron_eqlen.run.generation import Generator
from megatron_eqlen.run.step import Step
from megatron_eqlen.training import policy as policies
from megatron_eqlen.training.parking import Parked, TrainerMemory
from tests.kit.recipes import small

STEPS = 2
ENGINES = [("colocated", "none"), ("colocated", "state"), ("colocated", "all"), ("server", None)]
"""Kinds of engines and ``rollout.park_trainer``."""
PARTS = ("weights", "kv_cache")
"""vLLM's tags of what sleeps."""


class Gpu:
    """Memory of a GPU as its users account for it, and what it held at the calls so far."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.trainer: TrainerMemory | None = None
        self.teacher: Parked | None = None
        self.engine: set[str] | None = None
        """vLLM's tags in memory; None without a colocated engine."""
        self.seen: dict[str, set[str]] = {}
        """Parts by phase, over all calls."""

    def parts(self) -> set[str]:
        found = set()
        if self.trainer is not None:
            on_device = {"weights": self.trainer.weights, "gradients": self.trainer.gradients}
            if not self.recipe.optimizer.offload:
                on_device["optimizer"] = self.trainer.state
            found |= {name for name, parked in on_device.items() if not parked.away}
        if self.teacher is not None and not self.teacher.away:
            found.add("teacher")
        if self.engine is not None:
            found |= {{"weights": "engine"}.get(tag, tag) for tag in self.engine} or {"sleeping_engine"}
        return found

    def call(self, phase: str, *also: str) -> None:
        self.seen[phase] = self.seen.get(phase, set()) | self.parts() | {*also}


class Sleeper(Executor):
    """vLLM's executor, of whose workers only the tags in memory are known."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.sleeping_tags = gpu, set()
        gpu.engine = {*PARTS}

    def collective_rpc(self, method: str, kwargs: dict[str, Any], **_: Any) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert self.gpu.engine is not None
        tags = {*(kwargs.get("tags") or PARTS)}
        if method == "sleep":
            self.gpu.engine -= tags
        else:
            self.gpu.engine |= tags
        return []

    def _init_executor(self) -> None: ...
    def check_health(self) -> None: ...


def open_engine(gpu: Gpu, patch: pytest.MonkeyPatch) -> Any:
    rollout = gpu.recipe.rollout
    if rollout.engine == "server":
        engine = object.__new__(ServerEngine)
        patch.setattr(engine, "update_weights", lambda tensors, version: consume(gpu, tensors))
        patch.setattr(engine, "submit", lambda *_: None)
        return engine
    core: Any = Sleeper(gpu)
    model = SimpleNamespace(get_vocab_size=lambda: 8)
    core.vllm_config = SimpleNamespace(model_config=model, use_v2_model_runner=True)
    core.reset_prefix_cache = lambda: True
    core.preprocess_add_request = lambda request: (SimpleNamespace(request_id="r", num_preemptions=0), 0)
    core.add_request = lambda request, wave: None
    table = SimpleNamespace(check=lambda tensors: tensors, bytes_seen=0)
    patch.setattr(colocated.WeightTable, "read", lambda path: table)
    patch.setattr(colocated.lifecycle, "build", lambda *_: core)
    patch.setattr(colocated.lifecycle, "load_weights", lambda core, tensors: consume(gpu, tensors))
    patch.setattr(colocated, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    patch.setattr(colocated, "read_config", lambda path: SimpleNamespace(moe_layers=0))
    return colocated.ColocatedEngine("m", rollout, "bfloat16", [1], 16)


def consume(gpu: Gpu, tensors: Iterable[Any]) -> None:
    for _ in tensors:
        gpu.call("sync", "sent_tensors")


def use(gpu: Gpu, engine: Any, phase: str) -> None:
    """Generate something."""
    engine.submit(Request("r", [1], 1, 0))
    gpu.call(phase)
    if gpu.recipe.rollout.engine == "colocated":
        engine.requests.clear()


def build_policy(gpu: Gpu, patch: pytest.MonkeyPatch) -> Callable[[Job], Any]:
    def build(job: Job) -> Any:
        policy = object.__new__(policies.Policy)
        policy.job, policy.recipe, policy.chunks, policy.version = job, job.recipe, [], 0
        policy.reference, policy.teacher = None, None
        if job.recipe.teacher.path:
            teacher: Any = SimpleNamespace(weights=Parked(lambda: []), chunks=None)
            gpu.teacher, policy.teacher = teacher.weights, teacher
            teacher.weights.park()
        optimizer: Any = SimpleNamespace(zero_grad=lambda: None, chained_optimizers=[])
        gpu.trainer = policy.memory = TrainerMemory([], optimizer, job.recipe.parked)
        return policy

    patch.setattr(policies, "export_hf", lambda chunks: iter([("w", None)]))
    patch.setattr(policies.Policy, "_log_probs", lambda *_: gpu.call("teach"))
    patch.setattr(policies, "save_hf", lambda *_: gpu.call("export", "sent_tensors"))
    return build


class NoSession:
    """A session of one rank that shows nothing."""

    def __init__(self, job: Job) -> None:
        self.recipe = job.recipe

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    @contextmanager
    def stage(self, *_: object) -> Iterator[dict[str, float]]:
        yield {}


def run_of(gpu: Gpu, evaluates: bool, completes: bool) -> Any:
    """Return a run whose verbs do nothing but what moves memory."""
    left = iter([True] * STEPS + [False])

    def evaluate(step: Any, rollouts: Any, steps: int = 0) -> Any:
        if evaluates:
            use(gpu, rollouts.engine, "evaluate")
        return step

    def update(step: Any, policy: Any, trees: Any) -> Any:
        assert not policy.memory.away
        policy._annotate(SimpleNamespace(others={}), old=False)
        gpu.call("train", "activations")
        return step, None

    nothing = SimpleNamespace(finish=dict)
    return SimpleNamespace(
        folder=SimpleNamespace(streams=None), steps=STEPS, complete=completes, checkpoints=nothing,
        evaluations=SimpleNamespace(evaluate=evaluate), was_asked_to_stop=lambda: False,
        load=lambda policy: gpu.call("load"), park=lambda policy: policy.park(),
        unpark=lambda policy: policy.unpark() or {}, resume=lambda rollouts: None,
        has_next_step=lambda: next(left), begin=lambda policy: Step(0, 0),
        build_trees=lambda step: (step, []), update=update, report_mismatch=lambda *_: None,
        evaluate_if_due=evaluate, end=lambda step: None,
        checkpoint_if_due=lambda step, policy: gpu.call("checkpoint"),
        export=lambda policy: policy.export("export"), report=lambda rollouts: None,
    )  # fmt: skip


@pytest.mark.parametrize(("evaluates", "completes", "offload", "taught"), [*product((False, True), repeat=4)])
@pytest.mark.parametrize(("engine", "parked"), ENGINES)
def test_a_gpu_holds_what_the_table_of_phases_says(
    monkeypatch, engine, parked, evaluates, completes, offload, taught
):
    """In every phase no part is there that the table has not, and each of the table's is there at some call;
    a KV cache takes memory with the first request."""
    servers = {"servers": ["http://x:1"]} if engine == "server" else {}
    recipe = small(
        steps=STEPS, optimizer={"offload": offload}, teacher={"path": "t"} if taught else {},
        rollout={"engine": engine, "park_trainer": parked} | servers,
    )  # fmt: skip
    gpu = Gpu(recipe)

    def start_rollouts(session: Any, *_: Any) -> Any:
        rollouts = object.__new__(Generator)
        rollouts.session, rollouts.recipe, rollouts.patience = session, recipe, None
        rollouts.engine = open_engine(gpu, monkeypatch)
        monkeypatch.setattr(rollouts, "collect", lambda step: use(gpu, rollouts.engine, "generate") or step)
        gpu.call("start")
        return rollouts

    monkeypatch.setattr(loop, "Session", NoSession)
    monkeypatch.setattr(loop, "Run", lambda session, until: run_of(gpu, evaluates, completes))
    monkeypatch.setattr(loop, "Policy", build_policy(gpu, monkeypatch))
    monkeypatch.setattr(loop, "start_prompts", lambda session: None)
    monkeypatch.setattr(loop, "start_rollouts", start_rollouts)
    job = Job(recipe)
    vars(job)["folder"] = Path("m")
    loop.train(job)

    table = {phase.name: {*phase.parts} for phase in phases(recipe)}
    never = ({"evaluate"} if not evaluates else set()) | ({"export"} if not completes else set())
    assert [*gpu.seen] == [name for name in table if name not in never]
    for phase, parts in gpu.seen.items():
        unmapped = {"kv_cache"} if phase == "checkpoint" and not evaluates else set()
        assert parts == table[phase] - unmapped, phase
