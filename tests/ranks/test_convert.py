"""The converters: exact for every layout, atomic, and clear about bad input."""

import contextlib
import io
import os
import pickle
import re
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_eqlen.models.checkpoint_folder import CheckpointError
from megatron_eqlen.models.convert import hf_to_megatron, megatron_to_hf, verify_hash, verify_logits
from megatron_eqlen.models.groups import start
from megatron_eqlen.models.torch_dist import content_metadata, find_checkpoint, load_sharded
from megatron_eqlen.models.weights import export_hf
from megatron_eqlen.processes.distributed import SECRET, leave
from megatron_eqlen.recipe import ParallelRecipe
from tests.kit.distributed import run_ranks
from tests.kit.gpt_checkpoints import save_gpt
from tests.kit.marks import slow, weekly_but
from tests.kit.tiny_models import SHORT, save_tiny
from tests.kit.updates import build_chunks

LAYOUTS = {
    "qwen2": (4, {"tensor": 2, "pipeline": 2}),
    "qwen3": (2, {"pipeline": 2}),
    "glm4_moe": (2, {"tensor": 2, "expert": 2}),
    "qwen3_next": (2, {"tensor": 2, "expert": 2}),
    "qwen3_5_moe": (2, {"tensor": 2, "expert": 2}),
}


def state_of(chunks: list) -> dict:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"model": chunks[0].sharded_state_dict(metadata={"dp_cp_group": group})}


def save_with_megatron(folder: str, layout: dict, checkpoint: str) -> None:
    """Load the folder in a layout and save it with Megatron's own checkpointing, as training does."""
    from megatron.core import dist_checkpointing

    chunks = build_chunks(folder, layout, load=True)
    if dist.get_rank() == 0:
        Path(checkpoint).mkdir()
    dist.barrier()
    dist_checkpointing.save(state_of(chunks), checkpoint)


def load_with_megatron(folder: str, layout: dict, checkpoint: str) -> bool:
    """Return on each rank whether Megatron's own loader gives the folder's weights."""
    from megatron.core import dist_checkpointing

    chunks = build_chunks(folder, layout)
    chunks[0].load_state_dict(dist_checkpointing.load(state_of(chunks), checkpoint)["model"])
    stored = load_file(f"{folder}/model.safetensors")
    return all(torch.equal(tensor, stored[name]) for name, tensor in export_hf(chunks))


def start_alone() -> None:
    start(ParallelRecipe(), seed=1)


def to_megatron(source: str, out: str) -> None:
    start_alone()
    hf_to_megatron(source, out)


def to_hf(checkpoint: str, source: str, out: str) -> None:
    start_alone()
    megatron_to_hf(checkpoint, source, out)


def verify(checkpoint: str, folder: str) -> tuple[str, float]:
    start_alone()
    return verify_hash(checkpoint, folder, folder), verify_logits(checkpoint, folder)


