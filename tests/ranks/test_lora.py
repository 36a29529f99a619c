"""Adapters on real Megatron models: gradients in every layout, the frozen model, checkpoints, exports."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from megatron_eqlen.hf.adapter_map import AdapterWeights, adapter_map, peft_config, peft_tensors
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.hf.folder import HFFolder
from megatron_eqlen.job import Job
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.models.checkpoint_folder import CheckpointError
from megatron_eqlen.models.groups import start
from megatron_eqlen.models.lora import _initial, adapters, add_adapters
from megatron_eqlen.models.names import local_parameters, model_config
from megatron_eqlen.models.weights import export_adapters, export_hf
from megatron_eqlen.recipe import LoraRecipe, ParallelRecipe
from megatron_eqlen.training import saved_state
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import TokenTree
from tests.kit.distributed import run_ranks
from tests.kit.marks import weekly
from tests.kit.tiny_models import FAMILIES, SHORT, save_tiny, tiny_config
from tests.kit.tree_samples import group, stream
from tests.kit.tree_training import Trained, adapters_of, train_trees, worst_difference
from tests.kit.updates import build_policy, layout, one_tree_a_row, recipe_of, save, weights_of

LORA = LoraRecipe(rank=3, alpha=5.0)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    for family in ("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe"):
        save_tiny(path / family, family, **SHORT[family])
    return path


def some_trees() -> list[TokenTree]:
    rng = np.random.default_rng(0)
    return [stream(rng, 7, [5, 40, 3]), stream(rng, 1, [2, 4, 1]), group(rng, 5, [8, 33, 2])]


def with_adapters(chunks: list) -> None:
    """Add adapters that change the output: B is random, too, and does not depend on the layout."""
    add_adapters(chunks, LORA, seed=1)
    for name, adapter in adapters(chunks).items():
        weights = adapter.weights.B
        generator = torch.Generator().manual_seed(sum(name.encode()))
        whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in weights.shapes]
        ranks, rank = adapter._group.size(), adapter._group.rank()
        if weights.dim is not None:
            ranges = [weights.local_ranges(tuple(part.shape), rank, ranks) for part in whole]
            whole = [torch.cat([part[a:b] for a, b in own]) for part, own in zip(whole, ranges, strict=True)]
        adapter.B.data.copy_(weights.arrangement.merge(whole))


def trained(folder: Path, layers: dict[str, Any]) -> tuple[Trained, Tensors, Tensors, Any]:
    """Return the adapters' gradients, the matrices, the merged weights, and the adapters' names."""
    found: dict[str, Any] = {}

    def prepare(chunks: list) -> None:
        with_adapters(chunks)
        found["which"] = adapters_of(chunks)
        found["own"] = {name: tensor.clone() for name, tensor in export_adapters(chunks, found["which"])}
        found["merged"] = {name: tensor.clone() for name, tensor in export_hf(chunks)}

    result = train_trees(folder, some_trees(), 96, "tree", layers, prepare=prepare)
    assert result is not None
    return result, found["own"], found["merged"], found["which"]


def trained_whole(folder: Path, merged: Tensors) -> Trained | None:
    """Return the gradients of all weights at the merged weights."""

    def prepare(chunks: list) -> None:
        local = local_parameters(chunks)
        for weight in weight_map(model_config(chunks)):
            local[weight.megatron].data.copy_(weight.arrangement.merge([merged[name] for name in weight.hf]))

    return train_trees(folder, some_trees(), 96, prepare=prepare)


def chain_rule(which: list[AdapterWeights], own: Tensors, whole: Tensors) -> Tensors:
    """Return the gradients of A and B from those of W + s B A: s B^T dW and s dW A^T."""
    scale, found = LORA.alpha / LORA.rank, {}
    for weights in which:
        (name_of_A,) = weights.A.hf
        A, found[name_of_A] = own[name_of_A], 0
        for name_of_B, name in zip(weights.B.hf, weights.base.hf, strict=True):
            found[name_of_B] = scale * whole[name] @ A.T
            found[name_of_A] = found[name_of_A] + scale * own[name_of_B].T @ whole[name]
    return found


LAYOUTS = [
    ("qwen2", 1, {}),
    ("qwen3", 2, {"tensor": 2, "sequence": True, "recompute": "full"}),
    ("qwen3_moe", 2, {"expert_tensor": 2, "tensor": 2}),
    ("qwen3_next", 2, {"pipeline": 2, "recompute": "full"}),
    ("qwen3_5_moe", 2, {"tensor": 2, "expert": 2}),
    weekly("glm4_moe", 2, {"tensor": 2, "expert": 2}),
]


def test_every_seed_draws_a_matrix_of_its_own(tmp_path):
    save_tiny(tmp_path, "qwen3")
    weight = adapter_map(read_config(tmp_path), 4, LoraRecipe(rank=4).targets)[0].A
    drawn = [_initial(weight, seed) for seed in (0, 1, 2**32 - 1, 2**32 + 5)]
    assert not any(torch.equal(one, other) for i, one in enumerate(drawn) for other in drawn[:i])


@pytest.mark.parametrize(("family", "world", "layers"), LAYOUTS, ids=str)
def test_gradients_of_adapters_are_the_merged_models_by_the_chain_rule(folders, family, world, layers):
    """In float64 with any layout of the adapters; the merged model is trained by one rank."""
    folder = folders / family
    ours, own, merged, which = run_ranks(world, trained, folder, layers)[0]
    (whole,) = run_ranks(1, trained_whole, folder, merged)
    expected = Trained(whole.loss, chain_rule(which, own, whole.gradients))
    assert ours.loss == pytest.approx(whole.loss, rel=1e-12)
    difference, name = worst_difference(ours, expected)
    assert difference <= 1e-11, name


def trained_grouped(folder: Path, layers: dict[str, Any]) -> Trained:
    """Return the adapters' gradients with Megatron's modules around a stand-in for Transformer Engine."""
    from megatron_eqlen.models import config
    from tests.kit.transformer_engine_names import stand_in

    def prepare(chunks: list) -> None:
        with_adapters(chunks)
        names = [name for name, _ in chunks[0].named_parameters()]
        assert any(name.endswith("experts.linear_fc1.weight1") for name in names)

    stand_in()
    norms = {"separate_norms": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "uses_transformer_engine", lambda: True)
        result = train_trees(folder, some_trees(), 96, "tree", layers, norms, prepare=prepare)
    assert result is not None
    return result


def test_adapters_of_grouped_experts_have_the_gradients_of_experts_one_by_one(folders):
    folder = folders / "qwen3_moe"
    alone, *_ = run_ranks(1, trained, folder, {})[0]
    grouped = run_ranks(2, trained_grouped, folder, {"expert": 2})[0]
    assert grouped.loss == pytest.approx(alone.loss, rel=1e-12)
    difference, name = worst_difference(grouped, alone)
    assert difference <= 1e-11, name


# ---- a policy -----------------------------------------------------------------------------------------

SMOOTH = {"optimizer": {"lr": 1e-2, "warmup_steps": 0}, "model": {"megatron": {"adam_eps": 1e-5}}}
"""Adam's eps far above round-off, which would otherwise decide the direction of gradients near 0."""
WITH_LORA: dict[str, Any] = {"lora": {"rank": 3, "alpha": 5}, **SMOOTH}


