"""Each extension goes where the READMEs say, and no other place needs to know of it.

Objectives, readers and graders are one file of a user's own, named in the recipe. A sampling kind and a model
family are added to this package: here for the length of a test.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import sys
from dataclasses import replace

import pytest
import torch
import yaml

import megatron_eqlen
import tests.kit.rollouts as kit
from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.data.sources import open_source
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.hf.config import ConfigError, parse_config, read_config
from megatron_eqlen.hf.config_fields import FAMILIES, Family
from megatron_eqlen.hf.folder import HFFolder, check_folder
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.job import Job, load, parse
from megatron_eqlen.models import config as models_config
from megatron_eqlen.models.config import transformer_config
from megatron_eqlen.objectives.parts import PARTS
from megatron_eqlen.objectives.registry import with_defaults
from megatron_eqlen.objectives.surrogates import Ppo
from megatron_eqlen.plan.flops import active_parameters
from megatron_eqlen.recipe import ParallelRecipe, Recipe, RecipeError, layout
from megatron_eqlen.recipe.engine_options import check_options
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.record.recorder import FILES, Recorder
from megatron_eqlen.report.rollouts import Training, view
from megatron_eqlen.rewards.functions import RewardFunction, is_reward_function
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.training.policy_loss import policy_loss, reduce_metrics
from megatron_eqlen.types import Grade, Part, Prompt, Rollout
from tests.kit import ROOT
from tests.kit.rollouts import build_trees
from tests.kit.tiny_models import save_tiny, tiny_config
from tests.pure.test_rollout_harvest import EOS
from tests.pure.test_rollout_resume import Lockstep
from tools.tokenizer_maker import write_hf_tokenizer

OBJECTIVE = """
from megatron_eqlen.objectives.aggregation import token_mean
from megatron_eqlen.objectives.objective import Objective
from megatron_eqlen.objectives.surrogates import Ppo


def above_half(rewards, lengths):
    return [reward - 0.5 for reward in rewards]


HALF = Objective("half", above_half, token_mean, Ppo(0.1, 0.3))
"""

OWN_PARTS = """
from dataclasses import dataclass

import numpy as np
import torch


def sign(rewards, lengths):
    return [1.0 if reward > 0 else -1.0 for reward in rewards]


def root_length(member, batch):
    return member.weight / member.length**0.5


@dataclass(frozen=True)
class Soft:
    clip_ratio_high: float = 1.0

    def __call__(self, tokens):
        ratio = tokens.log_ratio.exp()
        bound = tokens.sequences.mean(ratio).detach().clamp(max=self.clip_ratio_high)
        return -bound * ratio * tokens.advantages, {"loss/own/bound": bound}


SOFT = Soft()


def two_arguments(tokens, clip):
    return tokens


def no_pair(tokens):
    return -tokens.log_ratio


def one_number(tokens):
    return -tokens.log_ratio.sum(), {}


def infinite(tokens):
    return -tokens.advantages / tokens.logprobs, {}


def constant(tokens):
    return -tokens.advantages * tokens.old_logprobs, {}


def undeclared(tokens):
    return -tokens.log_ratio, {"loss/mine": tokens.advantages}


def negative(member, batch):
    return -member.weight


def undefined(member, batch):
    return float("nan")


def by_deviation(rewards, lengths):
    mean = sum(rewards) / len(rewards)
    return [(r - mean) / sum((r - mean) ** 2 for r in rewards) for r in rewards]


def ranked(rewards, lengths):
    rewards.sort()
    return rewards


def short(rewards, lengths):
    return rewards[1:]


def huge_above_one(rewards, lengths):
    return [float("inf") if reward > 1 else reward for reward in rewards]


def in_numpy(rewards, lengths):
    return np.array(rewards, np.float32) - np.mean(rewards)


def in_torch(rewards, lengths):
    return torch.tensor(rewards) - torch.tensor(rewards).mean()


def by_median_length(rewards, lengths):
    lengths.sort()
    return [reward - lengths[0] / 10 for reward in rewards]


def divides_by_two_less(rewards, lengths):
    return [reward / (2 - max(rewards)) for reward in rewards]


def none_above_one(rewards, lengths):
    return [None if reward > 1 else reward for reward in rewards]


