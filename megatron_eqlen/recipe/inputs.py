"""The model, data and benchmarks that a recipe reads: local paths, or names on the Hugging Face Hub.

    recipe ──pinned──► names at commits ──fetch──► in the cache ──local_path, data_files──► readers

A recipe is pinned before anything else, so that a run's stored recipe names commits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_eqlen.hf.dataset_files import choose_files, read_card
from megatron_eqlen.hf.hub import HubError, HubRepo, is_name, model_files
from megatron_eqlen.recipe import BenchmarkRecipe, Recipe, RecipeError, SourceRecipe
from megatron_eqlen.recipe.contents import commit, contents, keep_same
from megatron_eqlen.recipe.keys import all_keys
from megatron_eqlen.recipe.load import RECIPE, load
from megatron_eqlen.recipe.naming import leaves
from megatron_eqlen.recipe.plugins import digests
from megatron_eqlen.recipe.schema import ModelRecipe, TeacherRecipe

PINS = "EQLEN_REVISIONS"
"""Environment variable: the commits that this command has resolved, for the processes that it starts."""
WHOLE_FOLDER = "livecodebench"
"""Reader that chooses among a data set's files itself."""

MODEL, TEACHER = "model", "teacher"
# a workspace's
TASK_FOLDERS = "environment.options.template", "environment.options.hidden", "environment.options.expected"
OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Import path of an object."""

Input = ModelRecipe | TeacherRecipe | SourceRecipe | BenchmarkRecipe


def pinned(recipe: Recipe, run: Path | None = None) -> Recipe:
    """Return the recipe with each name on the hub at a commit. A resumed run (its folder is ``run``) stays at
    its commits, unless the recipe names a revision. Raises RecipeError."""
    # A run's own commits come before those of this command.
    known = _environment() | (_stored(run) if run else {})
    changed = {key: _pinned(key, section, known) for key, section in _inputs(recipe).items()}
    if known:
        os.environ[PINS] = json.dumps(known)
    sources = [section for section in changed.values() if isinstance(section, SourceRecipe)]
    benchmarks = [section for section in changed.values() if isinstance(section, BenchmarkRecipe)]
    update = {
        "model": changed[MODEL],
        "teacher": changed.get(TEACHER, recipe.teacher),
        "data": recipe.data.model_copy(update={"sources": sources}),
        "evaluation": recipe.evaluation.model_copy(update={"benchmarks": benchmarks}),
    }
    return recipe.model_copy(update=update)


def fetch(recipe: Recipe) -> None:
    """Check that local inputs exist; download others that the cache lacks. Raises RecipeError."""
    if problems := missing_inputs(recipe):
        raise RecipeError(problems)
    for key, section in _inputs(recipe).items():
        _download(key, section)


def with_model(recipe: Recipe) -> Recipe:
    """Return the recipe with its model pinned and downloaded unless it is here. Raises RecipeError."""
    model = _pinned(MODEL, recipe.model, _environment())
    _download(MODEL, model)
    return recipe.model_copy(update={"model": model})


def missing_inputs(recipe: Recipe) -> str:
    """Return which local inputs are missing, and the command that makes them; empty if all are there."""
    # Names on the hub are fetched later.
    paths = {f"{key}.path": section.path for key, section in _inputs(recipe).items() if not hub_repo(section)}
    for number, source in enumerate(recipe.data.sources):
        paths |= {f"data.sources.{number}.exclude": source.exclude} if source.exclude else {}
    missing = {key: path for key, path in paths.items() if not Path(path).exists()}
    problems = "; ".join(f"{key}: {path} does not exist" for key, path in missing.items())
    if not all(map(os.path.isabs, missing.values())):
        problems += f" (relative to {Path.cwd()})"
    # A path that the command line gave is the user's own, which ``inputs_from`` does not make.
    return problems + (where_from(recipe) if missing.keys() - recipe.variant.keys() else "")


def where_from(recipe: Recipe) -> str:
    """Return the end of a message about missing inputs: the command that makes them (``inputs_from``)."""
    return f" (to make this recipe's inputs, run {recipe.inputs_from})" if recipe.inputs_from else ""


def revisions(recipe: Recipe) -> dict[str, str | None]:
    """Return the revision of every name on the hub, by key; ranks must agree on them."""
    sections = _inputs(recipe).items()
    return {f"{key}.revision": section.revision for key, section in sections if hub_repo(section)}


def hub_repo(section: Input) -> HubRepo | None:
    """Return the hub's repository that ``section`` names; None for a local path."""
    if not is_name(section.path):
        return None
    kind = "dataset" if isinstance(section, SourceRecipe | BenchmarkRecipe) else "model"
    return HubRepo(section.path, kind, section.revision)


