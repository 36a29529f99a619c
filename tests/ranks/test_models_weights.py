"""Weights move between Hugging Face folders and every parallel layout without a changed bit."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_eqlen.files import read_json, write_json
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.hf.folder import HFFolder, WeightsError, check_folder
from megatron_eqlen.models import weights
from megatron_eqlen.models.names import global_name
from megatron_eqlen.models.weights import export_hf, save_hf
from tests.kit.distributed import run_ranks
from tests.kit.marks import weekly
from tests.kit.tiny_models import save_tiny, tiny_config
from tests.kit.updates import build_chunks, build_policy, one_tree_a_row

LAYOUTS = {
    "llama": [(2, {"pipeline": 2})],
    "qwen2": [(2, {"tensor": 2})],
    "qwen3": [(4, {"tensor": 2, "pipeline": 2}), (2, {"pipeline": 2, "virtual_pipeline": 2})],
    "qwen3_moe": [(4, {"pipeline": 2, "expert": 2, "layers_per_stage": [1, 3]})],
    "glm4_moe": [(4, {"pipeline": 2, "tensor": 2, "expert": 2})],
    "qwen3_5_moe": [(2, {"tensor": 2, "expert": 2})],
    "qwen3_next": [(4, {"tensor": 2, "pipeline": 2, "expert": 2})],
}  # fmt: skip
CASES = [
    weekly(family, *case) if family in ("llama", "glm4_moe") else (family, *case)
    for family, cases in LAYOUTS.items()
    for case in cases
]


def load_and_save(folder: str, layout: dict, out: str, dtype: torch.dtype) -> set[str]:
    """Return on each rank the names of tensors that the export gave this rank whole and equal to the file."""
    chunks = build_chunks(folder, layout, dtype, load=True)
    save_hf(chunks, folder, out)
    stored = load_file(f"{folder}/model.safetensors") if out.endswith("one-file") else None
    return {name for name, tensor in export_hf(chunks) if stored is None or torch.equal(tensor, stored[name])}


@pytest.mark.parametrize(("family", "world_size", "layout"), CASES)
def test_round_trip_is_exact_on_every_rank(tmp_path, family, world_size, layout):
    source, out = tmp_path / "hf", tmp_path / "one-file"
    save_tiny(source, family)
    exported = run_ranks(world_size, load_and_save, str(source), layout, str(out), torch.float32)
    names = {name for name in load_file(source / "model.safetensors") if ".visual." not in name}
    assert all(rank == names for rank in exported)
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_routers_bias_stays_in_float32_between_weights_in_bfloat16(tmp_path):
    """As GLM's are published; a stage sends them to the others."""
    source, out = tmp_path / "hf", tmp_path / "one-file"
    save_tiny(source, "glm4_moe", num_hidden_layers=2)
    tensors = load_file(source / "model.safetensors")
    halves = {name: each if "correction" in name else each.bfloat16() for name, each in tensors.items()}
    save_file(halves, source / "model.safetensors", metadata={"format": "pt"})
    exported = run_ranks(2, load_and_save, str(source), {"pipeline": 2}, str(out), torch.bfloat16)
    assert all(rank == tensors.keys() for rank in exported)
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def broadcasts_and_names(folder: str, layout: dict, sent_at_once: int) -> tuple[int, set[str]]:
    """Return the number of messages of an export, and the names of tensors that it gives equal to the
    file's."""
    sent = []
    broadcast = dist.broadcast
    weights.SENT_AT_ONCE = sent_at_once
    chunks = build_chunks(folder, layout, load=True)
    with mock.patch.object(dist, "broadcast", lambda *a, **k: (sent.append(1), broadcast(*a, **k))):
        exported = list(weights.export_hf(chunks))
    stored = load_file(f"{folder}/model.safetensors")
    return len(sent), {name for name, tensor in exported if torch.equal(tensor, stored[name])}


def test_an_export_sends_many_weights_in_one_message_and_the_same_bits(tmp_path):
    save_tiny(tmp_path, "qwen3_moe")
    names = set(load_file(tmp_path / "model.safetensors"))
    layout = {"pipeline": 2, "expert": 2}
    alone, together = (run_ranks(4, broadcasts_and_names, str(tmp_path), layout, n) for n in (1, 2**30))
    assert [found for _, found in alone + together] == 8 * [names]
    assert max(count for count, _ in together) * 3 < min(count for count, _ in alone)


