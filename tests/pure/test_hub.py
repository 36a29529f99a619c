"""Names on the Hugging Face Hub: pinned, downloaded once, found again without network."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.data.sources import open_source
from megatron_eqlen.hf.dataset_files import choose_files
from megatron_eqlen.hf.hub import model_files
from megatron_eqlen.job import Job
from megatron_eqlen.recipe import RecipeError
from megatron_eqlen.recipe.inputs import fetch, local_path, pinned
from megatron_eqlen.recipe.load import dump, load, parse
from tests.kit.hub import Hub, serving, use
from tests.kit.tiny_models import tiny_config

CONFIG = json.dumps(tiny_config("qwen3").to_dict()).encode()
MODEL = {"config.json": CONFIG, "model.safetensors": b"weights", "onnx/a.onnx": b"x", "a.bin": b"y"}
SUMS = b"".join(json.dumps({"question": f"{n} + {n}?", "answer": 2 * n}).encode() + b"\n" for n in range(3))
DATA = {"README.md": b"# Sums", "hard/train.jsonl": SUMS[:30]}
DATA |= {"easy/train.jsonl": SUMS, "easy/test.jsonl": SUMS}
SOURCE = {"name": "sums", "reader": "jsonl", "path": "ann/sums", "config": "easy"}
RECIPE = {"name": "named", "steps": 1, "model": {"path": "ann/tiny"}, "data": {"sources": [SOURCE]}}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub()
    model, data = hub.commit("model", "ann/tiny", MODEL), hub.commit("dataset", "ann/sums", DATA)
    hub.first = {"model": model, "data": data}
    monkeypatch.chdir(tmp_path)
    with serving(hub) as address:
        hub.address = address
        use(monkeypatch, address, tmp_path / "cache")
        yield hub
        use(monkeypatch, address, tmp_path / "cache")  # close the connections


def recipe(**changes):
    return parse(RECIPE | changes, "test")


def commits(recipe):
    return {"model": recipe.model.revision, "data": recipe.data.sources[0].revision}


def test_names_become_commits_and_only_the_files_that_are_read_are_downloaded(hub):
    ready = pinned(recipe())
    fetch(ready)
    assert commits(ready) == hub.first
    folder = local_path(ready.model)
    assert sorted(path.name for path in folder.rglob("*")) == ["config.json", "model.safetensors"]
    data = local_path(ready.data.sources[0])
    assert sorted(str(path.relative_to(data)) for path in data.rglob("*.jsonl")) == ["easy/train.jsonl"]
    rows = open_source(ready.data.sources[0], Tally())
    assert {row.row_id: row.gold for row in rows} == {f"easy/train.jsonl#{n}": str(2 * n) for n in range(3)}


def test_a_data_set_without_a_card_is_read(hub):
    hub.commit("dataset", "ann/sums", {name: data for name, data in DATA.items() if name != "README.md"})
    ready = pinned(recipe())
    fetch(ready)
    assert len(open_source(ready.data.sources[0], Tally())) == 3


def test_a_pinned_recipe_needs_no_network_once_its_files_are_in_the_cache(hub, monkeypatch, tmp_path):
    ready = pinned(recipe())
    fetch(ready)
    hub.requests.clear()
    fetch(pinned(ready))
    assert hub.requests == []
    use(monkeypatch, hub.address, tmp_path / "cache", offline=True)
    offline = pinned(recipe())
    fetch(offline)
    assert offline == ready
    assert len(open_source(offline.data.sources[0], Tally())) == 3
    assert hub.requests == []


def test_a_resumed_run_stays_at_its_commit_when_the_branch_moves(hub, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(dump(pinned(recipe())))
    moved = hub.commit("model", "ann/tiny", MODEL | {"config.json": b"{}"})
    monkeypatch.delenv("EQLEN_REVISIONS")
    assert commits(pinned(recipe(), run)) == hub.first
    monkeypatch.delenv("EQLEN_REVISIONS")
    assert commits(pinned(recipe()))["model"] == moved
    named = recipe(model={"path": "ann/tiny", "revision": "main"})
    assert commits(pinned(named, run))["model"] == moved


def test_processes_that_a_command_starts_use_its_commits(hub):
    pinned(recipe())
    hub.commit("model", "ann/tiny", {})
    hub.requests.clear()
    assert commits(pinned(recipe())) == hub.first
    assert hub.requests == []


TOKEN = r" \(it refuses this token, or none was sent: hf auth login, or HF_TOKEN\)$"
REFUSALS = [
    ({"path": "ann/none"}, None, "no such model, or it is private and you are not logged in"),
    ({"path": "ann/gated"}, None, "it is gated: accept its terms on its page, then log in"),
    ({"path": "ann/tiny", "revision": "v9"}, None, "it has no revision 'v9'"),
    ({"path": "ann/tiny"}, (401, "Invalid credentials"),
     "it answered 401 Unauthorized: Invalid credentials" + TOKEN),
    ({"path": "ann/tiny"}, (403, "No access"), "it answered 403 Forbidden: No access" + TOKEN),
    ({"path": "ann/tiny"}, (429, "Too fast"), "it answered 429 Too Many Requests: Too fast$"),
    ({"path": "ann/tiny"}, (503, "Down"),
     "it answered 503 Service Unavailable: Down, and the cache .* lacks it: run"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "answer", "message"), REFUSALS)
def test_a_name_that_the_hub_refuses_is_an_error_that_says_why_and_what_to_do(hub, model, answer, message):
    hub.gated.add("ann/gated")
    if answer:
        hub.answer = answer
    expected = f"^model.path: model '{model['path']}' on {hub.address}: {message}"
    with pytest.raises(RecipeError, match=expected):
        pinned(recipe(model=model))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_model_without_its_configuration_or_weights_is_refused(missing):
    names = [name for name in MODEL if name != missing]
    with pytest.raises(ValueError, match=rf"^expected config\.json and \*\.safetensors, found {names[0]}, "):
        model_files(names)
    named = "additional_chat_templates/tool_use.jinja"
    assert model_files([*MODEL, "onnx/config.json", named]) == ["config.json", "model.safetensors", named]


def test_without_network_and_cache_the_command_to_run_is_named(hub, monkeypatch, tmp_path):
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "empty")
    with pytest.raises(RecipeError, match=r"no connection \(ConnectError.*run `hf download ann/tiny`"):
        pinned(recipe())
    use(monkeypatch, hub.address, tmp_path / "empty", offline=True)
    with pytest.raises(RecipeError, match=r"HF_HUB_OFFLINE is set, and the cache .*empty lacks it"):
        pinned(recipe())
    with pytest.raises(RecipeError, match=r"lacks revision 'v9': run `hf download ann/tiny --revision v9`"):
        pinned(recipe(model={"path": "ann/tiny", "revision": "v9"}))
    with pytest.raises(RecipeError, match=r"sources.0.path: .*run `hf download ann/sums --type dataset`"):
        pinned(recipe(model={"path": str(tmp_path)}))


def test_half_a_download_is_no_data_set(hub, monkeypatch, tmp_path):
    ready = pinned(recipe())
    fetch(ready)
    (local_path(ready.data.sources[0]) / "easy/train.jsonl").unlink()
    use(monkeypatch, hub.address, tmp_path / "cache", offline=True)
    with pytest.raises(RecipeError, match=r"sources.0.path: .*1 file\(s\) are missing \(easy/train.jsonl\)"):
        fetch(ready)


def test_a_local_folder_wins_over_the_name(hub, tmp_path):
    (tmp_path / "ann/tiny").mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"data.sources.0.path: ann/sums does not exist"):
        fetch(pinned(recipe()))  # a missing file in a local folder is no name on the hub
    assert local_path(recipe().model).samefile(tmp_path / "ann/tiny")
    with pytest.raises(RecipeError, match=r"model.revision: v1 is for a name on the hub, found the local"):
        pinned(recipe(model={"path": "ann/tiny", "revision": "v1"}))
    assert hub.requests == []


def test_a_plan_reads_the_configuration_alone(hub, tmp_path):
    assert Job(recipe()).model.hidden_size == tiny_config("qwen3").hidden_size
    asked = {request for request in hub.requests if "/resolve/" in request}
    assert asked == {f"{verb} /ann/tiny/resolve/main/config.json" for verb in ("HEAD", "GET")}


def test_eqlen_check_downloads_and_names_the_commits(hub, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(dump(recipe(run_dir=str(tmp_path / "run"))))
    cli.main(["check", "recipe.yaml", "--short"])
    said = capsys.readouterr().out
    assert "does not exist" not in said
    folder = local_path(pinned(load("recipe.yaml")).model)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_another_model_is_evaluated_without_the_revision_of_the_recipes_own(hub, tmp_path, capsys):
    run, bench = tmp_path / "run", {"benchmarks": [{"name": "b", "reader": "jsonl", "path": "none"}]}
    run.mkdir()
    (run / "recipe.yaml").write_text(dump(pinned(recipe(evaluation=bench))))
    assert cli.main(["evaluate", str(run), "--model", str(tmp_path)]) == 2
    assert "evaluation.benchmarks.0.path: none does not exist" in capsys.readouterr().err


def test_the_variables_of_huggingface_hub_apply(hub, tmp_path):
    """HF_ENDPOINT and HF_HOME are read when the library is imported."""
    code = "from megatron_eqlen.hf.hub import HubRepo as H; print(H('ann/tiny', 'model').file('config.json'))"
    environ = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
    path = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
    assert path.startswith(str(tmp_path / "home/hub/models--ann--tiny/snapshots/"))


SPLITS = [{"split": "train", "path": "a/*.parquet"}, {"split": "dev", "path": ["a/d/**"]}]
CARD = {
    "configs": [
        {"config_name": "a", "data_files": SPLITS},
        {"config_name": "b", "default": True, "data_dir": "b", "data_files": "x?.jsonl"},
    ]
}
NAMES = ["README.md", "a/1.parquet", "a/2.parquet", "a/d/e/1.parquet", "b/x1.jsonl", "b/xx1.jsonl", "b/y.csv"]


@pytest.mark.parametrize(("names", "card", "part", "chosen"), [
    (NAMES, CARD, ("a", None), ["a/1.parquet", "a/2.parquet"]),
    (NAMES, CARD, ("a", "dev"), ["a/d/e/1.parquet"]),
    (NAMES, CARD, (None, None), ["b/x1.jsonl"]),
    (NAMES, CARD, ("c", None), "config: expected one of a, b, found 'c'"),
    (NAMES, CARD, ("a", "test"), r"split \(default: train\): expected one of train, dev, found 'test'"),
    (["dev.jsonl", "test.jsonl"], {}, (None, None),
     r"split \(default: train\): expected one of validation, test, found None$"),
    (["data/test-00000-of-00001.parquet"], {}, (None, None), ["data/test-00000-of-00001.parquet"]),
    (["m/train.json", "m/valid.json", "dataset_infos.json"], {}, ("m", "validation"), ["m/valid.json"]),
    (["test.jsonl", "test2.jsonl", "train.jsonl"], {}, (None, "test"), ["test.jsonl", "test2.jsonl"]),
    (["one.jsonl", "two.jsonl", ".cache/x.json"], {}, (None, None), ["one.jsonl", "two.jsonl"]),
    (["train.csv"], {}, (None, None), "split train: expected files .parquet, .jsonl, .json, found none"),
    (["m/train.jsonl"], {}, ("n", None), "config: expected one of m, found 'n'"),
])  # fmt: skip
def test_files_are_chosen_by_the_card_or_by_their_names(names, card, part, chosen):
    if isinstance(chosen, str):
        with pytest.raises(ValueError, match=f"^{chosen}"):
            choose_files(names, card, *part, usual="train")
    else:
        assert choose_files(names, card, *part, usual="train") == chosen
