"""Each extension goes where the READMEs say, and no other place needs to know of it.

Objectives, readers and graders are one file of a user's own, named in the recipe. A sampling kind and a model
family are added to this package: here for the length of a test.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys

import pytest
import torch

from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.hf import config, families
from megatron_eqlen.hf.config import ConfigError, read_config
from megatron_eqlen.hf.folder import HFFolder
from megatron_eqlen.hf.folder_check import check_folder
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.models.config import transformer_config
from megatron_eqlen.objectives.build import build_trees
from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.objectives.registry import resolve
from megatron_eqlen.plan.flops import active_parameters
from megatron_eqlen.recipe import ParallelRecipe, Recipe, RecipeError, layout
from megatron_eqlen.recipe.plugins import load_object
from megatron_eqlen.report.rollouts import Unknown, view
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.rollout.harvest_plan import HarvestPlan
from megatron_eqlen.rollout.record.reader import read_step
from megatron_eqlen.rollout.record.recorder import FILES, Recorder
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.kind import SamplingKind
from megatron_eqlen.toys.tokenizer_maker import write_hf_tokenizer
from megatron_eqlen.types import Delta, Grade, Group, Prompt, Segment
from tests.kit.tiny_models import save_tiny

OBJECTIVE = """
from megatron_eqlen.objectives.objective import Objective


def above_half(rewards, lengths):
    return [reward - 0.5 for reward in rewards]


HALF = Objective("half", above_half, "token-mean", "token", 0.1, 0.3)
"""

READER = """
import json
from megatron_eqlen.data.rows import Problem


def read(path, tally):
    for number, line in enumerate(path.read_text().splitlines()):
        question, answer = line.split(" = ")
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


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a user's package ``mine``, found from the working directory as `eqlen` finds it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, source in {"__init__": "", "half": OBJECTIVE, "sums": READER, "longer": GRADER}.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def recipe(source: dict | None = None, **keys) -> Recipe:
    raw = {
        "name": "mine",
        "steps": 1,
        "sampling": "independent",
        "group_size": 2,
        "model": {"path": "model"},
        "data": {
            "max_prompt_length": 64,
            "instruction_role": "none",
            "sources": [{"name": "sums", "path": "sums.txt"} | (source or {})],
        },
        "rollout": {"max_response_length": 8},
        "packing": {"max_tokens_per_row": 128},
        "loss": {"kl_coef": 0.0},
    }
    return parse(raw | keys, "test")


def test_an_objective_is_one_file(package):
    mine = recipe(objective="mine.half:HALF")
    assert resolve(mine).clip_ratio_high == 0.3
    assert mine.method == "HALF"
    rollout = group([1.0, 1.0])
    (tree,), _ = build_trees([rollout], mine)
    assert [node.advantage for node in tree.nodes[1:]] == [0.5, 0.5], (
        "its own advantage, also of equal rewards"
    )
    assert [node.weight for node in tree.nodes[1:]] == [1 / 4, 1 / 4]


def test_a_reader_and_a_grader_are_one_file_each(package):
    (package / "sums.txt").write_text("1 + 1 = 2\n2 + 2 = 4\n")
    write_hf_tokenizer(package / "model", ["1 + 2 = 4"], vocab_size=300)
    mine = recipe({"reader": "mine.sums:read", "grader": "mine.longer:Longer"})
    tokenizer = load_tokenizer(package / "model")
    prompts = PromptSource(mine.data, tokenizer, seed=0)
    (prompt,) = prompts.next(1)
    prompts.close()
    assert prompt.question in ("1 + 1", "2 + 2")
    short, long = (Segment(tokenizer.encode(text), [0.0] * 9, "stop") for text in ("1", "1 + 2 = 4"))
    Scorer(mine.reward, tokenizer).score([Group(prompt, 0, [short, long])])
    assert [segment.grade.reward for segment in (short, long)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"objective": "mine.half:NOTHING"}, r"objective: mine\.half has no 'NOTHING'"),
        ({"objective": "mine.half:above_half"}, "expected a Objective, found a function"),
        ({"objective": "nowhere.at:ALL"}, "objective: 'nowhere.at:ALL' cannot be imported"),
        ({"source": {"reader": "mine.sums:none"}}, "data.sources.0.reader: mine.sums has no 'none'"),
        ({"source": {"reader": "depmath"}}, "nearest: 'deepmath'"),
        ({"source": {"grader": "maths"}}, "nearest: 'math'"),
    ],
)
def test_what_is_not_there_is_named_before_anything_starts(package, keys, message):
    with pytest.raises(RecipeError, match=message):
        recipe(**keys)


def test_rows_cannot_name_code(package):
    """Import paths belong to the recipe: a data file must not choose the code that runs."""
    (package / "rows.jsonl").write_text(
        json.dumps({"question": "?", "answer": "1", "grader": "mine.longer:Longer"})
    )
    write_hf_tokenizer(package / "model", ["1"], vocab_size=300)
    data = recipe({"path": "rows.jsonl", "reader": "jsonl"}).data
    with pytest.raises(ValueError, match="no usable row"):
        PromptSource(data, load_tokenizer(package / "model"), seed=0)


def group(rewards: list[float]) -> Group:
    completions = [Segment([5, 9], [-1.0, -1.0], "stop", Grade(reward, "scored")) for reward in rewards]
    return Group(Prompt("q", [1, 2], "?", "math", "1"), 0, completions)


# ---- a sampling kind: its rollout, its class, its line in KINDS, its name in the schema -------------------