def own_adapters(policy: Policy) -> Tensors:
    return {name: t.clone() for name, t in export_adapters(policy.chunks, adapters_of(policy.chunks))}


def around_two_updates(folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return what the tests of a policy compare."""
    plain = build_policy(folder, changes)
    policy = Policy(Job(recipe_of(folder, changes | WITH_LORA)))
    trees = one_tree_a_row(2)
    rows = policy._prepare(trees).rows
    assert rows is not None
    assert policy.reference is not None
    frozen = [p for chunk in policy.chunks for p in chunk.parameters() if not p.requires_grad]
    before = [parameter.clone() for parameter in frozen]
    found: dict[str, Any] = {"of the model": plain._log_probs(rows), "at step 0": policy._log_probs(rows)}
    with policy.reference():
        found["of the reference at step 0"] = policy._log_probs(rows)
    found["weights at step 0"] = weights_of(policy)
    found["metrics"] = [policy.update([trees]).metrics for _ in range(2)]
    with policy.reference():
        found["of the reference"] = policy._log_probs(rows)
    found["after"] = policy._log_probs(rows)
    found["frozen"] = all(map(torch.equal, frozen, before))
    found["adapters"] = own_adapters(policy)
    found["state"] = sum(t.numel() for t in policy.memory._state())
    found["gradients"] = sum(buffer.grad_data.numel() for buffer in policy.memory._buffers)
    return found


@pytest.fixture(scope="module")
def alone(folders) -> dict[str, Any]:
    return run_ranks(1, around_two_updates, str(folders / "qwen3_next"), {})[0]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, a, b)) and any(map(len, a))


def test_before_the_first_update_the_policy_is_the_model_bit_for_bit(alone, folders):
    assert same(alone["at step 0"], alone["of the reference at step 0"])
    folder = HFFolder(folders / "qwen3_next")
    weights = alone["weights at step 0"]
    assert all(torch.equal(tensor, folder.tensor(name)) for name, tensor in weights.items())


def test_the_reference_model_is_the_frozen_model_bit_for_bit(alone):
    """Megatron computes with frozen weights in matrix products of another shape, hence other round-off."""
    assert same(alone["of the reference"], alone["at step 0"])
    np.testing.assert_allclose(alone["at step 0"], alone["of the model"], atol=5e-5)
    assert not same(alone["after"], alone["at step 0"])
    assert alone["frozen"]


def test_only_adapters_have_gradients_and_optimizer_state(alone):
    """Each parameter starts at a multiple of 64 elements, each bucket ends at one of 128."""
    sizes = [-(-tensor.numel() // 64) * 64 for tensor in alone["adapters"].values()]
    assert sum(t.numel() for t in alone["adapters"].values()) <= alone["gradients"] <= sum(sizes) + 2 * 128
    assert alone["state"] <= 2 * alone["gradients"]


@pytest.mark.parametrize(
    ("family", "parallel"),
    [("qwen3_next", {"tensor": 2, "expert": 2}), ("qwen3_next", {"pipeline": 2}), weekly("qwen3_next", {})],
    ids=str,
)
def test_every_layout_takes_the_same_steps(folders, alone, family, parallel):
    changes = layout(2, **parallel)
    for found in run_ranks(2, around_two_updates, str(folders / family), changes):
        assert found["frozen"]
        for ours, theirs in zip(found["metrics"], alone["metrics"], strict=True):
            assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)
        for name, tensor in alone["adapters"].items():
            torch.testing.assert_close(found["adapters"][name], tensor, rtol=1e-3, atol=2e-5, msg=name)


def saved_and_resumed(folder: str, changes: dict[str, Any], target: str) -> int:
    """Save after an update, resume in another policy and compare another update; return the checkpoint's
    bytes."""
    policy = build_policy(folder, changes | WITH_LORA)
    trees = [one_tree_a_row(2)]
    policy.update(trees)
    policy.park()
    save(Path(target), 1, policy, {}, keep=1)
    policy.unpark()
    saved = own_adapters(policy)
    policy.update(trees)
    again = Policy(Job(recipe_of(folder, changes | WITH_LORA | {"seed": 7})))
    saved_state.load(Path(target), again)
    loaded = own_adapters(again)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    again.update(trees)
    ours, theirs = own_adapters(again), own_adapters(policy)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    return sum(file.stat().st_size for file in Path(target).rglob("*") if file.is_file())


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "glm4_moe"])
def test_a_run_resumes_bit_for_bit_from_a_checkpoint_of_adapters_alone(folders, tmp_path, family):
    folder = folders / family
    (size,) = run_ranks(1, saved_and_resumed, str(folder), {}, str(tmp_path))
    whole = 4 * (folder / "model.safetensors").stat().st_size  # weight, main weight and two moments
    assert size < whole / 2  # of these small tensors, torch's headers are the larger part
    stored = dist_keys(tmp_path)
    assert stored
    assert not [key for key in stored if "adapter" not in key and "optimizer" not in key]


def continued(folder: str, changes: dict[str, Any], target: str) -> bool:
    """Return True if a policy that resumes has the weights of the one that was saved, an update later."""
    policy, trees = build_policy(folder, changes), [one_tree_a_row(2)]
    policy.update(trees)
    policy.park()
    save(Path(target), 1, policy, {}, keep=1)
    policy.unpark()
    policy.update(trees)
    again = Policy(Job(recipe_of(folder, changes)))
    saved_state.load(Path(target), again)
    again.update(trees)
    ours, theirs = weights_of(again), weights_of(policy)
    return all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("family", "processes", "parallel", "target"),
    [("qwen3_moe", 1, {}, "experts"), ("qwen3_next", 2, {"pipeline": 2}, "attention")],
    ids=["no dense weight", "no weight of the first stage"],
)
def test_a_run_resumes_if_a_rank_trains_nothing_of_a_kind(
    folders, tmp_path, family, processes, parallel, target
):
    changes = WITH_LORA | layout(processes, **parallel)
    changes["lora"] = {"rank": 3, "targets": [target]}
    arguments = str(folders / family), changes, str(tmp_path)
    assert all(run_ranks(processes, continued, *arguments))


def dist_keys(folder: Path) -> list[str]:
    """Return the keys of a checkpoint's tensors."""
    (step,) = checkpoint_folder.steps(folder)
    stored = FileSystemReader(step).read_metadata().state_dict_metadata
    return [key for key, value in stored.items() if isinstance(value, TensorStorageMetadata)]


def exported(folder: str, out: str, changes: dict[str, Any] | None = None) -> torch.Tensor:
    """Write both exports and a checkpoint after an update; return the policy's logits."""
    policy = build_policy(folder, WITH_LORA | (changes or {}))
    policy.update([one_tree_a_row(2)])
    policy.export(Path(out) / "export")
    policy.export_adapters(Path(out) / "adapter")
    save(Path(out) / "checkpoints", 1, policy, {}, keep=1)
    return policy.chunks[0].eval()(IDS, torch.arange(IDS.shape[1])[None]).detach()


IDS = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(0))


