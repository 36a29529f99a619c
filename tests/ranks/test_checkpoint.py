"""A run's checkpoints: any damage is found, named, and costs no more than the steps since the one before."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megatron_eqlen.job import Job
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.models.checkpoint_folder import CheckpointError
from megatron_eqlen.models.groups import start
from megatron_eqlen.training import saved_state
from megatron_eqlen.training.policy import Policy
from tests.kit.distributed import run_ranks
from tests.kit.recipes import small
from tests.kit.tiny_models import save_tiny
from tests.kit.updates import heard, save

STEPS = (4, 8, 12)


def policy_of(model: str):
    from megatron.core import parallel_state

    limits = {"data__max_prompt_length": 16, "rollout__max_response_length": 16}
    recipe = small(model={"path": model, "dtype": "float32"}, **limits)
    if not parallel_state.is_initialized():
        start(recipe.parallel, recipe.seed)
    return Policy(Job(recipe))


def weight(policy) -> float:
    """Return the first element of the last norm, which ``save_steps`` sets to the step."""
    return float(dict(policy.chunks[0].named_parameters())["decoder.final_norm.weight"].detach()[0])


def save_steps(model: str, folder: str, steps: tuple[int, ...] = STEPS, keep: int = 3) -> None:
    policy = policy_of(model)
    for step in steps:
        with torch.no_grad():
            dict(policy.chunks[0].named_parameters())["decoder.final_norm.weight"].fill_(step)
        policy.version = 10 * step
        save(Path(folder), step, policy, {"data": f"at {step}"}, keep)


def load_newest(model: str, folder: str) -> tuple[dict | None, float, int, list[str]]:
    """Return (position, weight, policy version, warnings) on each rank, or the CheckpointError's message."""
    messages = heard()
    policy = policy_of(model)
    try:
        position = saved_state.load(Path(folder), policy)
    except CheckpointError as error:
        return str(error)
    return position, weight(policy), policy.version, [*messages]


