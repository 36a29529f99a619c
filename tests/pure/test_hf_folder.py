"""Hugging Face folders are read as by Transformers and the safetensors library; faulty ones are named."""

import json
import logging
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_eqlen.engines.weight_table import WeightTable
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.hf.folder import (
    INDEX,
    SINGLE,
    FolderWriter,
    HFFolder,
    WeightsError,
    check_folder,
    save_tensors,
)
from tests.kit.tiny_models import save_tiny

HEADER = b'{"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}'


@pytest.mark.parametrize("content", [
    b"",
    struct.pack("<Q", 1 << 60) + b"{}",
    struct.pack("<Q", 1) + b"{",
    struct.pack("<Q", len(HEADER)) + HEADER + bytes(3),
    struct.pack("<Q", len(HEADER)) + HEADER + bytes(5),
], ids=["empty", "a header longer than the file", "no JSON", "truncated", "bytes at the end"])  # fmt: skip
def test_malformed_files_are_named(tmp_path, content):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors: not a safetensors file, or truncated: "):
        HFFolder(tmp_path)


@pytest.mark.parametrize(("rights", "expected"), [(0o755, 0o644), (0o2775, 0o664), (0o700, 0o600)])
def test_weights_have_the_rights_of_their_folder(tmp_path, rights, expected):
    """Whoever may read a configuration, a server of another user for instance, may read its weights."""
    tmp_path.chmod(rights)
    save_tensors({"w": torch.ones(2)}, tmp_path / SINGLE)
    assert (tmp_path / SINGLE).stat().st_mode & 0o777 == expected
    assert load_file(tmp_path / SINGLE)["w"].tolist() == [1, 1]


def test_weights_are_written_where_files_have_no_rights(tmp_path, monkeypatch):
    def refused(path, mode):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "chmod", refused)
    save_tensors({"w": torch.ones(2)}, tmp_path / SINGLE)
    assert load_file(tmp_path / SINGLE)["w"].tolist() == [1, 1]


@pytest.fixture
def tiny(tmp_path):
    save_tiny(tmp_path / "hf", "qwen3", num_hidden_layers=2)
    return tmp_path / "hf"


def shard(folder, scale: float = 1.0) -> None:
    """Save the folder's weights, scaled, as two files with an index."""
    tensors = {name: weight * scale for name, weight in load_file(folder / SINGLE).items()}
    halves = {f"model-0000{n + 1}-of-00002.safetensors": sorted(tensors)[n::2] for n in range(2)}
    for file, here in halves.items():
        save_file({name: tensors[name] for name in here}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, here in halves.items() for name in here}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_integers_beside_weights_stay_as_they_are(tiny, tmp_path):
    weights = load_file(tiny / SINGLE) | {"model.positions": torch.arange(1000)}
    save_file(weights, tiny / SINGLE, metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    FolderWriter(tmp_path / "out", HFFolder(tiny), torch.bfloat16).finish()
    written = load_file(tmp_path / "out" / SINGLE)
    assert {name: tensor.dtype for name, tensor in written.items()} == {
        n: t.dtype for n, t in weights.items()
    }
    assert torch.equal(written["model.positions"], weights["model.positions"])
    assert (tmp_path / "out/config.json").read_bytes() == (tiny / "config.json").read_bytes()


def test_a_folder_saved_twice_is_read_as_transformers_reads_it(tiny, caplog):
    shard(tiny, scale=0.5)
    theirs = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).state_dict()
    with caplog.at_level(logging.WARNING):
        folder = HFFolder(tiny)
    assert f"{tiny / INDEX}: ignored as stale" in caplog.text
    for name in folder.entries:
        assert torch.equal(folder.tensor(name), theirs[name]), name


def test_a_folder_that_vllm_reads_otherwise_is_named(tiny, caplog):
    HFFolder(tiny).check_vllm_reads_the_same()
    shard(tiny, scale=0.5)
    with pytest.raises(WeightsError, match=r"vLLM would load model-00001-of-00002\.safetensors, model-"):
        HFFolder(tiny).check_vllm_reads_the_same()
    (tiny / SINGLE).unlink()
    HFFolder(tiny).check_vllm_reads_the_same()
    (tiny / "adapter.safetensors").write_bytes(b"")
    HFFolder(tiny).check_vllm_reads_the_same()