def as_list(prompts, limit):
    return [[[0.25] * (span.end - span.start) for span in spans] for spans in prompts]


def as_tensor(prompts, limit):
    return [[torch.full((span.end - span.start,), 0.25) for span in spans] for spans in prompts]


def over_the_loss(tokens):
    return -tokens.log_ratio, {"loss/entropy": tokens.advantages}


def sometimes(tokens):
    some = (tokens.advantages < 0).any()
    return -tokens.log_ratio, {"loss/own/negative": tokens.advantages} if some else {}
"""

READER = """
import json
from megatron_eqlen.data.rows import Problem


def read(path, tally):
    for number, line in enumerate(path.read_text().splitlines()):
        question, answer = line.encode().decode("unicode_escape").split(" = ")
        yield Problem(f"{path.name}#{number}", question, answer)
"""

GRADER = """
from megatron_eqlen.types import Grade


class Longer:
    def __init__(self, reward):
        self.workers = reward.workers

    def grade(self, texts, golds):
        return [Grade(float(len(text) > len(gold)), "scored") for text, gold in zip(texts, golds)]

    def close(self):
        pass
"""

SOURCES = {"__init__": "", "half": OBJECTIVE, "parts": OWN_PARTS, "sums": READER, "longer": GRADER}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a user's package ``mine``, found from the working directory as `eqlen` finds it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, source in SOURCES.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def recipe(source: dict | None = None, **keys) -> Recipe:
    sources = [{"name": "sums", "path": "sums.txt"} | (source or {})]
    raw = {
        "name": "mine", "steps": 1, "sampling": "independent", "group_size": 2, "model": {"path": "model"},
        "data": {"max_prompt_length": 64, "instruction_role": "none", "sources": sources},
        "rollout": {"max_response_length": 8}, "packing": {"max_tokens_per_row": 128},
        "loss": {"kl_coef": 0.0},
    }  # fmt: skip
    return parse(raw | keys, "test")


def test_an_objective_is_one_file(package):
    mine = recipe(objective="mine.half:HALF")
    assert Job(mine).objective.surrogate == Ppo(0.1, 0.3)
    assert mine.method == "HALF"
    rollout = group([1.0, 1.0])
    (tree,), _ = build_trees([rollout], mine)
    assert [node.advantage for node in tree.nodes[1:]] == [0.5, 0.5], "its own, also of equal rewards"
    assert [node.weight for node in tree.nodes[1:]] == [1 / 4, 1 / 4]


def test_the_page_has_an_objective_and_parts_that_can_be_used(package):
    page = (ROOT / "docs/extending.md").read_text()
    (package / "mine/half.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    (package / "mine.yaml").write_text(yaml.safe_dump(recipe().model_dump(mode="json", exclude_unset=True)))
    parts = {"advantage": "above_half", "surrogate": "squared_ratio", "loss_agg_mode": "root_length"}
    asked = ["objective=mine.half:HALF"], [f"loss.{key}=mine.half:{name}" for key, name in parts.items()]
    used = [Job(load(package / "mine.yaml", overrides)).objective for overrides in asked]
    assert [objective.advantage.__name__ for objective in used] == ["above_half"] * 2


def test_an_advantage_a_surrogate_and_an_aggregation_are_named_in_the_recipe(package):
    raw = recipe(loss={"kl_coef": 0.0}).model_dump(mode="json", exclude_unset=True)
    (package / "mine.yaml").write_text(yaml.safe_dump(raw))
    named = {"advantage": "sign", "surrogate": "SOFT", "loss_agg_mode": "root_length"}
    overrides = [f"loss.{key}=mine.parts:{name}" for key, name in named.items()]
    mine = load(package / "mine.yaml", [*overrides, "loss.clip_ratio_high=1.1"])
    (tree,), _ = build_trees([group([0.5, 0.0])], mine)
    right, wrong = tree.nodes[1:]
    assert (right.advantage, wrong.advantage) == (1.0, -1.0)
    assert [right.weight, wrong.weight] == pytest.approx([0.5 / math.sqrt(2)] * 2)
    log_ratios = torch.tensor([0.1, 0.3, -0.2, -0.4], dtype=torch.float64)
    logprobs = (log_ratios - 1).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss, row = policy_loss(
        logprobs, torch.zeros(4), weights=torch.full_like(log_ratios, right.weight), advantages=advantages,
        segment_ids=torch.tensor([0, 0, 1, 1]), rollout_logprobs=-torch.ones(4),
        others={"old": -torch.ones(4)}, objective=Job(mine).objective, loss=mine.loss,
    )  # fmt: skip
    ratios = log_ratios.exp()
    bounds = torch.stack([ratios[:2].mean().clamp(max=1.1), ratios[2:].mean()]).repeat_interleave(2)
    torch.testing.assert_close(loss, -(right.weight * bounds * ratios * advantages).sum())
    metrics = reduce_metrics([row])
    assert metrics["loss/own/bound"] == pytest.approx(bounds.mean().item())
    assert metrics["loss/ratio"] == pytest.approx(ratios.mean().item()), "logged for every surrogate"
    assert with_defaults(Job(mine)).loss.loss_agg_mode == "mine.parts:root_length"


@pytest.mark.parametrize("field", PARTS)
def test_a_recipe_can_name_every_built_in_part_and_no_other(field):
    key, table = PARTS[field]
    plain = {"sampling": "independent", "objective": "dr_grpo", "teacher": {"path": "for advantage none"}}
    for name, part in table.items():
        assert getattr(Job(recipe(loss={"kl_coef": 0.0, key: name}, **plain)).objective, field) == part
    with pytest.raises(RecipeError, match=f"expected one of {', '.join(table)}, or package.module:name"):
        recipe(loss={"kl_coef": 0.0, key: "another"})


@pytest.mark.parametrize(("key", "name", "reason"), [
    ("surrogate", "ppu", "expected one of ppo, .* found 'ppu' .nearest: 'ppo'"),
    ("surrogate", "mine.parts:none", "loss.surrogate: mine.parts has no 'none'"),
    ("surrogate", "mine.absent:none", "loss.surrogate: 'mine.absent:none' cannot be imported"),
    ("surrogate", "mine.parts:Soft", "surrogate Soft: expected a function or an instance, found a class"),
    ("surrogate", "mine.parts:two_arguments", r"called with \(tokens\), found .* \(tokens, clip\)"),
    ("surrogate", "mine.parts:no_pair", r"no_pair: expected \(losses, metrics\), found a Tensor"),
    ("surrogate", "mine.parts:one_number", r"losses: expected a tensor \[6\]"),
    ("surrogate", "mine.parts:infinite", "surrogate infinite: losses not finite: .*nan"),
    ("surrogate", "mine.parts:constant", "do not depend on tokens.logprobs"),
    ("surrogate", "mine.parts:undeclared", "metric 'loss/mine' is not declared"),
    ("surrogate", "mine.parts:over_the_loss", "expected metrics named loss/own/..., found loss/entropy"),
    ("surrogate", "mine.parts:sometimes", r"metrics \['loss/own/negative'\] without tokens, too, found \[\]"),
    ("loss_agg_mode", "mine.parts:negative", "aggregation negative: expected a finite weight .*-0.25"),
    ("loss_agg_mode", "mine.parts:undefined", "aggregation undefined: expected a finite weight .*nan"),
    ("advantage", "mine.parts:short", r"advantage short of .*: expected 2 finite advantages, found \["),
    ("advantage", "mine.parts:by_deviation", r"by_deviation: ZeroDivisionError at parts\.py:\d+: "),
    ("advantage", "mine.parts:ranked", r"it changes the rewards \[1.0, 0.0\] to \[0.0, 1.0\]: expected a"),
    ("advantage", "mine.parts:constant", r"called with \(rewards, lengths\), found .* \(tokens\)"),
    ("objective", "mine.half:NOTHING", r"objective: mine\.half has no 'NOTHING'"),
    ("objective", "mine.half:above_half", "expected a Objective, found a function"),
    ("objective", "nowhere.at:ALL", "objective: 'nowhere.at:ALL' cannot be imported"),
    ("reader", "mine.sums:none", "data.sources.0.reader: mine.sums has no 'none'"),
    ("reader", "depmath", "nearest: 'deepmath'"),
    ("grader", "maths", "nearest: 'math'"),
])  # fmt: skip
def test_a_part_that_is_not_there_or_does_not_fit_is_refused_at_once(package, key, name, reason):
    loss = {"loss": {"kl_coef": 0.0, key: name}}
    keys = {"objective": {key: name}, "reader": {"source": {key: name}}, "grader": {"source": {key: name}}}
    with pytest.raises(RecipeError, match=reason):
        recipe(**keys.get(key, loss))


def test_an_advantage_that_is_not_finite_is_refused_with_the_prompt_and_its_rewards(package):
    mine = recipe(loss={"kl_coef": 0.0, "advantage": "mine.parts:huge_above_one"})
    with pytest.raises(ValueError, match=r"prompt .*: advantage huge_above_one of rewards \[2.0, 0.0\].*inf"):
        build_trees([group([2.0, 0.0])], mine)


@pytest.mark.parametrize(("name", "reason"), [
    ("mine.parts:divides_by_two_less", r"ZeroDivisionError at parts\.py:\d+: "),
    ("maxrl", r"ValueError at advantages\.py:\d+: advantage maxrl divides .* at least 0, found -1"),
])  # fmt: skip
def test_an_advantage_that_fails_in_a_run_is_named_with_the_prompt_and_its_rewards(package, name, reason):
    mine = recipe(sampling="independent", objective="dr_grpo", loss={"kl_coef": 0.0, "advantage": name})
    with pytest.raises(ValueError, match=rf"prompt .*: advantage \w+ of rewards \[2.0, -1.0\]: {reason}"):
        build_trees([group([2.0, -1.0])], mine)


def test_an_advantage_that_is_no_number_is_refused_with_the_prompt_and_its_rewards(package):
    mine = recipe(loss={"kl_coef": 0.0, "advantage": "mine.parts:none_above_one"})
    with pytest.raises(ValueError, match=r"prompt .* of rewards \[2.0, 0.0\]: expected 2 finite .*None"):
        build_trees([group([2.0, 0.0])], mine)


@pytest.mark.parametrize("name", ["in_numpy", "in_torch"])
def test_advantages_may_be_numbers_of_numpy_and_torch(package, name):
    mine = recipe(loss={"kl_coef": 0.0, "advantage": f"mine.parts:{name}"})
    (tree,), metrics = build_trees([group([1.0, 0.0])], mine)
    assert [node.advantage for node in tree.nodes[1:]] == [0.5, -0.5]
    assert json.loads(json.dumps(metrics))["objective/advantage_max"] == 0.5


def test_an_advantage_that_sorts_the_lengths_changes_no_weight(package):
    rollout = group([1.0, 0.0])
    rollout.parts[0].tokens = Tokens.of([5, 6, 7, 9], [-1.0] * 4)
    mine = recipe(loss={"kl_coef": 0.0, "advantage": "mine.parts:by_median_length"})
    (tree,), _ = build_trees([rollout], mine)
    assert [node.weight for node in tree.nodes[1:]] == [1 / 8, 1 / 4]


@pytest.mark.parametrize("name", ["as_list", "as_tensor"])
def test_baselines_may_be_lists_and_tensors(package, name):
    mine = recipe(objective="dr_grpo", loss={"kl_coef": 0.0, "baseline": f"mine.parts:{name}"})
    (tree,), _ = build_trees([group([1.0, 0.0])], mine)
    assert [node.advantage.tolist() for node in tree.nodes[1:]] == [[0.75] * 2, [-0.25] * 2]


def test_a_reader_and_a_grader_are_one_file_each(package):
    (package / "sums.txt").write_text("1 + 1 = 2\n2 + 2 = 4\n")
    write_hf_tokenizer(package / "model", ["1 + 2 = 4"], vocab_size=300)
    mine = recipe({"reader": "mine.sums:read", "grader": "mine.longer:Longer"})
    tokenizer = load_tokenizer(package / "model")
    prompts = PromptSource(mine.data, tokenizer, seed=0)
    (prompt,) = prompts.next(1)
    prompts.close()
    assert prompt.question in ("1 + 1", "2 + 2")
    short, long = (Part(Tokens.of(tokenizer.encode(text), 0.0), "stop") for text in ("1", "1 + 2 = 4"))
    Scorer(mine.reward, tokenizer).score([kit.group(prompt, 0, [short, long])])
    assert [segment.grade.reward for segment in (short, long)] == [0.0, 1.0]


@pytest.mark.parametrize("line", [r"1 + \ud800 = 2", r"1 + 1 = \ud800"])
def test_half_a_surrogate_pair_from_a_reader_is_an_error_that_names_the_row(package, line):
    (package / "sums.txt").write_text(f"1 + 1 = 2\n{line}\n")
    write_hf_tokenizer(package / "model", ["1"], vocab_size=300)
    data = recipe({"reader": "mine.sums:read"}).data
    with pytest.raises(ValueError, match=r"'sums.txt#1': .*found half a surrogate pair, \\ud800"):
        PromptSource(data, load_tokenizer(package / "model"), seed=0)


@pytest.mark.parametrize(("body", "message"), [
    ("yield {'question': '?'}", r"mine\.own:read: TypeError at .*: expected rows of the type Problem, found"),
    ("return None", r"mine\.own:read: TypeError at .*: 'NoneType' object is not iterable"),
    ("raise KeyError('x')", r"mine\.own:read: KeyError at own\.py:2: 'x'"),
])  # fmt: skip
def test_a_reader_that_fails_or_yields_something_else_is_named(package, body, message):
    (package / "mine/own.py").write_text(f"def read(path, tally):\n    {body}\n")
    with pytest.raises(ValueError, match=message):
        open_source(recipe({"reader": "mine.own:read"}).data.sources[0], Tally())


def test_rows_cannot_name_code(package):
    """Import paths belong to the recipe: a data file must not choose the code that runs."""
    row = {"question": "?", "answer": "1", "grader": "mine.longer:Longer"}
    (package / "rows.jsonl").write_text(json.dumps(row))
    write_hf_tokenizer(package / "model", ["1"], vocab_size=300)
    data = recipe({"path": "rows.jsonl", "reader": "jsonl"}).data
    with pytest.raises(ValueError, match="no usable row"):
        PromptSource(data, load_tokenizer(package / "model"), seed=0)


def group(rewards: list[float]) -> Rollout:
    completions = [Part(Tokens.of([5, 9], [-1.0, -1.0]), "stop", Grade(r, "scored")) for r in rewards]
    return kit.group(Prompt("q", [1, 2], "?", "math", "1"), 0, completions)


# ---- a sampling kind: its class, whose name is its import path ---------------------------------------------

KIND = """
from megatron_eqlen.sampling.comparison import ComparisonUnit, response_reward, token_tree
from megatron_eqlen.sampling.kind import SamplingKind
from megatron_eqlen.sampling.tree import GrowingTree, Shape


