"""The cost of a step: counted from its tokens, and equal to counting operation by operation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron_eqlen.environments.environment import Environment, Observation
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.job import KNOWN_MODELS, Job, load
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.plan.flops import achieved, counted, forward_flops
from megatron_eqlen.record import recorder
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Node, Prompt, TokenTree
from tests.kit import ROOT
from tests.kit.marks import weekly
from tests.kit.rollouts import build_trees
from tests.pure.test_carry_over import Run, prompts_of
from tests.pure.test_environments import speaking
from tests.pure.test_rollout_harvest import EOS, make_recipe
from tests.pure.test_rollout_resume import Lockstep

QWEN3 = KNOWN_MODELS / "qwen3-0.6b.json"
LEAVES = ((4, 0), (6, 0), (3, 2))
"""(tokens, parent) of nodes after the root."""


def test_utilisation_is_flops_over_time_and_what_the_gpus_can_do():
    recipe = load(ROOT / "recipes/qwen3_8b.yaml", ["loss.epochs=2"])
    step = {
        "packing/tokens": 1e6, "packing/context": 2e3, "packing/unique_tokens": 9e5, "time/train": 20.0,
        "packing/expanded_tokens": 3e6, "harvest/generated_tokens": 8e5, "time/harvest": 20.0,
        "harvest/resumed_tokens": 2e5,
    }  # fmt: skip
    found = achieved(Job(recipe), step, "NVIDIA H100 80GB HBM3")
    assert found["train/mfu"] == pytest.approx(found["train/flops"] / (20 * 8 * 989e12))
    new = 6 / 8  # of the tokens: the others took none of these seconds
    assert found["harvest/mfu"] == pytest.approx(new * found["harvest/flops"] / (20 * 8 * 989e12))
    assert 0.01 < found["train/mfu"] < 1.5
    assert found["train/tokens_per_gpu_second"] == pytest.approx(2 * 9e5 / 160)
    assert found["train/expanded_tokens_per_gpu_second"] == pytest.approx(2 * 3e6 / 160)
    assert found["harvest/tokens_per_gpu_second"] == pytest.approx(new * 8e5 / 160)
    servers = ["rollout.servers=[http://a:1,http://b:1]", "rollout.tensor_parallel=4"]
    apart = achieved(Job(load(ROOT / "recipes/qwen3_32b_servers.yaml", servers)), step, None)
    assert apart["harvest/tokens_per_gpu_second"] == pytest.approx(new * 8e5 / (20 * 2 * 4))
    replay = step | dict.fromkeys(("harvest/generated_tokens", "harvest/resumed_tokens"), 0)
    replayed = achieved(Job(recipe), replay, "NVIDIA H100 80GB HBM3")
    assert replayed["harvest/flops"] == 0
    assert not {"harvest/mfu", "harvest/tokens_per_gpu_second"} & replayed.keys()
    for unknown in (None, "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA RTX A1000", "RTX 4090 D"):
        assert "train/mfu" not in achieved(Job(recipe), step, unknown)


@dataclass
class Counting(Lockstep):
    """Counts each pass: (tokens that it sees), with a prefix cache of BLOCK tokens a block, which holds
    nothing of other weights."""

    blocks: set[tuple[int, ...]] = field(default_factory=set)
    cached_by: int = 0
    passes: dict[str, range] = field(default_factory=dict)
    """Prefills that begin with the next step."""
    prefilled: list[int] = field(default_factory=list)

    def keep(self, path: Sequence[int]) -> None:
        self.blocks |= {tuple(path[:end]) for end in range(BLOCK, len(path) + 1, BLOCK)}

    def submit(self, request):
        super().submit(request)
        if self.cached_by != self.policy_version:
            self.cached_by, self.blocks = self.policy_version, set()
        ends = (
            end
            for end in range(BLOCK, len(request.token_ids), BLOCK)
            if tuple(request.token_ids[:end]) in self.blocks
        )
        # the pass of the last token makes the first one that is generated
        self.passes[request.request_id] = range(max(ends, default=0) + 1, len(request.token_ids))
        self.keep(request.token_ids)
        self.keep(self.paths[request.request_id][0][:-1])  # the last token is in no pass

    def _delta(self, name):
        self.prefilled += self.passes.pop(name, ())
        return super()._delta(name)


BLOCK = 4
KINDS = {
    "pairs": {},
    "single pairs": {"equal_length": {"max_pairs": 1}},
    "groups": {"sampling": "independent"},
    "trees": {"sampling": "tree", "objective": "rloo", "tree_sampling": {"forks": 2, "step_tokens": 3}},
    "deaths": {"sampling": "tree", "objective": "rloo", "tree_sampling": {"fork": "death", "forks": 3}},
}


class Talking(Environment):
    """Answers up to four turns by some tokens."""

    def __init__(self, prompt, seed):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return Observation("7 " * self.turns, done=self.turns > 3)

    def grade(self):
        return 1.0

    def fork(self):
        copied = Talking(None, 0)
        copied.turns = self.turns
        return copied


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("talks", [False, True])
def test_what_an_engine_computes_is_what_a_counting_engine_computes(kind, talks):
    rollout = {"max_response_length": 20, "block_size": BLOCK, "top_k": 20, "keep_sampling_mask": True}
    recipe = make_recipe(group_size=4, rollout=rollout, **KINDS[kind])
    engine = Counting(random.Random(3), end=0.15, max_num_seqs=64, max_model_len=200)
    prompts = [Prompt(f"p{n}", list(range(50 + n, 60 + 2 * n)), "q", "math", "0") for n in range(3)]
    plan = HarvestPlan(prompts, recipe, EOS, seed=1, conversations=speaking(Talking) if talks else None)
    rollouts, metrics = harvest(engine, plan)
    given = sum(len(part.tokens) - len(part) for rollout in rollouts for part in rollout.parts)
    assert bool(given) == talks
    if talks:
        generated = sum(len(part) for rollout in rollouts for part in rollout.parts)
        assert metrics["environment/given_share"] == given / generated
    assert metrics["harvest/prefilled_tokens"] == len(engine.prefilled)
    assert metrics["harvest/prefill_context"] == pytest.approx(np.mean(engine.prefilled))
    seen = []
    for rollout in rollouts:
        for part in rollout.parts:
            before = len(rollout.prompt.token_ids) + sum(len(p.tokens) for p in rollout.line(part.parent))
            seen += (before + np.flatnonzero(part.tokens.is_generated)).tolist()
    assert metrics["harvest/context"] == pytest.approx(np.mean(seen))
    for rollout in rollouts:
        for part, _ in rollout.ended():
            part.grade = part.grade or Grade(float(len(part) % 2), "")
    planned = plan_rows(build_trees(rollouts, recipe)[0], max_tokens_per_row=200)
    trained = sum((row.weights > 0).sum() for row in planned.rows(0))
    assert planned.metrics["packing/supervised_tokens"] == trained > 0


COUNTED = "prefilled_tokens", "prefill_context", "carried_rollouts", "suspended_rollouts", "carried_tokens"
CASES = [*((kind, False) for kind in KINDS), ("pairs", True), ("trees", True)]
CASES += [weekly(kind, True) for kind in KINDS if (kind, True) not in CASES]


@pytest.mark.parametrize(("kind", "talks"), CASES)
def test_what_new_weights_compute_again_is_what_an_engine_counts(kind, talks, tmp_path, monkeypatch):
    """After a kill, too, of which the metrics are those of the step that nothing interrupted."""
    monkeypatch.setattr(recorder, "INTERVAL", 0.0)
    rollout = {"max_response_length": 20, "block_size": BLOCK, "carry_over": True, "tokens_per_step": 1}
    rollout |= {"max_staleness": 99, "top_k": 20, "keep_sampling_mask": True}
    recipe = make_recipe(group_size=4, rollout=rollout, loss={"rollout_is": "token"}, **KINDS[kind])
    counts: list[list[list[float]]] = []
    for kills in ((), (3, 6)):
        run = Run(tmp_path / str(kills), recipe, 0.15, speaking(Talking) if talks else None)
        run.engine = engine = Counting(random.Random(3), 0.15, max_num_seqs=6, max_model_len=200)
        counts.append([])
        for number in range(5):
            drawn = prompts_of(number, 2 if number < 4 else 0)
            between = [(p, [*range(50, 55), *p.token_ids, *range(9)]) for p in drawn]
            prompts = [replace(prompt, token_ids=token_ids) for prompt, token_ids in between]
            engine.prefilled.clear()
            carried = {f"{prompt_id}/{index}" for prompt_id, index in run.suspended}
            delivered = sum(n for name, n in engine.delivered.items() if name.rpartition("/")[0] in carried)
            run.step(number, prompts, 40 if number < 4 else None, kills=kills)
            counts[-1].append([run.metrics[-1][f"harvest/{name}"] for name in COUNTED])
            if not kills:
                assert counts[0][-1][2:] == [len(carried), len(run.suspended), delivered]
                # two lines of equal tokens, which nothing but chance made, share an answer's blocks, too
                rel, passes = 0.01 if talks else 1e-9, engine.prefilled
                assert counts[0][-1][:2] == pytest.approx([len(passes), np.mean(passes)], rel=rel)
    assert talks or counts[0] == counts[1], "when an environment answers decides where the budget ends"
    assert sum(carried for *_, carried in counts[0]) > 50


@pytest.mark.parametrize("layout", ["tree", "expanded"])
def test_the_context_of_rows_is_what_their_positions_see(layout):
    nodes = [
        Node(-1, Tokens.of(np.arange(5))),
        *(Node(above, Tokens.of(np.arange(n), np.zeros(n)), weight=1.0) for n, above in LEAVES),
    ]
    planned = plan_rows([TokenTree("t", nodes)], max_tokens_per_row=40, layout=layout)
    pairs = 0
    for row in planned.ranks[0]:
        ends = planned.fill(row, for_loss=False).visible_until
        query, key = np.indices((len(ends), len(ends)))
        pairs += ((key <= query) & (query < ends[key])).sum()
    assert planned.metrics["packing/context"] * planned.metrics["packing/tokens"] == pytest.approx(pairs)


def test_a_token_costs_what_counting_each_matrix_product_gives():
    config = Qwen3Config.from_pretrained(QWEN3, attn_implementation="eager")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(1, 256, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids)  # each of the 256 queries is multiplied with all 256 keys
    ours = 256 * forward_flops(read_config(QWEN3), 256)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.001)


def test_a_steps_flops_are_its_generated_prefilled_and_trained_tokens():
    model = read_config(QWEN3)
    metrics = {
        "harvest/generated_tokens": 1000, "harvest/context": 50.0, "harvest/prefilled_tokens": 84,
        "harvest/prefill_context": 20.0, "packing/tokens": 300, "packing/context": 80.0,
    }  # fmt: skip

    def flops(*overrides: str) -> dict[str, float]:
        return counted(Job(load(ROOT / "recipes/qwen3_0.6b.yaml", overrides)), metrics)

    base = flops("loss.kl_coef=0")
    assert base["harvest/flops"] == 1000 * forward_flops(model, 50) + 84 * forward_flops(model, 20)
    assert base["train/flops"] == 3 * 300 * forward_flops(model, 80)
    with_others = flops("loss.minibatches=2")["train/flops"]
    assert with_others == 5 / 3 * base["train/flops"], "reference and old log-probs"
    assert flops("loss.epochs=2")["train/flops"] == (2 * 3 + 2) / 3 * base["train/flops"]
    # gradients of frozen weights, as many as the linear layers compute, are not
    linear = 300 * forward_flops(model, 0)
    adapters = flops("loss.epochs=2", "loss.kl_coef=0", "lora.rank=8")["train/flops"]
    assert adapters == (2 * 3 + 1) / 3 * base["train/flops"] - 2 * linear
    sft, smollm2 = ROOT / "recipes/smollm2_sft_cpu.yaml", "model.path=SmolLM2-135M-Instruct"
    recipes = [load(sft, [smollm2, f"loss.minibatches={count}"]) for count in (1, 2)]
    once, twice = (counted(Job(recipe), metrics)["train/flops"] for recipe in recipes)
    assert once == twice, "a loss without a ratio needs no old log-probs"
    assert counted(Job(load(ROOT / "recipes/qwen3_0.6b.yaml")), {}) == {"harvest/flops": 0, "train/flops": 0}
