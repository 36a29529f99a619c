"""Models and data sets of the Hugging Face Hub: pin a revision, download files once, find them again.

``huggingface_hub`` does the work, and its variables apply: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE. A pinned revision in the cache needs no network. Slow imports stand where they are used.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import huggingface_hub as api
from huggingface_hub import constants

LOCAL_FOLDERS = ("data", "models", "runs", "recipes")
"""Folders beside a recipe: ``models/Qwen3-4B`` is never a name on the hub, even if the folder is missing."""
FILE_SUFFIXES = (".json", ".jsonl", ".parquet", ".yaml", ".yml")
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*")
"""Files of a model's top folder that training and export read."""
TEMPLATES = "additional_chat_templates"
"""Folder in it of chat templates by name (``tool_use``) beside the default one."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(ValueError):
    """A name cannot be resolved or downloaded; the message says why and what to do."""


@dataclass(frozen=True)
class HubRepo:
    """A model or data set on the hub."""

    name: str
    kind: Literal["model", "dataset"]
    revision: str | None = None
    """Branch, tag or commit; None: the default branch."""

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.name} at {self.revision[:12]}" if self.revision else self.name

    def pinned(self) -> HubRepo:
        """Return the repository at a commit; without network, the cache's newest. Raises HubError."""
        if self.is_pinned:
            return self
        with _explained(self):
            commit = api.HfApi().resolve_revision(self.name, repo_type=self.kind, revision=self.revision)
        return replace(self, revision=str(commit.resolved))

    def files(self) -> list[str]:
        """Return the names of all files at this commit, from the cache if it has them. Raises HubError."""
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        # A pinned repository's list of files may be in the cache, and needs no network.
        with suppress(CachedRepoTreeNotFoundError):
            return [file.path for file in api.get_cached_repo_tree(**self._where())]
        folder = self._snapshot(["README.md"])  # writes the cache's list of files
        with suppress(CachedRepoTreeNotFoundError):
            return [file.path for file in api.get_cached_repo_tree(**self._where())]
        # offline, with a cache written by an older huggingface_hub
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]

    def download(self, choose: Callable[[Sequence[str]], Sequence[str]]) -> Path:
        """Download what ``choose`` picks, unless the cache has it; return the folder. Raises HubError."""
        assert self.is_pinned, "pinned() comes first"
        chosen = choose(self.files())
        folder = self._cache() / "snapshots" / str(self.revision)
        missing = [name for name in chosen if not (folder / name).exists()]
        if not missing:
            return folder
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{self}: downloading {len(missing)} of {len(chosen)} files", file=sys.stderr)
        else:
            api.utils.disable_progress_bars()
        # Names are taken as patterns there.
        return self._snapshot([glob.escape(name) for name in chosen])

    def file(self, name: str) -> Path:
        """Download one file, unless the cache has it; return its path. Raises HubError."""
        with _explained(self):
            return Path(api.hf_hub_download(**self._where(), filename=name))

    def cached(self) -> Path:
        """Return the folder of this commit in the cache, complete or not. Raises HubError without one."""
        commit, ref = self.revision, self._cache() / "refs" / (self.revision or constants.DEFAULT_REVISION)
        if not self.is_pinned:
            # A branch's file in ``refs`` holds the commit that it was at.
            commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else None
        folder = self._cache() / "snapshots" / str(commit)
        if commit is None or not folder.is_dir():
            raise HubError(f"{self} of the Hugging Face Hub is not in the cache {constants.HF_HUB_CACHE}")
        return folder

    def _cache(self) -> Path:
        return Path(constants.HF_HUB_CACHE) / f"{self.kind}s--{self.name.replace('/', '--')}"

    def _where(self) -> dict[str, Any]:
        return {"repo_id": self.name, "repo_type": self.kind, "revision": self.revision}

    def _snapshot(self, patterns: Sequence[str]) -> Path:
        options = {"allow_patterns": [*patterns], "local_files_only": constants.is_offline_mode()}
        with _explained(self):
            return Path(api.snapshot_download(**self._where(), **options))


def is_name(path: str) -> bool:
    """Return True if ``path`` is ``ORG/NAME`` on the hub: no local file, and no folder ``ORG``."""
    if not _NAME.fullmatch(path) or Path(path).exists() or path.endswith(FILE_SUFFIXES):
        return False
    first = path.partition("/")[0]
    return first not in LOCAL_FOLDERS and not Path(first).exists()


def model_files(names: Sequence[str]) -> list[str]:
    """Return the files that training reads. Raises ValueError without config.json or safetensors."""
    top = [name for name in names if name.rpartition("/")[0] in ("", TEMPLATES)]
    chosen = [name for name in top if any(fnmatch.fnmatchcase(name, pattern) for pattern in MODEL_FILES)]
    if "config.json" not in chosen or not any(name.endswith(".safetensors") for name in chosen):
        raise ValueError(f"expected config.json and *.safetensors, found {', '.join(names) or 'nothing'}")
    return chosen


@contextmanager
def _explained(repo: HubRepo) -> Iterator[None]:
    """Turn errors of the hub into HubError."""
    import httpx
    from huggingface_hub import errors

    unreachable = (
        errors.RevisionResolutionError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        httpx.TransportError,
    )
    where = f"{repo.kind} {repo.name!r} on {constants.ENDPOINT}"
    login = "(hf auth login, or HF_TOKEN)"
    try:
        yield
    # Classes stand before their bases: a gated repository is one that was not found, and so on.
    except errors.GatedRepoError:
        raise HubError(f"{where}: it is gated: accept its terms on its page, then log in {login}") from None
    except errors.RepositoryNotFoundError:
        why = f"no such {repo.kind}, or it is private and you are not logged in {login}"
        raise HubError(f"{where}: {why}; a local folder must exist") from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{where}: it has no revision {repo.revision!r}") from None
    except errors.RemoteEntryNotFoundError as error:
        raise HubError(f"{where}: no such file: {str(error).splitlines()[-1]}") from None
    except errors.IncompleteSnapshotError as error:
        raise HubError(f"{where}: {error}") from None
    except unreachable as error:
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else _cause(error)
        # The command that fills the cache where there is a connection.
        command = f"hf download {repo.name}" + " --type dataset" * (repo.kind == "dataset")
        command += f" --revision {repo.revision}" * (repo.revision is not None)
        lacks = "it" if repo.revision is None else f"revision {repo.revision!r}"
        remedy = f"run `{command}` with a connection (HF_HOME is the cache's place), or name a local folder"
        lacks = f"the cache {constants.HF_HUB_CACHE} lacks {lacks}"
        raise HubError(f"{where}: {why}, and {lacks}: {remedy}") from None
    except errors.HfHubHTTPError as error:
        raise HubError(f"{where}: {_answer(error)}") from None


def _cause(error: BaseException) -> str:
    """Return why a connection failed: its first cause."""
    from httpx import HTTPStatusError

    # The hub's library wraps the error of the connection.
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, HTTPStatusError):
        return _answer(error)
    return f"no connection ({type(error).__name__}: {error})"


def _answer(error: Any) -> str:
    """Return the hub's answer to a request that it did not serve, and what to do about a refused login."""
    status = error.response.status_code
    message = error.response.headers.get("X-Error-Message") or getattr(error, "server_message", None)
    text = f"it answered {status} {error.response.reason_phrase}" + (f": {message}" if message else "")
    if status in (401, 403):
        text += " (it refuses this token, or none was sent: hf auth login, or HF_TOKEN)"
    return text