@pytest.mark.parametrize("family", weekly_but({"qwen2", "qwen3", "qwen3_next"}, LAYOUTS))
def test_a_checkpoint_of_any_layout_becomes_the_folder_again(tmp_path, family):
    """The layers of multi-token prediction, which are not trained, are copied from the source. The last stage
    of a tied model has a copy of the embeddings, which is no head of its own."""
    source, checkpoint, out = tmp_path / "hf", tmp_path / "trained", tmp_path / "out"
    save_tiny(source, family, **{"tie_word_embeddings": True} if family == "qwen3" else {})
    if family == "qwen3_next":
        tensors = load_file(source / "model.safetensors")
        drafting = {"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.randn(64)}
        save_file(tensors | drafting, source / "model.safetensors", metadata={"format": "pt"})
    world_size, layout = LAYOUTS[family]
    run_ranks(world_size, save_with_megatron, str(source), layout, str(checkpoint))
    run_ranks(1, to_hf, str(checkpoint), str(source), str(out))
    assert {file.name: file.read_bytes() for file in out.iterdir()} == {
        file.name: file.read_bytes() for file in source.iterdir()
    }


GPT = {
    "qwen3": (1, {}, {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "glm4_moe": (2, {"tensor": 2, "expert": 2}, {}),
    "qwen3_moe": (2, {"pipeline": 2}, {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "qwen3_next": (2, {"pipeline": 2}, {}),
}
"""Layers that are all alike, dense or with experts, of two kinds of MLP, and of two kinds of attention."""


@pytest.mark.parametrize("family", GPT)
def test_a_checkpoint_of_megatrons_gpt_model_becomes_the_folder_again(tmp_path, family):
    source, checkpoint, out = tmp_path / "hf", tmp_path / "gpt", tmp_path / "out"
    world_size, layout, changes = GPT[family]
    save_tiny(source, family, **changes)
    run_ranks(world_size, save_gpt, str(source), layout, str(checkpoint))
    run_ranks(1, to_hf, str(checkpoint), str(source), str(out))
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("family", ["qwen2", slow("qwen3_next")])
def test_a_converted_folder_loads_with_megatron_in_any_layout(tmp_path, family):
    source, out = tmp_path / "hf", tmp_path / "out"
    save_tiny(source, family)
    run_ranks(1, to_megatron, str(source), str(out))
    world_size, layout = LAYOUTS[family]
    assert all(run_ranks(world_size, load_with_megatron, str(source), layout, str(out)))
    digest, error = run_ranks(1, verify, str(out), str(source))[0]
    assert len(digest) == 64
    assert error <= 1e-4


def convert_in_parts(source: str, checkpoint: str, out: str, layout: dict) -> str:
    parallel = ParallelRecipe(**layout)
    start(parallel, seed=1)
    hf_to_megatron(source, checkpoint, parallel)
    megatron_to_hf(checkpoint, source, out, parallel)
    return verify_hash(checkpoint, out, source, parallel)


def test_processes_convert_a_model_that_is_divided_among_them(tmp_path):
    source, checkpoint, out = (str(tmp_path / name) for name in ("hf", "megatron", "out"))
    save_tiny(Path(source), "qwen3_next")
    layout = {"pipeline": 2, "expert": 2, "tensor": 2}
    digests = run_ranks(4, convert_in_parts, source, checkpoint, out, layout)
    assert len({*digests}) == 1
    assert Path(out, "model.safetensors").read_bytes() == Path(source, "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return (Hugging Face folder, its checkpoint)."""
    folder = tmp_path_factory.mktemp("converted")
    save_tiny(folder / "hf", "qwen3", num_hidden_layers=2)
    run_ranks(1, to_megatron, str(folder / "hf"), str(folder / "megatron"))
    return folder / "hf", folder / "megatron"


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def truncate(checkpoint: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at % len(data)] ^= 4
    file.write_bytes(data)


def without_manifest(damage):
    def both(checkpoint: Path) -> None:
        (checkpoint / "manifest.json").unlink()
        damage(checkpoint)

    return both


def remove(name: str):
    return lambda path: next(path.glob(name)).unlink()


def put(name: str, data: bytes):
    return lambda path: (path / name).write_bytes(data)


BROKEN = {
    "longer": (
        lambda path: put("metadata.json", (path / "metadata.json").read_bytes() + b" ")(path),
        "too long",
    ),
    "missing metadata": (remove(".metadata"), r"\.metadata: no such file"),
    "broken metadata": (put(".metadata", b"?"), r"\.metadata: truncated"),
    "not a checkpoint": (remove("metadata.json"), r"no metadata\.json"),
    "not JSON": (put("metadata.json", b"{"), r"metadata\.json: cannot be read"),
    "another manifest": (put("manifest.json", b'{"common.pt": 3}'), r"manifest\.json: damaged"),
    "a list as manifest": (put("manifest.json", b"[]"), r"manifest\.json: damaged"),
    "an empty manifest": (put("manifest.json", b"{}"), r"__0_0\.distcp: not in manifest\.json"),
    "foreign, truncated": (without_manifest(truncate), r"__0_0\.distcp: truncated: expected \d+ bytes"),
    "foreign, missing data": (without_manifest(remove("__0_0.distcp")), r"__0_0\.distcp: no such file"),
    "foreign, missing metadata": (without_manifest(remove(".metadata")), r"\.metadata: cannot be read"),
    "foreign, broken metadata": (without_manifest(put(".metadata", b"?")), r"\.metadata: cannot be read"),
    "foreign, other metadata": (without_manifest(put(".metadata", b"N.")), r"\.metadata: cannot be read"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_checkpoints_are_named(tmp_path, converted, fault):
    damage, message = BROKEN[fault]
    checkpoint = copied(converted[1], tmp_path / "checkpoint")
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(checkpoint)


class Payload:
    """Unpickling an instance makes the file ``made``."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple:
        return Path.touch, (self.made,)


def load_and_convert(checkpoint: str, source: str, out: str) -> list[str]:
    """Return the errors of each way to read a checkpoint."""
    chunks = build_chunks(source, {})
    return [
        refusal(lambda: megatron_to_hf(checkpoint, source, out)),
        refusal(lambda: load_sharded(state_of(chunks), Path(checkpoint))),
        refusal(lambda: content_metadata(Path(checkpoint))),
    ]


def refusal(read: Callable[[], Any]) -> str:
    """Return the error of reading a checkpoint."""
    with pytest.raises(CheckpointError) as raised:
        read()
    return str(raised.value)


def test_an_index_that_would_run_code_is_refused_before_it_does(tmp_path, converted):
    checkpoint, made = copied(converted[1], tmp_path / "foreign"), tmp_path / "made"
    (checkpoint / "manifest.json").unlink()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Payload(made)))
    arguments = (str(checkpoint), str(converted[0]), str(tmp_path / "out"))
    for error in run_ranks(1, load_and_convert, *arguments)[0]:
        assert re.search(r"foreign/\.metadata: names \S+, which no index of a checkpoint needs", error)
    assert not made.exists()


def saved_with_payload(source: str, checkpoint: str, made: Path) -> list[str]:
    """Save a model beside an object that runs code; return the errors of both ways to read it."""
    from megatron.core import dist_checkpointing

    chunks = build_chunks(source, {})
    Path(checkpoint).mkdir()
    dist_checkpointing.save({**state_of(chunks), "args": Payload(made)}, checkpoint)
    made.unlink(missing_ok=True)
    return [
        refusal(lambda: load_sharded(state_of(chunks), Path(checkpoint))),
        refusal(lambda: content_metadata(Path(checkpoint))),
    ]


def saved_without(source: str, checkpoint: str) -> tuple[str, str]:
    """Save a model without a weight, as other software or another version names it; return the error."""
    from megatron.core import dist_checkpointing

    chunks = build_chunks(source, {})
    state = state_of(chunks)
    name = next(iter(state["model"]))
    state["model"]["of_another_name"] = replace(state["model"].pop(name), key="of_another_name")
    Path(checkpoint).mkdir()
    dist_checkpointing.save(state, checkpoint)
    return name, refusal(lambda: load_sharded(state_of(chunks), Path(checkpoint)))


def test_a_checkpoint_without_the_models_tensors_is_refused_by_name(tmp_path, converted):
    checkpoint = tmp_path / "earlier"
    name, error = run_ranks(1, saved_without, str(converted[0]), str(checkpoint))[0]
    assert error.startswith(
        f"{checkpoint}: lacks {name}: another model's checkpoint, or an earlier version's?"
    )


def test_an_object_that_would_run_code_is_refused_before_it_does(tmp_path, converted):
    made = tmp_path / "made"
    errors = run_ranks(1, saved_with_payload, str(converted[0]), str(tmp_path / "foreign"), made)[0]
    assert all("common_state/shard_0_1: is no plain data" in error for error in errors)
    assert not made.exists()


def test_a_checkpoint_with_a_head_is_not_exported_as_a_tied_model(tmp_path, converted):
    """The head would be lost, and the rest would pass verification."""
    save_tiny(tmp_path / "tied", "qwen3", num_hidden_layers=2, tie_word_embeddings=True)
    with pytest.raises(RuntimeError, match=r"the model lacks output_layer\.weight"):
        run_ranks(1, to_hf, str(converted[1]), str(tmp_path / "tied"), str(tmp_path / "out"))
    with pytest.raises(RuntimeError, match=r"the model lacks output_layer\.weight"):
        run_ranks(1, verify, str(converted[1]), str(tmp_path / "tied"))
    assert {path.name for path in tmp_path.iterdir()} == {"tied"}


def with_integers(checkpoint: str, source: str, out: str, every: bool) -> None:
    """Save a model with a weight of integers, or with all of them, and convert it."""
    from megatron.core import dist_checkpointing

    chunks = build_chunks(source, {})
    for weight in chunks[0].parameters() if every else [chunks[0].decoder.final_norm.weight]:
        weight.requires_grad_(False).data = weight.data.int()
    Path(checkpoint).mkdir()
    dist_checkpointing.save(state_of(chunks), checkpoint)
    megatron_to_hf(checkpoint, source, out)


@pytest.mark.parametrize("every", [False, True])
def test_integers_in_a_checkpoint_are_no_weights(tmp_path, converted, every):
    paths = str(tmp_path / "integers"), str(converted[0]), str(tmp_path / "out")
    with pytest.raises(RuntimeError, match=r"weight: torch.int32 is not a weight's dtype"):
        run_ranks(1, with_integers, *paths, every)


def verified(checkpoint: str, folder: str, source: str) -> str:
    """Return the hash, or what differs."""
    start_alone()
    try:
        return verify_hash(checkpoint, folder, source)
    except CheckpointError as error:
        return str(error)


def test_weights_that_were_trained_in_a_wider_dtype_are_not_rounded(tmp_path):
    save_tiny(tmp_path / "trained", "qwen3")
    shutil.copytree(tmp_path / "trained", tmp_path / "origin")
    weights = load_file(tmp_path / "trained/model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(halves, tmp_path / "origin/model.safetensors", metadata={"format": "pt"})
    run_ranks(1, to_megatron, str(tmp_path / "trained"), str(tmp_path / "megatron"))
    run_ranks(1, to_hf, str(tmp_path / "megatron"), str(tmp_path / "origin"), str(tmp_path / "out"))
    written = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(written[name], tensor), name
    paths = str(tmp_path / "megatron"), str(tmp_path / "origin")
    assert "differs from" in run_ranks(1, verified, paths[0], str(tmp_path / "origin"), paths[1])[0]
    assert len(run_ranks(1, verified, paths[0], str(tmp_path / "out"), paths[1])[0]) == 64


def mixed(source: Path, small: torch.dtype, *floats: str) -> Path:
    """Store a folder's weights in ``small``, but for those with names that end in ``floats``."""
    weights = load_file(source / "model.safetensors")
    halves = {name: each if name.endswith(floats) else each.to(small) for name, each in weights.items()}
    save_file(halves, source / "model.safetensors", metadata={"format": "pt"})
    return source


def test_a_source_of_two_dtypes_rounds_nothing_that_was_trained_in_the_wider_one(tmp_path):
    """Qwen3.5 has ``A_log`` in float32 beside bfloat16."""
    save_tiny(tmp_path / "trained", "qwen3_next", **SHORT["qwen3_next"])
    shutil.copytree(tmp_path / "trained", tmp_path / "origin")
    mixed(tmp_path / "origin", torch.bfloat16, "A_log", "norm.weight")
    for trained in ("trained", "origin"):
        checkpoint, out = tmp_path / f"{trained}-megatron", tmp_path / f"{trained}-out"
        run_ranks(1, to_megatron, str(tmp_path / trained), str(checkpoint))
        run_ranks(1, to_hf, str(checkpoint), str(tmp_path / "origin"), str(out))
        weights, found = (load_file(folder / "model.safetensors") for folder in (tmp_path / trained, out))
        assert {name: each.dtype for name, each in found.items()} == {n: w.dtype for n, w in weights.items()}
        assert all(torch.equal(found[name], each) for name, each in weights.items())


@pytest.mark.parametrize(("own", "floats"), [
    (("A_log",), ()), (("A_log", "norm.weight"), ("A_log",)), (("",), ("embed_tokens.weight",)),
    (("A_log",), ("mtp.fc.weight",)), (("up_proj.weight",), ("up_proj.weight",)),
], ids=["one", "another", "all", "untrained", "one of two in one"])  # fmt: skip
def test_a_weight_that_a_checkpoint_alone_has_in_float32_is_not_rounded(tmp_path, own, floats):
    save_tiny(tmp_path / "trained", "qwen3_next", **SHORT["qwen3_next"])
    weights = load_file(tmp_path / "trained/model.safetensors") | {"mtp.fc.weight": torch.ones(64, 128)}
    save_file(weights, tmp_path / "trained/model.safetensors", metadata={"format": "pt"})
    shutil.copytree(tmp_path / "trained", tmp_path / "origin")
    mixed(tmp_path / "trained", torch.bfloat16, *own)
    mixed(tmp_path / "origin", torch.bfloat16, *floats)
    run_ranks(1, to_megatron, str(tmp_path / "trained"), str(tmp_path / "megatron"))
    run_ranks(1, to_hf, str(tmp_path / "megatron"), str(tmp_path / "origin"), str(tmp_path / "out"))
    weights, found = (load_file(tmp_path / name / "model.safetensors") for name in ("trained", "out"))
    assert all(torch.equal(found[name].double(), each.double()) for name, each in weights.items())


def test_the_routers_bias_in_float32_widens_no_weight(tmp_path):
    save_tiny(tmp_path / "hf", "glm4_moe", **SHORT["glm4_moe"])
    source = mixed(tmp_path / "hf", torch.bfloat16)
    run_ranks(1, to_megatron, str(source), str(tmp_path / "megatron"))
    run_ranks(1, to_hf, str(tmp_path / "megatron"), str(source), str(tmp_path / "out"))
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_another_models_checkpoint_is_refused_before_anything_is_written(tmp_path, converted):
    save_tiny(tmp_path / "wider", "qwen3", num_hidden_layers=2, intermediate_size=128)
    with pytest.raises(RuntimeError, match=r"linear_fc1.weight: expected shape .*, found"):
        run_ranks(1, to_hf, str(converted[1]), str(tmp_path / "wider"), str(tmp_path / "out"))
    assert {path.name for path in tmp_path.iterdir()} == {"wider"}


def changed_by_one_bit(checkpoint: str, source: str, folder: str) -> str:
    copied(Path(source), Path(folder))
    weights = load_file(Path(folder, "model.safetensors"))
    weights["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[0, 0] ^= 1
    save_file(weights, Path(folder, "model.safetensors"))
    return verified(checkpoint, folder, source)


def test_verification_finds_one_changed_bit(tmp_path, converted):
    source, checkpoint = converted
    (found,) = run_ranks(1, changed_by_one_bit, str(checkpoint), str(source), str(tmp_path / "changed"))
    assert "model.layers.1.mlp.up_proj.weight differs" in found


def command(name: str, *args: str) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr) of a converter's command."""
    from megatron_eqlen.cli import convert as convert_command

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = convert_command.main(name.replace("_", "-"), list(args))
    return status, out.getvalue(), err.getvalue()


def test_the_commands_convert_verify_and_explain(tmp_path, converted):
    source, there, back = (str(path) for path in (converted[0], tmp_path / "megatron", tmp_path / "hf"))
    status, out, err = run_ranks(1, command, "hf_to_megatron", source, there, "--verify", "logits")[0]
    assert status == 0, err
    assert "same weights: sha256" in out
    assert "same logits" in out
    arguments = ("megatron_to_hf", there, back, "--source", source, "--verify")
    status, _, err = run_ranks(1, command, *arguments)[0]
    assert status == 0, err
    assert Path(back, "model.safetensors").read_bytes() == Path(source, "model.safetensors").read_bytes()
    status, _, err = run_ranks(1, command, *arguments)[0]
    assert status == 2
    assert "exists already" in err
    assert "Traceback" not in err


def test_a_source_that_is_no_model_is_explained_and_leaves_nothing(tmp_path, converted):
    save_tiny(tmp_path / "bad", "qwen3", num_hidden_layers=2)
    flip(tmp_path / "bad" / "model.safetensors", 3)
    source, out = str(tmp_path / "bad"), str(tmp_path / "out")
    for arguments in (
        ("hf_to_megatron", source, out, "--verify"),
        ("megatron_to_hf", str(converted[1]), out, "--source", source, "--verify"),
    ):
        status, _, err = run_ranks(1, command, *arguments)[0]
        assert status == 2
        assert "model.safetensors: not a safetensors file, or truncated" in err
        assert {path.name for path in tmp_path.iterdir()} == {"bad"}


def on_a_full_disk(*arguments: str) -> tuple[int, str, str]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    return command(*arguments)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, converted):
    source, out = str(converted[0]), str(tmp_path / "out")
    for arguments in (
        ("hf_to_megatron", source, out),
        ("megatron_to_hf", str(converted[1]), out, "--source", source),
    ):
        status, _, err = run_ranks(1, on_a_full_disk, *arguments)[0]
        assert status == 2
        assert re.search(r"/\.?out\S*: could not be written: .+ \(\d+\.\d\d GB free\)\n$", err)
        assert not [*tmp_path.iterdir()]


def convert_and_die(source: str, out: str) -> None:
    from megatron.core import dist_checkpointing

    start_alone()
    dist_checkpointing.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    hf_to_megatron(source, out)


def test_a_conversion_killed_with_9_leaves_a_folder_that_the_next_one_names(tmp_path, converted):
    arguments = str(converted[0]), str(tmp_path / "out")
    with pytest.raises(RuntimeError, match="died without an answer"):
        run_ranks(1, convert_and_die, *arguments)
    with pytest.raises(RuntimeError, match=r"was killed and left \S*/\.out\.partial: remove it"):
        run_ranks(1, to_megatron, *arguments)
    shutil.rmtree(tmp_path / ".out.partial")
    run_ranks(1, to_megatron, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("arguments", [
    ("hf_to_megatron", "nowhere", "out"), ("megatron_to_hf", "nowhere", "out", "--source", "nowhere"),
])  # fmt: skip
def test_the_commands_name_a_missing_folder(arguments):
    status, _, err = run_ranks(1, command, *arguments)[0]
    assert status == 2
    called = f"eqlen convert {arguments[0].replace('_', '-')}"
    assert err.strip().splitlines()[-1] == f"{called}: nowhere: no such folder"


def without_a_secret(*arguments: str) -> tuple[int, str, str]:
    """Run a converter's command as the first of two nodes."""
    leave()
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    os.environ.pop(SECRET, None)
    return command(*arguments)


def test_what_is_wrong_before_processes_meet_is_said_alone():
    status, _, err = run_ranks(1, without_a_secret, "hf_to_megatron", "hf", "out", "--tensor", "2")[0]
    assert status == 2
    assert re.search(rf"^eqlen convert hf-to-megatron: {SECRET}: expected a secret .*\n\Z", err)


def visible_gpus() -> tuple[str | None, bool]:
    from megatron_eqlen.cli import convert as convert_command

    assert convert_command
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available()


def test_the_commands_see_no_gpu():
    """Otherwise a CUDA context would take memory of a GPU that trains."""
    assert run_ranks(1, visible_gpus) == [("", False)]