@pytest.mark.parametrize("files", [
    ["model.safetensors"], ["model.safetensors", "extra.safetensors"], ["a.safetensors", "b.safetensors"],
])  # fmt: skip
@pytest.mark.parametrize("indexed", [0, 1, 2])
@pytest.mark.slow  # imports vLLM
def test_vllms_own_choice_of_files_is_known(tmp_path, files, indexed):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    for number, file in enumerate(files):
        save_file({f"w{number}": torch.zeros(2)}, tmp_path / file)
    if indexed:
        weight_map = {f"w{number}": file for number, file in enumerate(files[:indexed])}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    if files[0] == SINGLE or indexed:
        folder = HFFolder(tmp_path)
        theirs = DefaultModelLoader(LoadConfig())._prepare_weights(str(tmp_path), None, None, False, None)[1]
        try:
            folder.check_vllm_reads_the_same()
            same = True
        except WeightsError:
            same = False
        assert same == ({tmp_path / file for file in folder.files} == set(map(type(tmp_path), theirs)))


def change_index(change):
    def damage(folder) -> None:
        shard(folder)
        (folder / SINGLE).unlink()
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(change(index)))

    return damage


def mapped(**changes):
    return change_index(lambda index: {"weight_map": index["weight_map"] | changes})


def duplicate(folder) -> None:
    mapped()(folder)
    second = folder / "model-00002-of-00002.safetensors"
    head = load_file(folder / "model-00001-of-00002.safetensors")["lm_head.weight"]
    save_file(load_file(second) | {"lm_head.weight": head}, second)


