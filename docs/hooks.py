"""MkDocs hooks: which files the site has, and the lists of folders' files (see mkdocs.yml).

Every file lies in the site where it lies in the repository, so one link is right in both.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import reference  # noqa: E402 (needs the path)

SHOWN = ("*.md", ":!.github", "docs", ":!docs/hooks.py", "recipes", "slurm", "LICENSE", "CITATION.cff")
"""What git knows, or would add."""


def on_config(config: MkDocsConfig) -> None:
    """Append the READMEs of folders to the last part of the navigation, with their own titles."""
    folders = [*sorted(ROOT.glob("megatron_eqlen/*/README.md")), ROOT / "tests/gpuless/README.md"]
    assert config.nav is not None
    *_, last = config.nav
    last["Extend"].append({"Folders": [str(readme.relative_to(ROOT)) for readme in folders]})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, and the repository's at their own paths in place of those below ``docs_dir``."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *SHOWN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]
    ours = [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in paths]
    return Files([file for file in files if file.src_dir != config.docs_dir] + ours)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page; below the README of a folder, its files."""
    folder = ROOT / Path(page.file.src_uri).parent
    if folder.parent == reference.PACKAGE:
        markdown += f"\n\n## Files\n\n{reference.files(folder)}"
    return markdown
