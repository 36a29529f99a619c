"""Links, anchors, commands, files, recipe keys and metrics that the Markdown files name exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_eqlen.cli.__main__ import _parser
from megatron_eqlen.data.first_rewards import FORMS
from megatron_eqlen.experiments.cells import Plan
from megatron_eqlen.experiments.schema import load_sweep
from megatron_eqlen.metrics import DECLARED, MetricError, metric
from megatron_eqlen.objectives.registry import OBJECTIVES
from megatron_eqlen.recipe import MAY_CHANGE, Recipe
from megatron_eqlen.recipe import load as recipe_load
from megatron_eqlen.recipe.keys import all_keys
from tests.kit import ROOT
from tools.reference import PACKAGE, PAGES, files, keys, metrics, page

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"``(.+?)``|`([^`\n]+)`")
OPTION = re.compile(r"(?<=\s)--(?!help)[a-z][a-z-]+")
HELD = re.compile(r"--[a-z-]+")
SCRIPT = re.compile(r"(?:^|\s|/)(tools[/.][\w./]+(?: [a-z]+)?)((?:(?! && |\||#).)*)")
CONVERT = "megatron_eqlen/cli/convert.py"
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
FAMILIES = {declared.name.split("/")[0] for declared in DECLARED}
SECTIONS = {name for name, field in Recipe.model_fields.items() if field.annotation not in (str, int)}
PATH = re.compile(r"(?:^|[\s(])((?:tools|recipes|slurm|tests|docs|megatron_eqlen)/[\w./*-]+)")
OTHER_PATH = re.compile(r"^((?:[a-z_0-9]+/)*[a-z_0-9]+\.(?:py|c|sh))$")
FOLDER_PATH = re.compile(r"^((?:[a-z_0-9]+/)+)$")
"""Paths that begin where a reader is: in the README's folder, or in the package. Pages also name folders that
users have."""
ELSEWHERE = {"my_package/half.py", "rewards.py", "tune.py", "streams/", "read/", "imported/"}
"""Paths of a user, of an archive, of a run folder, and of a report."""
KEYS = {re.sub(r"\.0\b", "[]", ".".join(key)) for key in all_keys()}
FILE = re.compile(r"\.(html|jinja|json|jsonl|py|yaml|safetensors|md|parquet|arrow|txt|css)$")


def git_files(*options: str) -> list[str]:
    return subprocess.check_output(["git", "ls-files", *options], cwd=ROOT, text=True).splitlines()


def markdown_files() -> list[Path]:
    listed = git_files("--cached", "--others", "--exclude-standard", "*.md")
    return [ROOT / line for line in sorted({*listed}) if (ROOT / line).is_file()]


FILES = markdown_files()
TRACKED = git_files()
TRACKED += sorted({f"/{Path(name).parent}/" for name in TRACKED})
TODAY = [file for file in FILES if file.name != "CHANGELOG.md"]
"""Texts about the present; the changelog names what an earlier version had."""


def anchors(file: Path) -> set[str]:
    """Return the anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_links(file: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = file.parent / name if name else file
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def code_of(text: str) -> Iterator[str]:
    """Yield code spans, and the lines of blocks without their comments."""
    for block in FENCE.findall(text):
        yield from (re.sub(r"(^|\s)#.*", "", line) for line in block.splitlines()[1:-1])
    for double, single in CODE.findall(FENCE.sub("", text)):
        yield double or single


def missing_commands(file: Path, text: str) -> Iterator[str]:
    """Yield commands that do not exist, and options that a command or a script does not have."""
    choices = next(action.choices for action in _parser()._actions if action.dest == "name")
    assert isinstance(choices, dict)
    for code in code_of(text.replace("\\\n", "")):
        for name, rest in re.findall(r"(?:^|[\s/=])eqlen ([a-z-]+)\b((?:(?! -- | && |\||#).)*)", code):
            if name not in choices:
                yield f"eqlen {name}"
            else:
                held = (ROOT / CONVERT).read_text() if name == "convert" else choices[name].format_help()
                known = HELD.findall(held)
                yield from (f"eqlen {name} {each}" for each in OPTION.findall(rest) if each not in known)
            if name == "evaluate" and re.match(r"\s+\S+\.yaml\b", rest) and "--out" not in rest:
                yield f"eqlen {name}{rest}: a recipe has no default for --out"
        for script, rest in SCRIPT.findall(code):
            known = HELD.findall("".join(map(Path.read_text, sources(script))))
            yield from (f"{script} {option}" for option in OPTION.findall(rest) if option not in known)


def sources(script: str) -> list[Path]:
    """Return the files that hold the options of ``tools/...`` or ``tools.research...``."""
    name, _, first = script.partition(" ")
    file = ROOT / (name.replace(".", "/") + ".py" if name.startswith("tools.") else name)
    other = {"tools/bench.py": f"tools/benchmarks/{first}.py", "tools/gpuless": "tests/gpuless/kernels.py"}
    return [path for path in (file, ROOT / other.get(name, name)) if path.is_file()]


def missing_files(file: Path, text: str) -> Iterator[str]:
    """Yield paths below a top folder that do not exist; and other paths of code and folders, `data/rows.py`
    or `server/`, that end no path of the repository."""
    for code in code_of(text):
        for path in PATH.findall(code):
            if "*" not in path and not (ROOT / path.rstrip(".")).exists():
                yield path
    for double, single in CODE.findall(FENCE.sub("", text)):
        other = FOLDER_PATH.findall(double or single) if file.name == "README.md" else []
        for path in OTHER_PATH.findall(double or single) + other:
            known = any((folder / path).exists() for folder in (file.parent, PACKAGE, ROOT))
            if path not in ELSEWHERE and not known and not any(name.endswith(f"/{path}") for name in TRACKED):
                yield path


def missing_keys(file: Path, text: str) -> Iterator[str]:
    if file == PAGES["others"]:  # it has the keys of others
        return
    for code in code_of(text):
        for key in re.findall(r"(?:^|\s)([a-z_]+(?:\.[a-z_\[\]]+)+)(?=[\s=:,]|$)", code):
            if key.split(".")[0] in SECTIONS and not FILE.search(key) and key not in KEYS:
                yield key


def missing_metrics(file: Path, text: str) -> Iterator[str]:
    for code in code_of(text):
        if re.fullmatch(r"[a-z]+/[\w*/@]+", code) and code.split("/")[0] in FAMILIES:
            folders = (file.parent, ROOT, ROOT / "megatron_eqlen")
            if any((folder / code).exists() for folder in folders):
                continue
            try:
                metric(code.replace("*", "x"))
            except MetricError:
                yield code


LOOKS = [missing_links, missing_commands, missing_files, missing_keys, missing_metrics]


@pytest.mark.parametrize("missing", LOOKS)
def test_a_text_names_nothing_that_is_not_there(missing: Callable[[Path, str], Iterator[str]]):
    files = FILES if missing is missing_links else TODAY
    names = ((file, name) for file in files for name in missing(file, file.read_text()))
    assert {f"{file.relative_to(ROOT)}: {name}" for file, name in names} == set()


@pytest.mark.parametrize(("missing", "text", "found"), [
    (missing_links, "[a](nowhere.md), [b](README.md#nothing), [c](#nothing)", 3),
    (missing_links, "[a](README.md#status), [b](docs/start.md), [c](https://example.org)", 0),
    (missing_commands, "```\neqlen trane R  # eqlen nothing\n.venv/bin/eqlen train R\n```", 1),
    (missing_commands, "`eqlen train R --no`, `tools/bench.py trees --no`, `tools/setup gpu --no`", 3),
    (missing_commands, "`eqlen submit R --servers 2 -- --mem=0`, `tools/bench.py trees --pairs 6`", 0),
    (missing_commands, "`eqlen evaluate a.yaml --model M`, `eqlen evaluate a.yaml --out b`", 1),
    (missing_files, "`tools/nothing`, `recipes/qwen3_32b.yaml`, `slurm/nothing.sbatch x`", 2),
    (missing_files, "`objectives/nothing.py`, `registry.py`, `dialogues/`, `objectives/`, `gone.py`", 3),
    (missing_keys, "`rollout.nothing: 1`, `rollout.top_k`, `data.sources[].reader`, `report.html`", 1),
    (missing_metrics, "`harvest/nothing`, `harvest/pairs`, `packing/fill`, `reward/verdict/*`", 1),
])  # fmt: skip
def test_a_name_that_is_not_there_is_found(missing, text, found):
    assert len(list(missing(ROOT / "README.md", text))) == found


def test_comments_name_files_that_are_there_and_pages_in_place_of_folders():
    texts = [name for name in TRACKED if name.endswith((".yaml", ".sh", ".sbatch", ".py"))]
    named = {
        f"{name}: {path}"
        for name in texts
        if not name.startswith("tests/")
        for path in PATH.findall((ROOT / name).read_text())
        if "*" not in path
        and (not (ROOT / path.rstrip(".")).exists() or re.match(r"megatron_eqlen/\w+/README", path))
    }
    assert named == set()


def test_tools_can_be_called_as_the_pages_do():
    scripts = [name for name in git_files("tools") if (ROOT / name).read_bytes().startswith(b"#!")]
    assert len(scripts) > 10
    assert [name for name in scripts if not os.access(ROOT / name, os.X_OK)] == []


def test_a_run_from_another_begins_at_a_checkpoint_that_the_quickstart_keeps():
    recipe = recipe_load.load(ROOT / "recipes/tiny_cpu.yaml")
    saved = {*range(0, recipe.steps + 1, recipe.checkpoint.every)}
    texts = (code for file in TODAY for code in code_of(file.read_text()))
    named = {int(step) for text in texts for step in re.findall(r"--from \S+@(\d+)", text)}
    assert named <= {*sorted(saved)[-recipe.checkpoint.keep :]}


def test_the_example_of_an_own_reward_asks_for_the_form_that_it_grades(tmp_path, monkeypatch):
    fences = FENCE.findall((ROOT / "README.md").read_text())
    (code,), (block,) = (
        [each for each in fences if part in each] for part in ("def exact(", "rewards:exact")
    )
    rewards = ModuleType("rewards")
    exec("\n".join(code.splitlines()[1:-1]), vars(rewards))
    assert rewards.__dict__["exact"]("Capital of Peru?", "<think>\nPeru ...\n</think>\n\nLima.", "Lima") == 1
    monkeypatch.setitem(sys.modules, "rewards", rewards)
    text = "\n".join(block.splitlines()[1:-1]).replace("extends: ", f"extends: {ROOT}/")
    (tmp_path / "mine.yaml").write_text(text)
    assert not any(form in recipe_load.load(tmp_path / "mine.yaml").data.instruction for form in FORMS)


def test_what_a_resumed_run_may_change_is_said():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    said = page.partition("A resumed run may change ")[2].partition("\n\n")[0]
    unnoticed = {"run_dir", "variant", "inputs_from"}  # of the folder's name and of a message
    assert {*re.findall(r"`([\w.]+)`", said)} == {*MAY_CHANGE} - unnoticed


def test_the_example_of_a_sweep_is_one(tmp_path):
    (block,) = (each for each in FENCE.findall((ROOT / "docs/recipes.md").read_text()) if "my_sweep" in each)
    (tmp_path / "sweep.yaml").write_text("\n".join(block.splitlines()[1:-1]))
    (tmp_path / "mine.yaml").write_text(f"extends: {ROOT}/recipes/tiny_cpu.yaml\n")
    plan = Plan(load_sweep(tmp_path / "sweep.yaml"))
    assert [recipe.sampling for recipe in plan.recipes()] == ["equal_length", "independent"]


def test_links_of_pages_lead_to_what_the_site_has():
    links = {link for file in FILES for link in LINK.findall(FENCE.sub("", file.read_text()))}
    code = re.compile(r"(\.\./)*(megatron_eqlen|tools|tests)/.*\.(?!md)\w+$")
    assert [link for link in links if code.match(link)] == []


def test_the_readme_of_a_folder_names_it_and_leaves_the_rest_to_the_pages():
    words = {file.parent.name: len(file.read_text().split()) for file in PACKAGE.glob("*/README.md")}
    assert {folder: count for folder, count in words.items() if count > 40} == {}
    assert len(words) > 20


def test_a_first_reading_takes_8000_words():
    text = (ROOT / "README.md").read_text().partition("A first reading, 8,000 words:")[2]
    path = re.findall(r"\]\((docs/\w+\.md)\)", text.partition("\n\n")[0])
    assert len(path) >= 4
    assert sum(len((ROOT / name).read_text().split()) for name in ["README.md", *path]) <= 8000


@pytest.mark.parametrize("page", ["objectives.md", "related.md"])
def test_a_page_has_a_row_for_each_method(page):
    table = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    named = set(re.findall(r"[a-z_0-9]+", " ".join(table)))
    assert set(OBJECTIVES) <= named


def rows(table: str) -> dict[str, list[str]]:
    """Return the lines of all tables in a reference by the names in their first cell."""
    cells = [line[2:-2].split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {line[0].strip("`"): line[1:] for line in cells}


def test_the_reference_of_keys_has_every_key_with_its_meaning():
    table = rows(keys())
    sections = {key.rpartition(".")[0].removesuffix("[]") for key in KEYS}
    assert set(table) == {key for key in KEYS if key not in sections}
    unsaid = {key for key, (*_, meaning) in table.items() if not meaning.strip()}
    assert unsaid == set(), "a key's docstring in recipe/schema.py says what it means"


def test_the_reference_of_metrics_has_every_metric_with_unit_and_meaning():
    table = rows(metrics())
    assert set(table) == {declared.name for declared in DECLARED}
    assert all(cell.strip() for cells in table.values() for cell in cells[:3])


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_made_from_code_is_what_the_code_says_today(name):
    assert PAGES[name].read_text() == page(name), "tools/reference.py write makes it"


def test_every_page_of_the_documentation_is_in_the_navigation_of_the_site():
    pages = {str(file.relative_to(ROOT)) for file in FILES if file.parent == ROOT / "docs"}
    assert pages == set(re.findall(r": (docs/\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))


def test_the_reference_of_files_says_of_every_module_what_it_holds():
    table = rows(files())
    modules = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if file.stat().st_size}
    assert set(table) == modules
    assert all(content.strip() for (content,) in table.values())


def test_the_messages_of_troubleshooting_are_in_the_code():
    """The test looks for each code span in the first column of a table of messages, up to its ellipsis."""
    text = (ROOT / "docs/troubleshooting.md").read_text()
    tables = re.findall(r"^\| message \|.*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [line.split("|")[1] for table in tables for line in table.splitlines()]
    spans = [span for cell in cells for _, span in CODE.findall(cell)]
    parts = [part.strip(" .:,") for span in spans for part in span.split("...")]
    source = "\n".join(file.read_text() for file in (ROOT / "megatron_eqlen").rglob("*.py"))
    source = re.sub(r'"\n\s*f?"', "", source)  # a text in several pieces
    messages = [part for part in parts if part and not part.isupper()]
    assert len(messages) > 5
    assert [message for message in messages if message.split("KEY")[0] not in source] == []


def test_the_version_is_the_same_wherever_it_is_written():
    written = {
        "pyproject.toml": r'(?m)^version = "(.+)"$',
        "CITATION.cff": r"(?m)^version: (.+)$",
        "CHANGELOG.md": r"(?m)^## ([\d.]+)",
    }
    found = {re.findall(pattern, (ROOT / file).read_text())[0] for file, pattern in written.items()}
    assert len(found) == 1