BAD_INDEX = {
    "a list": (change_index(lambda index: [index]), "no weight_map"),
    "no map": (change_index(lambda index: {"weight_map": None}), "no weight_map"),
    "an empty map": (change_index(lambda index: {"weight_map": {}}), "no weight_map"),
    "a map of numbers": (mapped(w=3), "'w': expected the name of a file beside it, found 3"),
    "a file elsewhere": (mapped(w="../model.safetensors"), r"'w': expected the name .*, found '\.\./model"),
    "a file with a zero": (mapped(w="a\0b"), "'w': expected the name of a file beside it"),
    "a missing file": (mapped(w="gone.safetensors"), r"gone\.safetensors: no such file"),
    "a missing tensor": (mapped(w="model-00001-of-00002.safetensors"), "model-00001.*: w is missing"),
    "another file's tensor": (mapped(**{"lm_head.weight": "model-00002-of-00002.safetensors"}),
     "model-00002.*: lm_head.weight is missing, though"),
    "a tensor in two files": (duplicate, "lm_head.weight is in model-00001.* already"),
    "neither": (lambda folder: (folder / SINGLE).unlink(), "expected model.safetensors or .*, found neither"),
    "not UTF-8": (lambda folder: (mapped()(folder), (folder / INDEX).write_bytes(b'{"\xff": 1}')),
     "index.json: not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_INDEX)
def test_bad_indices_are_named(tiny, fault):
    damage, message = BAD_INDEX[fault]
    damage(tiny)
    with pytest.raises(WeightsError, match=message):
        HFFolder(tiny)


def rewrite(folder, **changes) -> None:
    tensors = load_file(folder / SINGLE)
    save_file(tensors | changes, folder / SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_dtypes_that_no_weight_has_are_refused(tiny, dtype):
    rewrite(tiny, **{"model.norm.weight": torch.ones(64).to(dtype)})
    with pytest.raises(WeightsError, match=r"safetensors: model\.norm\.weight: .* not a weight's dtype"):
        check_folder(HFFolder(tiny), read_config(tiny))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floating_point_dtypes_are_read(tiny, dtype):
    norm = torch.randn(64).to(dtype)
    rewrite(tiny, **{"model.norm.weight": norm})
    check_folder(folder := HFFolder(tiny), read_config(tiny))
    assert torch.equal(folder.tensor("model.norm.weight"), norm)


def test_tensors_that_nothing_expects_are_named_once_and_do_not_stop_a_sync(tiny, caplog):
    extra = {f"extra.{number}": torch.zeros(3, dtype=torch.int64) for number in range(5)}
    rewrite(tiny, **extra, **{"mtp.norm.weight": torch.zeros(3)})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            table = WeightTable.read(tiny)
    assert [record.message for record in caplog.records] == [
        f"{tiny}: the model has no use for extra.0, extra.1, extra.2 and 2 more: not trained"
    ]
    assert not any(name.startswith(("extra", "mtp")) for name in table.shapes)


@pytest.mark.parametrize("tied", [False, True])
def test_a_sync_brings_what_is_trained_and_nothing_else(tmp_path, tied):
    model = save_tiny(tmp_path, "qwen3", num_hidden_layers=2, tie_word_embeddings=tied)
    weights = dict(model.named_parameters())
    table = WeightTable.read(tmp_path)
    assert dict(table.check(weights.items())) == weights
    with pytest.raises(ValueError, match=r"weight 'model\.norm\.bias': not one .*: 'model\.norm\.weight'"):
        list(table.check((weights | {"model.norm.bias": torch.zeros(64)}).items()))
    weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"weights: 1 of \d+ missing, for example 'model\.norm\.weight'"):
        list(table.check(weights.items()))


@pytest.fixture
def fused(tmp_path):
    """Return a model's folder, whose experts are as Transformers 5 holds them in memory, and its tensors."""
    model = save_tiny(tmp_path, "qwen3_moe")
    single = load_file(tmp_path / SINGLE)
    fused = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    save_file(fused, tmp_path / SINGLE, metadata={"format": "pt"})
    return tmp_path, single


def test_fused_experts_are_read_one_by_one_from_a_file_or_by_an_index(fused):
    folder, single = fused
    assert WeightTable.read(folder).shapes == {name: tuple(weight.shape) for name, weight in single.items()}
    assert dict(WeightTable.read(folder).check(single.items())).keys() == single.keys()
    shard(folder)
    (folder / SINGLE).unlink()
    read = HFFolder(folder)
    assert all(torch.equal(read.tensor(name), weight) for name, weight in single.items())


@pytest.mark.parametrize("shape", [(8,), (64, 64), (8, 63, 64), (2, 4, 64, 64)])
def test_fused_experts_of_another_rank_are_named(fused, shape):
    rewrite(fused[0], **{"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(shape)})
    message = r"layers\.1\.mlp\.experts\.gate_up_proj: expected shape \[experts, 2 x"
    with pytest.raises(WeightsError, match=message):
        HFFolder(fused[0])


def tied_with_head(folder, head) -> None:
    # more rows than are compared at once
    save_tiny(folder, "qwen3", num_hidden_layers=2, tie_word_embeddings=True, vocab_size=5000)
    rewrite(folder, **{"lm_head.weight": head(load_file(folder / SINGLE)["model.embed_tokens.weight"])})


def with_another_last_row(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight[:-1], weight[-1:] + 1])


OTHERS = torch.zeros_like, torch.Tensor.bfloat16, lambda weight: weight + 1e-6, with_another_last_row


@pytest.mark.parametrize("head", OTHERS)
def test_a_head_that_differs_from_tied_embeddings_is_refused_by_name(tmp_path, head):
    """Transformers would not tie them, vLLM would: trainer and engine must be one model."""
    tied_with_head(tmp_path, head)
    for read in (lambda path: check_folder(HFFolder(path), read_config(path)), WeightTable.read):
        with pytest.raises(WeightsError, match=r"tie_word_embeddings: true, but lm_head\.weight differs"):
            read(tmp_path)


@pytest.mark.parametrize("head", [torch.clone, torch.Tensor.double])
def test_a_head_equal_to_tied_embeddings_is_no_matter(tmp_path, head):
    tied_with_head(tmp_path, head)
    check_folder(HFFolder(tmp_path), read_config(tmp_path))
    assert "lm_head.weight" not in WeightTable.read(tmp_path).shapes