class DuelSampling(SamplingKind):
    name = "mine.duel:DUEL"

    def harvester(self, prompt, index, setting):
        return GrowingTree(prompt, index, setting, Shape(2))

    def compare(self, rollout, recipe, penalty):
        tree, nodes = token_tree(rollout, rollout.prompt_id, rollout.parts)
        rewards = [response_reward(side, rollout.prompt_id) for side in rollout.parts]
        members = [nodes[side.number] for side in rollout.parts]
        unit = ComparisonUnit(rollout.prompt_id, [*rollout.parts], members, rewards, skip_equal=True)
        return tree, [unit]

    def labels(self, rollout):
        return "a duel", ["L", "R"][: len(rollout.parts)]

    def harvest_metrics(self, rollouts):
        return {"harvest/completions": 2 * len(rollouts)}

    def objective_metrics(self, units, rollouts, recipe):
        return {"objective/pairs": len(units)}


DUEL = DuelSampling()
"""


def test_a_sampling_of_ones_own_is_a_class_that_the_recipe_names(package, tmp_path, monkeypatch):
    other = 'OTHER = type("Other", (DuelSampling,), {"name": "x"})()'
    (package / "mine" / "duel.py").write_text(KIND + other)
    limits = {"max_response_length": 8, "keep_sampling_mask": False}
    mine = recipe(sampling="mine.duel:DUEL", objective="grpo", rollout=limits)
    assert mine.method == "DUEL-grpo"
    with pytest.raises(ValueError, match=r"mine\.duel:OTHER: expected an object of this name, found 'x'"):
        recipe(sampling="mine.duel:OTHER", objective="grpo", rollout=limits)
    prompts = [Prompt(f"q{number}", [1, 2], "?", "math", "1", number=number) for number in range(3)]
    engine = Lockstep(random.Random(0), masks=False)
    rollouts, metrics = harvest(engine, HarvestPlan(prompts, mine, EOS, seed=0))
    assert [len(rollout.parts) for rollout in rollouts] == [2, 2, 2]
    assert metrics["harvest/completions"] == 6
    for rollout in rollouts:
        for number, (segment, _) in enumerate(rollout.ended()):
            segment.grade = Grade(float(number), "scored")
    with Recorder(tmp_path / "step-00000000" / FILES.replace("*", "0")) as recorder:
        for rollout in rollouts:
            recorder.write(rollout)
    recorded = read_step(tmp_path / "step-00000000")
    assert [rollout.prompt_id for rollout in recorded] == ["q0", "q1", "q2"]
    ungraded = [[replace(side, grade=None) for side in rollout.parts] for rollout in rollouts]
    assert recorded == [replace(one, parts=sides) for one, sides in zip(rollouts, ungraded, strict=True)]
    trees, metrics = build_trees(rollouts, mine)
    assert len(trees) == metrics["objective/pairs"] == 3
    seen = view(rollouts[0], str, Training(rollouts, None))
    assert (seen.title, [side.label for side in seen.parts]) == ("a duel", ["L", "R"])
    monkeypatch.setattr(type(KINDS[mine.sampling]), "labels", lambda self, rollout: ("a duel", ["L"]))
    with pytest.raises(ValueError, match=r"mine\.duel:DUEL: labels: expected 2, one a part, found \['L'\]"):
        view(rollouts[0], str, Training(rollouts, None))


# ---- a model family: its line in hf/config_fields.py -------------------------------------------------------


def test_a_model_family_of_known_parts_is_one_line(tmp_path, monkeypatch):
    save_tiny(tmp_path, "qwen3_moe")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "again_moe"}))
    with pytest.raises(ConfigError, match=r"expected one of .*, found 'again_moe'"):
        read_config(tmp_path)
    monkeypatch.setitem(FAMILIES, "again_moe", Family(experts=True))
    model = read_config(tmp_path)
    by_name = check_folder(HFFolder(tmp_path), model)
    assert "embedding.word_embeddings.weight" in by_name
    assert not list(layout.weights(ParallelRecipe(expert=2), model))
    assert active_parameters(model) > 0
    assert model.experts is not None
    megatron = transformer_config(model, ParallelRecipe(), torch.float32)
    assert megatron.num_moe_experts == model.experts.num_experts


OF_EXECUTION = {
    "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion",
    "moe_permute_fusion", "moe_grouped_gemm", "moe_router_dtype",
}  # fmt: skip
"""Fields that we set and a recipe may set otherwise."""


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_a_recipe_cannot_change_what_model_and_layout_say_through_further_options(monkeypatch, family):
    fields: dict = {}
    monkeypatch.setattr(models_config, "TransformerConfig", lambda **given: fields.update(given))
    model = parse_config(tiny_config(family).to_dict(), "config")
    layout = ParallelRecipe(tensor=2, pipeline=2, recompute="full")
    models_config.transformer_config(model, layout, torch.bfloat16, moe_permute_fusion=True)
    assert fields["moe_permute_fusion"] is True
    allowed = set()
    for name in fields:
        with contextlib.suppress(ValueError):
            check_options("model.megatron", {name: 1})
            allowed.add(name)
    assert allowed <= OF_EXECUTION


@pytest.mark.parametrize("path", [*(ROOT / "recipes/examples").glob("*/recipe.yaml")])
def test_an_example_loads_with_its_own_reward_and_objective(path):
    recipe = load(path)
    assert recipe.name == path.parent.name
    for source in recipe.data.sources:
        if (grader := source.grader) and is_reward_function(grader):
            function = RewardFunction(grader, "grader")
            prompt = Prompt("x", [1], "2 + 3?", grader, "5")
            right, wrong = (function.grade(prompt, f"\\boxed{{{number}}}").reward for number in (5, 6))
            assert right > wrong == 0


def test_the_stable_names_of_the_package_are_found():
    for name in megatron_eqlen.STABLE:
        assert callable(getattr(megatron_eqlen, name))
    with pytest.raises(AttributeError, match=r"megatron_eqlen has no 'lode'; its names are load, main, "):
        _ = megatron_eqlen.lode