KIND = """
from dataclasses import dataclass

from megatron_eqlen.sampling.comparison import ComparisonUnit, node, response_reward, root
from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart, in_order
from megatron_eqlen.sampling.independent import IndependentGroup
from megatron_eqlen.sampling.kind import LabeledSegment, Picture, SamplingKind
from megatron_eqlen.types import Prompt, Segment, TokenTree


@dataclass
class Duel:
    prompt: Prompt
    policy_version: int
    sides: list
    index: int = 0
    prompt_routes: None = None
    suspended: bool = False

    @property
    def prompt_id(self):
        return self.prompt.prompt_id

    def ended(self):
        return ((side, side.token_ids) for side in self.sides if side.finish_reason == "stop")

    def segments(self):
        return iter(self.sides)


class Duellists(IndependentGroup):
    def rollout(self, policy_version):
        return DUEL.join(RolloutHeader(self.prompt, self.index, policy_version), self.parts)


class DuelSampling(SamplingKind[Duel]):
    name = "duel"
    rollout_type = Duel

    def harvesters(self, prompts, recipe, eos_token_ids, seed):
        limit = recipe.rollout.max_response_length
        return [Duellists(prompt, 2, limit, eos_token_ids, seed) for prompt in prompts]

    def parts(self, rollout):
        return [RolloutPart("side", number, side) for number, side in enumerate(rollout.sides)]

    def join(self, header, parts):
        sides = [part.segment for part in in_order(parts)]
        return Duel(header.prompt, header.policy_version, sides, header.index)

    def compare(self, rollout, recipe, penalty):
        nodes = [node(0, side) for side in rollout.sides]
        rewards = [response_reward(side, rollout.prompt_id) for side in rollout.sides]
        unit = ComparisonUnit(rollout.prompt_id, rollout.sides, nodes, rewards, skip_equal=True)
        return TokenTree(rollout.prompt_id, [root(rollout), *nodes]), [unit]

    def picture(self, rollout):
        left, right = (LabeledSegment(name, side, []) for name, side in zip("LR", rollout.sides))
        return Picture("a duel", [(left, right)])

    def harvest_metrics(self, rollouts):
        return {"harvest/completions": 2 * len(rollouts)}

    def objective_metrics(self, units, rollouts, recipe):
        return {"objective/pairs": len(units)}


DUEL = DuelSampling()
"""


def test_a_sampling_kind_is_a_class_and_a_line(package, tmp_path, monkeypatch):
    (package / "mine" / "duel.py").write_text(KIND)
    kind = load_object("mine.duel:DUEL", "test", SamplingKind)
    monkeypatch.setitem(KINDS, kind.name, kind)
    mine = recipe(rollout={"max_response_length": 8, "keep_sampling_mask": False}).model_copy(
        update={"sampling": "duel"}
    )
    prompts = [Prompt(f"q{number}", [1, 2], "?", "math", "1", number=number) for number in range(3)]
    engine = Scripted(random.Random(0))
    rollouts, metrics = harvest(engine, HarvestPlan(prompts, mine, {9}, seed=0))
    assert [len(rollout.sides) for rollout in rollouts] == [2, 2, 2]
    assert metrics["harvest/completions"] == 6
    for rollout in rollouts:
        for number, (segment, _) in enumerate(rollout.ended()):
            segment.grade = Grade(float(number), "scored")
    with Recorder(tmp_path / "step-00000000" / FILES.replace("*", "0")) as recorder:
        for rollout in rollouts:
            recorder.write(rollout)
    recorded = read_step(tmp_path / "step-00000000")
    assert [one.prompt_id for one in recorded] == ["q0", "q1", "q2"]
    assert [one.sides for one in recorded] == [
        [dataclasses.replace(side, grade=None) for side in rollout.sides] for rollout in rollouts
    ]
    trees, metrics = build_trees(rollouts, mine)
    assert len(trees) == metrics["objective/pairs"] == 3
    seen = view(rollouts[0], str, Unknown())
    assert (seen.title, [(pair.a.label, pair.b.label) for pair in seen.pairs]) == ("a duel", [("L", "R")])


class Scripted:
    """Ends every request at once with token 9; sampling masks are off."""

    max_model_len, max_num_seqs, policy_version = 64, 8, 0

    def __init__(self, chaos: random.Random) -> None:
        self.requests: list[str] = []

    def submit(self, request_id, token_ids, max_tokens, seed, prompt_routes=0):
        self.requests.append(request_id)

    def step(self):
        deltas = [Delta(name, [5, 9], [-0.5, -0.25], "stop") for name in self.requests]
        self.requests = []
        return deltas

    def abort(self, request_ids):
        assert not list(request_ids)

    def metrics(self):
        return {}


# ---- a model family: its weights and its line in FAMILIES, its name and layer types in hf/config.py --------


def test_a_model_family_is_its_weights_and_its_lines(tmp_path, monkeypatch):
    save_tiny(tmp_path, "qwen3_moe")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "again_moe"}))
    with pytest.raises(ConfigError, match=r"expected one of .*, found 'again_moe'"):
        read_config(tmp_path)
    monkeypatch.setattr(config, "FAMILIES", (*config.FAMILIES, "again_moe"))
    monkeypatch.setitem(config.LAYER_TYPES, "again_moe", {"full_attention"})
    monkeypatch.setitem(families.FAMILIES, "again_moe", families.qwen3_moe)
    model = read_config(tmp_path)
    by_name = check_folder(HFFolder(tmp_path), model)
    assert "embedding.word_embeddings.weight" in by_name
    assert not list(layout.weights(ParallelRecipe(expert=2), model))
    assert active_parameters(model) > 0
    assert model.experts is not None
    megatron = transformer_config(model, ParallelRecipe(), torch.float32)
    assert megatron.num_moe_experts == model.experts.num_experts
