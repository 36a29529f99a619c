"""Fixtures that tests of ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.tiny_models import SHORT, save_models


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tiny models, only to be read; ``-short`` ones have two layers, which suffice where
    there are no pipeline stages."""
    path = tmp_path_factory.mktemp("tiny")
    short = {f"{family}-short": (family, SHORT[family]) for family in ("qwen3", "qwen3_moe", "qwen3_next")}
    save_models(path, {"qwen3": ("qwen3", {}), **short})
    return path


@pytest.fixture(scope="session")
def folder(folders: Path) -> str:
    """Return the folder of one of them, a Qwen3 of two layers."""
    return str(folders / "qwen3-short")
