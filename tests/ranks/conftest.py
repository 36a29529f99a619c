"""Fixtures that tests of ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.tiny_models import FAMILIES, SHORT, save_tiny


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model of each family, by its name, and one of two layers, ``-short``, which
    suffices where there are no pipeline stages; only to be read."""
    path = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        save_tiny(path / family, family)
        save_tiny(path / f"{family}-short", family, **SHORT[family])
    return path