def load_each(model: str, folders: list[str]) -> list:
    return [load_newest(model, folder) for folder in folders]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return (model, checkpoints of steps 4, 8 and 12 that two ranks wrote)."""
    folder = tmp_path_factory.mktemp("saved")
    save_tiny(folder / "hf", "qwen3", num_hidden_layers=2)
    run_ranks(2, save_steps, str(folder / "hf"), str(folder / "checkpoints"))
    return str(folder / "hf"), folder / "checkpoints"


@pytest.fixture
def checkpoints(tmp_path, saved):
    return shutil.copytree(saved[1], tmp_path / "checkpoints")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_on_another_number_of_ranks(saved, checkpoints):
    assert names(checkpoints) == ["latest", "step-00000004", "step-00000008", "step-00000012"]
    for found in run_ranks(1, load_newest, saved[0], str(checkpoints)):
        assert found == ({"step": 12, "policy_version": 120, "data": "at 12"}, 12.0, 120, [])


def data_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def cut(file: Path, count: int = 1) -> None:
    file.write_bytes(file.read_bytes()[:-count])


DAMAGES = {
    "a flipped bit": (lambda path: flip(data_file(path), 3000), r"\.distcp: damaged: expected crc32"),
    "the last bit": (lambda path: flip(data_file(path), -1), r"\.distcp: damaged: expected crc32"),
    "a flipped bit of the metadata": (lambda path: flip(path / ".metadata", 20), r"\.metadata: damaged"),
    "a flipped bit beside the tensors": (lambda path: flip(path / "metadata.json", 20),
     r"metadata\.json: damaged"),
    "a lost byte": (lambda path: cut(data_file(path)), r"\.distcp: truncated: expected \d+ bytes, found \d+"),
    "a lost file": (lambda path: data_file(path).unlink(), r"\.distcp: no such file"),
    "a lost manifest": (lambda path: (path / "manifest.json").unlink(), r"manifest\.json: no such file"),
    "half a manifest": (lambda path: cut(path / "manifest.json", 2), r"manifest\.json: not valid JSON"),
    "nothing left": (lambda path: [file.unlink() for file in path.iterdir()],
     r"manifest\.json: no such file"),
}  # fmt: skip


@pytest.fixture(scope="module")
def damaged(saved, tmp_path_factory):
    """Return damage -> (checkpoints whose newest has it, what each of two ranks loads of them)."""
    home = tmp_path_factory.mktemp("damaged")
    folders = [shutil.copytree(saved[1], home / str(n) / "checkpoints") for n in range(len(DAMAGES))]
    for (hurt, _), folder in zip(DAMAGES.values(), folders, strict=True):
        hurt(folder / "step-00000012")
    ranks = run_ranks(2, load_each, saved[0], [*map(str, folders)])
    return dict(zip(DAMAGES, zip(folders, zip(*ranks, strict=True), strict=True), strict=True))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(damaged, damage):
    (checkpoints, ranks), (_, message) = damaged[damage], DAMAGES[damage]
    for position, norm, version, _ in ranks:
        assert (position["step"], position["data"], norm, version) == (8, "at 8", 8.0, 80)
    messages = ranks[0][3]
    assert re.search(rf"checkpoints/step-00000012/.*{message}", messages[0])
    assert "step-00000012-damaged: set aside" in messages[1]
    assert "step-00000008: the run continues from this checkpoint" in messages[2]
    assert ranks[1][3] == [], "said once"
    assert names(checkpoints) == ["latest", "step-00000004", "step-00000008", "step-00000012-damaged"]
    assert (checkpoints / "latest").read_text() == "step-00000008\n"


def go_on(model: str, folder: str) -> list[str]:
    """Resume and train to the same step, twice; return the names on disk at the end."""
    load_newest(model, folder)
    save_steps(model, folder, (12,), keep=2)
    return names(Path(folder))


def test_a_run_resumes_past_the_damage_and_the_damaged_one_stays_for_its_owner(saved, checkpoints):
    for _ in range(2):
        cut(data_file(checkpoints / "step-00000012"))
        run_ranks(1, go_on, saved[0], str(checkpoints))
    aside = ["step-00000012-damaged", "step-00000012-damaged-2"]
    assert names(checkpoints) == ["latest", "step-00000008", "step-00000012", *aside]
    assert run_ranks(1, load_newest, saved[0], str(checkpoints))[0][0]["step"] == 12


def test_two_damaged_ones_are_passed_over_and_three_are_an_error_that_changes_nothing(saved, checkpoints):
    for step in ("12", "08", "04"):
        flip(data_file(checkpoints / f"step-000000{step}"), 5000)
    before = names(checkpoints)
    (error,) = run_ranks(1, load_newest, saved[0], str(checkpoints))
    assert [f"step-000000{step}/" in error for step in ("12", "08", "04")] == [True] * 3
    assert names(checkpoints) == before
    flip(data_file(checkpoints / "step-00000004"), 5000)
    (found,) = run_ranks(1, load_newest, saved[0], str(checkpoints))
    assert found[0]["step"] == 4


POINTERS = {
    "empty": b"",
    "names nothing": b"step-00000016\n",
    "names a way out": b"../../checkpoints",
    "binary": b"\xff\xfe",
    "missing": None,
}


def test_a_broken_pointer_is_named_and_the_newest_checkpoint_is_used(saved, tmp_path):
    folders = [shutil.copytree(saved[1], tmp_path / name) for name in POINTERS]
    for folder, pointer in zip(folders, POINTERS.values(), strict=True):
        (folder / "latest").unlink()
        if pointer is not None:
            (folder / "latest").write_bytes(pointer)
    (loaded,) = run_ranks(1, load_each, saved[0], [*map(str, folders)])
    for folder, (position, _, _, messages) in zip(folders, loaded, strict=True):
        assert position["step"] == 12
        assert messages[0].startswith(f"{folder}/latest: ")
        assert (folder / "latest").read_text() == "step-00000012\n"


def test_a_pointer_alone_is_an_error_and_an_empty_folder_is_a_start(saved, tmp_path):
    assert run_ranks(1, load_newest, saved[0], str(tmp_path / "none"))[0][0] is None
    (tmp_path / "latest").write_text("step-00000016\n")
    assert "latest: names 'step-00000016'" in run_ranks(1, load_newest, saved[0], str(tmp_path))[0]


def test_an_older_checkpoint_that_the_pointer_names_is_in_force(saved, checkpoints, tmp_path):
    """A run may be killed between the rename of a checkpoint and that of the pointer."""
    (checkpoints / "latest").write_text("step-00000008\n")
    other = shutil.copytree(checkpoints, tmp_path / "other")
    flip(data_file(other / "step-00000008"), 3000)
    (((position, *_, messages), (before, *_)),) = run_ranks(
        1, load_each, saved[0], [str(checkpoints), str(other)]
    )
    assert (position["step"], messages) == (8, [])
    assert before["step"] == 4, "step 12 is of another line"
    run_ranks(1, save_steps, saved[0], str(other), (8,), 1)
    assert (other / "step-00000008").exists(), "it takes the place of step 4, and not of itself"
    run_ranks(1, go_on, saved[0], str(checkpoints))
    assert run_ranks(1, load_newest, saved[0], str(checkpoints))[0][0]["step"] == 12


def test_the_manifest_lists_every_file(checkpoints):
    for folder in checkpoints.glob("step-*"):
        listed = json.loads((folder / "manifest.json").read_text())
        assert listed.keys() | {"manifest.json"} == set(names(folder))


def save_before_training(model: str, folder: str) -> bool:
    """Return True if a run whose steps trained nothing is saved and loaded without a changed bit, and draws
    what it would have drawn."""
    policy = policy_of(model)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    save(Path(folder), 1, policy, {}, keep=1)
    drawn = torch.rand(3)
    policy = policy_of(model)
    saved_state.load(Path(folder), policy)
    goes_on = torch.equal(torch.rand(3), drawn)
    moments = [
        value
        for chained_optimizer in policy.optimizer.chained_optimizers
        for state in chained_optimizer.optimizer.state.values()
        for value in (state["step"], state["exp_avg"], state["exp_avg_sq"])
    ]
    same = all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())
    return same and goes_on and len(moments) > 0 and not any(value.any() for value in moments)


def test_a_run_that_has_trained_nothing_yet_is_saved_too(saved, tmp_path):
    assert run_ranks(2, save_before_training, saved[0], str(tmp_path)) == [True, True]


def die_while_saving(model: str, folder: str) -> None:
    checkpoint_folder.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save_steps(model, folder, (16,))


def test_the_rest_of_a_killed_save_is_swept_by_the_next_one(saved, checkpoints):
    with pytest.raises(RuntimeError, match="died without an answer"):
        run_ranks(1, die_while_saving, saved[0], str(checkpoints))
    assert len(names(checkpoints)) == 4 + 1, "a folder in the making"
    run_ranks(1, save_steps, saved[0], str(checkpoints), (14,), 4)
    assert names(checkpoints) == ["latest", *(f"step-000000{step}" for step in ("04", "08", "12", "14"))]


def save_without_another_process(model: str, folder: str) -> None:
    def refuse() -> int:
        raise AssertionError("a forked process outlives a killed rank, and holds the lock of its run")

    os.fork = refuse
    save_steps(model, folder, steps=(4,))


def test_no_process_but_the_rank_itself_writes(saved, tmp_path):
    model, _ = saved
    run_ranks(1, save_without_another_process, model, str(tmp_path / "checkpoints"))
    ((position, stored, _, _),) = run_ranks(1, load_newest, model, str(tmp_path / "checkpoints"))
    assert (position["step"], stored) == (4, 4.0)