def weight_of(model: torch.nn.Module, module: str) -> torch.Tensor:
    """Return a view of a module's weight; Transformers keeps those of experts in one tensor."""
    experts, found, which = module.partition(".experts.")
    if not found:
        return model.get_submodule(module).weight
    number, name = which.split(".")
    fused = model.get_submodule(f"{experts}.experts")
    if name == "down_proj":
        return fused.down_proj[int(number)]
    return fused.gate_up_proj[int(number)].chunk(2)[name == "up_proj"]


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe", "glm4_moe"])
def test_both_exports_are_the_policy_in_transformers(folders, family, tmp_path):
    """The PEFT folder is read as PEFT defines it: each module's W + alpha / r times lora_B lora_A."""
    (ours,), out = run_ranks(1, exported, str(folders / family), str(tmp_path)), tmp_path
    auto = AutoModelForImageTextToText if family == "qwen3_5_moe" else AutoModelForCausalLM
    base, merged = (
        auto.from_pretrained(each, dtype=torch.float32).eval() for each in (folders / family, out / "export")
    )
    assert (base(IDS).logits - ours).abs().max() > 1e-2
    tensors = load_file(out / "adapter" / "adapter_model.safetensors")
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == family, "others see no local path"
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    assert {name.rpartition(".")[2] for name in modules} == {*config["target_modules"]}
    for name in modules:
        A, B = (tensors[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
        weight_of(base, name).add_(config["lora_alpha"] / config["r"] * B @ A)
    torch.testing.assert_close(merged(IDS).logits, ours, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(base(IDS).logits, ours, rtol=1e-4, atol=1e-4)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def converted(*arguments: str) -> str:
    """Return what ``eqlen convert megatron-to-hf`` writes to stderr when it refuses; empty: it did not."""
    from megatron_eqlen.cli import convert  # hides GPUs

    with contextlib.redirect_stderr(io.StringIO()) as err:
        return err.getvalue() if convert.main("megatron-to-hf", [*arguments]) else ""


def both_conversions(folder: str, out: str) -> list[str]:
    source, target = f"{out}/checkpoints", f"{out}/converted"
    return [
        converted(source, target, "--source", folder, "--verify"),
        converted(source, f"{target}-adapter", "--source", folder, "--adapter"),
        converted(source, f"{target}-again", "--source", folder, "--verify", "logits"),
    ]


def test_a_checkpoint_of_adapters_converts_to_both_exports_bit_for_bit(folders, tmp_path):
    folder, changes = str(folders / "qwen3_next"), layout(2, tensor=2, expert=2)
    run_ranks(2, exported, folder, str(tmp_path), changes)
    *refused, logits = run_ranks(1, both_conversions, folder, str(tmp_path))[0]
    assert not any(refused), refused
    assert "are merged with rounding, so their logits are not compared" in logits
    assert not (tmp_path / "converted-again").exists(), "refused before the conversion"
    for ours, theirs in (("converted", "export"), ("converted-adapter", "adapter")):
        assert bytes_of(tmp_path / ours) == bytes_of(tmp_path / theirs)


def refusals(folders: str, target: str) -> list[str]:
    """Return the errors of conversions and resumed runs whose base or adapters are others."""
    from megatron_eqlen.cli import convert

    source, base = f"{target}/checkpoints", f"{folders}/qwen3"
    save_tiny(Path(target, "wider"), "qwen3", num_hidden_layers=2, intermediate_size=128)
    save_tiny(Path(target, "longer"), "qwen3", num_hidden_layers=3)
    bases = f"{target}/nowhere", f"{target}/wider", f"{target}/longer", f"{folders}/qwen3_moe"
    bases += (f"{target}/export",)  # the adapters would be added once more
    errors = [converted(source, f"{target}/out", "--source", other) for other in bases]
    assert convert.main("hf-to-megatron", [base, f"{target}/whole"]) == 0
    errors.append(converted(f"{target}/whole", f"{target}/out", "--source", base, "--adapter"))
    start(ParallelRecipe(), seed=1)
    for lora in ({"rank": 4, "alpha": 5}, {"rank": 3, "alpha": 5, "targets": ["mlp"]}, {"rank": 0}):
        with pytest.raises(CheckpointError) as refused:
            saved_state.load(Path(source), Policy(Job(recipe_of(base, {"lora": lora}))))
        errors.append(str(refused.value))
    with pytest.raises(CheckpointError) as refused:
        saved_state.load(Path(source), Policy(Job(recipe_of(f"{target}/export", WITH_LORA))))
    return [*errors, str(refused.value)]


def test_another_base_rank_or_target_is_refused_by_name(folders, tmp_path):
    run_ranks(1, exported, str(folders / "qwen3"), str(tmp_path))
    (found,) = run_ranks(1, refusals, str(folders), str(tmp_path))
    expected = [
        r"nowhere: no such folder",
        r"linear_fc1\.adapter\.B\.0: expected shape \(128, 3\), found \(96, 3\)",
        r"lacks decoder\.layers\.2\..*adapter",
        r"lacks .*mlp\..*adapter",
        r"step-00000001: expected the model that its adapters were trained on, found \S+/export\n",
        r"expected a checkpoint of adapters, found one of all weights",
        r"expected lora\.rank 4, lora\.alpha 5\.0, lora\.targets None, as in the recipe, found lora\.rank 3,",
        r"lora\.targets \['mlp'\], as in the recipe, found lora\.rank 3, .*, lora\.targets None",
        r"expected lora\.rank 0, as in the recipe, found lora\.rank 3",
        r"step-00000001: expected the model that its adapters were trained on, found \S+/export$",
    ]
    for message, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, message), message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rank", "targets", "message"), [
    (3, ("mlp", "experts"), r"lora.targets: a qwen3 model has no experts: expected some of attention, mlp"),
    (65, None, r"lora.rank: 65 is above the rank of decoder\S+, which has \d+ rows and \d+ columns"),
])  # fmt: skip
def test_adapters_that_the_model_has_no_place_for_are_refused(folders, rank, targets, message):
    adapter_map(read_config(folders / "qwen3"), 64, None)
    with pytest.raises(ValueError, match=message):
        adapter_map(read_config(folders / "qwen3"), rank, targets)