def local_path(section: Input) -> Path:
    """Return the input's file or folder. Raises HubError for a name that the hub's cache lacks."""
    repo = hub_repo(section)
    return repo.cached() if repo else Path(section.path)


def data_files(section: SourceRecipe | BenchmarkRecipe) -> list[Path] | None:
    """Return the files of ``config`` and ``split``; None if the reader chooses them. Raises RecipeError."""
    repo, folder = hub_repo(section), local_path(section)
    if section.reader == WHOLE_FOLDER or (repo is None and section.config is section.split is None):
        return None
    if folder.is_file():
        raise RecipeError(f"{section.name}: config and split choose among a folder's files, found {folder}")
    names = repo.files() if repo else [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    try:
        return [folder / name for name in _chosen(section, names)]
    except ValueError as error:
        raise RecipeError(f"{section.name}: {section.path}: {error}") from None


def _chosen(section: SourceRecipe | BenchmarkRecipe, names: Sequence[str]) -> list[str]:
    card = read_card(local_path(section)) if "README.md" in names else {}
    if section.reader == WHOLE_FOLDER:
        return [name for name in names if name.endswith((".parquet", ".jsonl"))]
    usual = "train" if isinstance(section, SourceRecipe) else "test"
    return choose_files(names, card, section.config, section.split, usual)


def keep_inputs(run: Path, recipe: Recipe) -> None:
    """Record in ``run`` the contents of the recipe's local inputs: model with tokenizer and template, data,
    benchmarks, files that options name, and the code that import paths lead to. For a name on the hub the
    stored recipe has the commit. Raises ContentsError if an earlier start found others."""
    paths = {section.path for section in _inputs(recipe).values() if not hub_repo(section)}
    paths |= {source.exclude for source in recipe.data.sources if source.exclude}
    texts = {key: text for key, text in leaves(recipe.model_dump()).items() if isinstance(text, str)}
    # Values of keys that are not ours, as options of environments, may name files, too.
    declared = {".".join(key) for key in all_keys()}
    opened = {key: text for key, text in texts.items() if re.sub(r"\.\d+", ".0", key) not in declared}
    paths |= {text for text in opened.values() if os.path.isfile(text)}
    # Folders of other options may change, such as caches; with {gold}, a task for each row, they may be huge.
    tasks = {text for key, text in opened.items() if key in TASK_FOLDERS and not os.path.isfile(text)}
    own = {text: digests(text) for text in sorted(set(texts.values())) if OBJECT.fullmatch(text)}
    found = {path: contents(Path(path)) for path in sorted(paths)}
    found |= {path: contents(Path(path), ".git") or commit(path) for path in sorted(tasks)}
    keep_same(run, found | own)


def _inputs(recipe: Recipe) -> dict[str, Input]:
    """Return the sections that name inputs, by key."""
    teacher = {TEACHER: recipe.teacher} if recipe.teacher.path else {}
    return {MODEL: recipe.model, **teacher, **recipe.data_sets}


def _pinned(key: str, section: Input, known: dict[str, str]) -> Input:
    """Return the section with its commit: the one among ``known``, or else the hub's, which is added."""
    repo = hub_repo(section)
    if repo is None and section.revision is not None:
        found = f"the local path {section.path}"
        raise RecipeError(f"{key}.revision: {section.revision} is for a name on the hub, found {found}")
    if repo is None or repo.is_pinned:
        return section
    # Asked once: several sections may name one repository, and its branch may move.
    if _pin_key(repo) not in known:
        try:
            known[_pin_key(repo)] = str(repo.pinned().revision)
        except HubError as error:
            raise RecipeError(f"{key}.path: {error}") from None
    return section.model_copy(update={"revision": known[_pin_key(repo)]})


def _download(key: str, section: Input) -> None:
    of_data = isinstance(section, SourceRecipe | BenchmarkRecipe)
    try:
        if repo := hub_repo(section):
            repo.download(partial(_chosen, section) if of_data else model_files)
    except ValueError as error:
        raise RecipeError(f"{key}.path: {error}") from None


def _environment() -> dict[str, str]:
    return json.loads(os.environ.get(PINS, "{}"))


def _stored(run: Path) -> dict[str, str]:
    """Return the commits of the run's stored recipe."""
    if not os.path.isfile(run / RECIPE):  # false for a path that nobody can read, too: others say so
        return {}
    repos = [hub_repo(section) for section in _inputs(load(run / RECIPE)).values()]
    # Kept for the default branch: a recipe that names a revision now is resolved again.
    return {_pin_key(repo, default=True): str(repo.revision) for repo in repos if repo and repo.is_pinned}


def _pin_key(repo: HubRepo, default: bool = False) -> str:
    """Return the key of a repository and branch among the pins; ``default``: of its default branch."""
    return f"{repo.kind} {repo.name} {(None if default else repo.revision) or ''}".strip()