@pytest.fixture
def published(tmp_path):
    """Write a bfloat16 Qwen3-Next folder as it is published: sharded, with an MTP layer and a tokenizer's
    files."""
    folder = tmp_path / "published"
    save_tiny(folder, "qwen3_next")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    write_json(folder / "config.json", read_json(folder / "config.json") | {"dtype": "bfloat16"})
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.randn(7, 5).bfloat16()
    tensors["mtp.pre_fc_norm_embedding.weight"] = torch.randn(11)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, here in shards.items():
        save_file({name: tensors[name] for name in here}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {name: file for file, here in shards.items() for name in here},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    texts = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    (folder / "additional_chat_templates").mkdir()
    for file in (*texts, "additional_chat_templates/tool_use.jinja"):
        (folder / file).write_text(f"contents of {file}")
    return folder


def contents(folder) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_a_published_folder_comes_back_file_by_file(tmp_path, published):
    """This covers shards, index, dtypes, tokenizer, generation settings, chat templates and the untrained MTP
    layer."""
    out = tmp_path / "out"
    layout = {"tensor": 2, "expert": 2}
    run_ranks(2, load_and_save, str(published), layout, str(out), torch.bfloat16)
    assert contents(out) == contents(published)
    assert {file.stat().st_mode & 0o777 for file in out.glob("*.safetensors")} == {out.stat().st_mode & 0o666}


def trained_and_exported(folder: str, out: str, dtype: str) -> dict[str, torch.Tensor]:
    """Return the weights of a policy after an update, which it exported."""
    policy = build_policy(folder, {"model": {"path": folder, "dtype": dtype}})
    policy.update([one_tree_a_row(2)])
    policy.export(Path(out))
    return {name: tensor.clone() for name, tensor in policy.weights()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_export_is_the_trained_policy_bit_for_bit(tmp_path, published, dtype):
    """In float32 a bfloat16 folder's weights would be rounded to what they were before small updates."""
    out, source = tmp_path / "out", load_folder(published)
    (trained,) = run_ranks(1, trained_and_exported, str(published), str(out), dtype)
    written, config = load_folder(out), read_json(out / "config.json")
    assert written.keys() == source.keys()
    for name, tensor in (source | trained).items():
        assert torch.equal(written[name], tensor.to(written[name].dtype)), name
        assert written[name].dtype == torch.promote_types(source[name].dtype, getattr(torch, dtype)), name
    assert config == read_json(published / "config.json") | ({"dtype": dtype} if dtype == "float32" else {})
    size = read_json(out / "model.safetensors.index.json")["metadata"]["total_size"]
    assert size == (sum(tensor.nbytes for tensor in written.values()) if dtype == "float32" else 1)


def test_a_wider_export_says_so_in_each_part_of_its_config(tmp_path):
    """Transformers and vLLM take the dtype of the text model from its own section."""
    source, out = tmp_path / "hf", tmp_path / "out"
    save_tiny(source, "qwen3_5_moe")
    config = read_json(source / "config.json")
    config |= {"dtype": "bfloat16", "text_config": config["text_config"] | {"dtype": "bfloat16"}}
    write_json(source / "config.json", config)
    tensors = load_file(source / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, source / "model.safetensors", metadata={"format": "pt"})
    run_ranks(1, save_wide, str(source), str(out))
    text = config["text_config"] | {"dtype": "float32"}
    assert read_json(out / "config.json") == config | {"dtype": "float32", "text_config": text}
    assert {tensor.dtype for tensor in load_folder(out).values()} == {torch.float32}


def save_wide(folder: str, out: str) -> None:
    save_hf(build_chunks(folder, {}, torch.float32, load=True), folder, out, torch.float32)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def test_fused_experts_are_read_and_written_one_by_one(tmp_path):
    """Transformers 5 fuses experts in memory; a folder may hold them so too."""
    model = save_tiny(tmp_path / "hf", "qwen3_moe")
    per_expert = load_file(tmp_path / "hf" / "model.safetensors")
    assert any(".experts.0." in name for name in per_expert), "Transformers writes experts one by one"
    fused = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    save_file(fused, tmp_path / "hf" / "model.safetensors")
    run_ranks(2, load_and_save, str(tmp_path / "hf"), {"expert": 2}, str(tmp_path / "out"), torch.float32)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == per_expert.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in per_expert.items())


def test_a_head_stored_beside_tied_embeddings_follows_them(tmp_path):
    source = tmp_path / "hf"
    save_tiny(source, "qwen3", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    run_ranks(2, load_change_and_save, str(source), {"pipeline": 2}, str(tmp_path / "out"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"] + 1)
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])


def load_change_and_save(folder: str, layout: dict, out: str) -> None:
    """Change every weight, as training does."""
    chunks = build_chunks(folder, layout, load=True)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.add_(1)
    save_hf(chunks, folder, out)


def logits(folder: str, ids: torch.Tensor) -> torch.Tensor:
    (chunk,) = build_chunks(folder, {}, load=True)
    with torch.no_grad():
        return chunk.eval()(ids, torch.arange(ids.shape[1])[None])


def test_a_head_that_differs_is_used_as_by_transformers_once_the_config_is_not_tied(tmp_path):
    """Transformers does not tie them in spite of the config. Here the folder is refused by name (vLLM would
    tie them), and the change that the message asks for gives Transformers' logits."""
    save_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(96, 64)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(20)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(ids).logits
    with pytest.raises(RuntimeError, match=r"tie_word_embeddings: true, but lm_head\.weight differs"):
        run_ranks(1, logits, str(tmp_path), ids)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    (ours,) = run_ranks(1, logits, str(tmp_path), ids)
    assert (ours - theirs).abs().max() < 1e-4


def reshape(folder) -> None:
    name = "model.embed_tokens.weight"
    file = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(folder / file)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, folder / file)


def drop(folder) -> None:
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["model.norm.weight"]
    for file in set(weight_map.values()):
        tensors = load_file(folder / file)
        tensors.pop("model.norm.weight", None)
        save_file(tensors, folder / file)
    index.write_text(json.dumps({"weight_map": weight_map}))


BROKEN = {
    "wrong shape": (reshape, r"expected shape \(.*\), found \("),
    "missing tensor": (drop, "model.norm.weight is missing"),
    "another family": (
        tiny_config("qwen3_moe").save_pretrained,
        "expected a qwen3_next model, found qwen3_moe",
    ),
    "no folder": (shutil.rmtree, "no such"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_folders_are_named(published, fault):
    model = read_config(published)
    damage, message = BROKEN[fault]
    damage(published)
    with pytest.raises(WeightsError, match=message):
        check_folder(HFFolder(published), model)


def test_existing_output_is_left_alone(tmp_path, published):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    with pytest.raises(RuntimeError, match="exists already"):
        run_ranks(1, load_and_save, str(published), {}, str(out), torch.bfloat16)
    assert contents(out) == {"mine": b"precious"}


TRANSFORMER_ENGINE_NAMES = {
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.2.input_layernorm.weight",
    "decoder.layers.2.self_attention.in_proj.layer_norm_weight": "decoder.layers.3.input_layernorm.weight",
    "decoder.layers.3.mlp.linear_fc1.layer_norm_weight": "decoder.layers.3.pre_mlp_layernorm.weight",
    "decoder.layers.1.mlp.experts.linear_fc2.weight3": (
        "decoder.layers.2.mlp.experts.local_experts.7.linear_fc2.weight"
    ),
    "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight": (
        "decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight"
    ),
    "decoder.final_norm.weight": "decoder.final_norm.weight",
}


def names_on_the_last_rank(folder: str) -> dict[str, str]:
    (chunk,) = build_chunks(folder, {"pipeline": 2, "expert": 2})
    return {name: global_name(chunk, name) for name in TRANSFORMER_ENGINE_NAMES}


def test_names_of_both_layer_specs_lead_to_the_same_map(tmp_path):
    """The rank is the second of two pipeline stages, and the second of two expert ranks: four layers, eight
    experts. A layer is two of Megatron's."""
    tiny_config("qwen3_moe", num_experts=8).save_pretrained(tmp_path)
    assert run_ranks(4, names_on_the_last_rank, str(tmp_path))[3] == TRANSFORMER_ENGINE_NAMES