def linear_layers(model: torch.nn.Module) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the linear layers of Transformers' model, [out, in] by target and name, but for the head and
    those that weight experts."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", "gate")):
            part = name.split(".")[3]
            target = {"self_attn": "attention", "linear_attn": "delta_net", "mlp": "mlp"}[part]
            found.setdefault(target, {})[name] = (module.out_features, module.in_features)
        elif (fused := getattr(module, "gate_up_proj", None)) is not None and fused.dim() == 3:
            experts, rows, columns = fused.shape
            for expert in range(experts):
                sizes = {"gate_proj": (rows // 2, columns), "up_proj": (rows // 2, columns)}
                for kind, size in (sizes | {"down_proj": (columns, rows // 2)}).items():
                    found.setdefault("experts", {})[f"{name}.{expert}.{kind}"] = size
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_transformers_has_an_adapter_of_its_target(family, tmp_path):
    """Numbers of layers and experts have two digits. The rank is at most that of each matrix of Megatron's,
    of which those that join the residual stream are one of Transformers' each."""
    experts = "n_routed_experts" if family == "glm4_moe" else "num_experts"
    config = tiny_config(family, num_hidden_layers=12, intermediate_size=24, **{experts: 11})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        expected = linear_layers(AutoModelForCausalLM.from_config(config))
    model = read_config(tmp_path)
    for targets, layers in [((target,), expected[target]) for target in expected] + [
        (None, {name: size for of_target in expected.values() for name, size in of_target.items()})
    ]:
        most = min(min(size) for name, size in layers.items() if re.search(r"\.(o|out|down)_proj$", name))
        found = [each for weights in adapter_map(model, most, targets) for each in named_shapes(weights)]
        assert len(found) == len(dict(found)) == 2 * len(layers)
        assert dict(found) == {
            f"base_model.model.{name}.lora_{matrix}.weight": shape
            for name, (rows, columns) in layers.items()
            for matrix, shape in (("A", (most, columns)), ("B", (rows, most)))
        }
        with pytest.raises(ValueError, match=rf"^lora.rank: {most + 1} is .*: expected at most {most}$"):
            adapter_map(model, most + 1, targets)


def named_shapes(adapter: AdapterWeights) -> list[tuple[str, tuple[int, ...]]]:
    """Return the tensors of an adapter by the names in a PEFT folder, with their shapes."""
    own = {adapter.A.hf[0]: adapter.A.shapes[0], **dict(zip(adapter.B.hf, adapter.B.shapes, strict=True))}
    return [(name, own[stored]) for name, stored in peft_tensors(adapter)]


@pytest.mark.parametrize(("base", "named"), [
    ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
    ("runs/mine/export", "export"),
])  # fmt: skip
def test_an_adapter_names_the_base_model_as_the_hub_does(folders, base, named):
    """PEFT loads the base model by this name."""
    adapters = adapter_map(read_config(folders / "qwen3"), 4, ("attention",))
    config = peft_config(adapters, 4, 8.0, base)
    assert config["base_model_name_or_path"] == named
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
