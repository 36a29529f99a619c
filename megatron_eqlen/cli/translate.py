"""``eqlen recipe --from verl FILE``: a recipe of ours from another trainer's configuration.

The configuration is a YAML file, a shell script with ``key=value`` or ``--key value``, or TRL's Python.
Nothing of it is executed. The table ``recipe/others.yaml`` says what each key becomes; batches, steps and
bounds that follow from several keys are computed here.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pyarrow.dataset import dataset
from pydantic import TypeAdapter

from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.recipe import RecipeError
from megatron_eqlen.recipe.engine_options import OPTIMIZER_DEFAULTS, check_options
from megatron_eqlen.recipe.others import Row, table
from megatron_eqlen.recipe.yaml_values import Options, Plain, in_one_line, read_value, to_yaml

UNSET = re.compile(r"|none|null|\?\?\?")
NOTHING = re.compile(UNSET.pattern + r"|false|\[\]|\{\}|-1|0(\.0*)?")
"""Values that ask for nothing, of a key without a counterpart."""
NEEDED = {"name": "mine", "steps": "1000000", "model.path": "MODEL"}
"""Values in place of keys that are still to be added, so that the others can be checked."""
POSITIVE = {"steps": "max_steps", "checkpoint.every": "save_every", "evaluation.every": "eval_every"}
"""Keys that theirs give as a number above 0, or else not at all."""
PYTHON_CALLS = ("GRPOConfig", "GRPOTrainer", "LoraConfig", "ModelConfig", "ScriptArguments")
NO_OPTIONS = (None, "args", "train_dataset", "eval_dataset", "peft_config")
"""Arguments of TRL's classes that are objects."""
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*))?\}|(\w+))")
DOTTED = re.compile(r"\(?\+{0,2}([\w@]+(?:\.[\w@]+)+|model_engine)=(.*)", re.DOTALL)
OPTION = re.compile(r"\(?--([a-z][\w-]+)(?:=(.*))?", re.DOTALL)
OPTIONS = TypeAdapter(Options)
DATA = {"dataset_config": "config", "dataset_split": "split"}


@dataclass
class Translation:
    """Recipe keys from another trainer's, and what is to be said about them."""

    keys: dict[str, Any]
    """Our keys, dotted, as texts, lists and mappings."""
    assumed: set[str] = field(default_factory=set)
    """Keys that stand for their defaults."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Values from which keys are computed, by the names that the table gives them (``as``)."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Sentences under each of the headings ``to add``, ``another meaning``, ``no counterpart``, ``left out``,
    ``unknown``."""

    def note(self, heading: str, text: str) -> None:
        known = self.notes.setdefault(heading, [])
        known += [text] * (text not in known)

    def text(self, source: str) -> str:
        """Return the recipe as YAML, the notes as comments above it."""
        lines = [f"From {source}: {len(self.keys)} keys."]
        for heading, notes in self.notes.items():
            lines += ["", f"{heading.capitalize()}:", *(f"  {note}" for note in notes)]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines) + to_yaml(_nested(self.keys))

    def number(self, name: str, default: float = 0.0) -> float:
        """Return one of ``parts`` or ``keys``; ``default`` for none and for what is no number."""
        try:
            return float(self.parts.get(name, self.keys.get(name, default)))
        except (TypeError, ValueError):
            return default


def translate(trainer: str, file: Path) -> Translation:
    """Return the recipe for a configuration of ``trainer``. Raises ValueError for a file without one."""
    rows = table()[trainer]
    theirs = read(file, trainer)
    row_of = {key: _row(rows, key) for key in theirs}
    if not any(row_of.values()):
        raise ValueError(
            f"{file}: expected a configuration of {trainer} (YAML, a shell script, or TRL's Python), found "
            f"{len(theirs)} keys and none of its"
        )
    done = Translation({"name": file.stem, "sampling": "independent"})
    for row in rows:
        given = [key for key in theirs if row_of[key] is row]
        for key in given:
            _take(row, key, theirs[key], done)
        if row.default is not None and not given and not row.lost:
            _take(row, row.theirs, row.default, done, given=False)
    for key in (key for key, row in row_of.items() if row is None):
        done.note("unknown", f"{key}={theirs[key]!s:.80}")
    _add_computed(done)
    _add_data(done)
    _check(done)
    return done


def _row(rows: list[Row], key: str) -> Row | None:
    exact = (row for row in rows if row.theirs == key)
    return next(exact, None) or next((row for row in rows if fnmatchcase(key, row.theirs)), None)


def _take(row: Row, key: str, value: Any, done: Translation, given: bool = True) -> None:
    """Translate one key; not ``given``: their default."""
    small = str(value).lower()
    values = None if row.values is None else {name.lower(): new for name, new in row.values.items()}
    if row.always or (row.lost and (NOTHING.fullmatch(small) or small == str(row.default).lower())):
        return
    if not row.lost and values is None and UNSET.fullmatch(small):
        return
    why = row.lost if values is None or small in values else f"{row.ours} has {', '.join(row.values or ())}"
    value = value if values is None or why else values[small]
    if row.computed in ("megatron", "vllm"):
        option = re.split(r"override_transformer_config\.|engine_kwargs\.vllm\.|rollout\.", key)[-1]
        value = Plain(value) if isinstance(value, str) else value
        try:
            check_options(str(row.ours), OPTIONS.validate_python({option.partition(".")[0]: value}))
            done.keys[f"{row.ours}.{option}"] = value
        except ValueError as error:
            why = str(error)
    elif row.computed:
        done.parts[row.computed] = value
    elif not why:
        new = value if isinstance(value, dict) else {str(row.ours): value}
        done.keys |= new
        done.assumed = done.assumed - {*new} if given else done.assumed | {*new}
    if why:
        done.note("no counterpart", f"{key}={value!s:.80}: {why}")
    elif row.differs and given:
        done.note("another meaning", f"{key} -> {row.ours}: {row.differs}")


def _add_computed(done: Translation) -> None:
    """Add the keys that follow from several of theirs."""
    keys, parts, number = done.keys, done.parts, done.number
    if name := re.sub(r"[^\w.,=+@ -]+", "-", str(parts.get("experiment", ""))).strip("-"):
        keys["name"] = name[:100]
    for key, part in POSITIVE.items():
        if number(part) > 0:
            keys[key] = round(number(part))
    _add_batches(done)
    ratio, warmup = number("warmup_ratio"), max(number("warmup_steps"), 0.0)
    if warmup < 1:
        updates = number("steps") * (number("loss.minibatches") or 1)
        ratio, warmup = ratio or warmup, (ratio or warmup) * updates
        if ratio and not updates:
            done.note("to add", f"optimizer.warmup_steps: {ratio:g} x steps x loss.minibatches")
    keys["optimizer.warmup_steps"] = round(warmup)
    longest = (number("data.max_prompt_length") or 2048) + number("rollout.max_response_length")
    keys["packing.max_tokens_per_row"] = round(max(longest, number("row_tokens")))
    if "wandb" in str(parts.get("logger", "")):
        keys["report.wandb_project"] = parts.get("project", keys["name"])
    keys |= {f"model.megatron.{name}": Plain(parts[name]) for name in OPTIMIZER_DEFAULTS if name in parts}
    if "epsilon" in parts:
        keys["loss.clip_ratio_low"] = parts["epsilon"]
        keys["loss.clip_ratio_high"] = parts.get("epsilon_high", parts["epsilon"])
    if "is_threshold" in parts and keys.get("loss.rollout_is", "none") != "none":
        threshold = str(parts["is_threshold"])
        keys["loss.rollout_is_threshold"] = threshold.split("_") if "_" in threshold else threshold
    if "dynamic_filter" in parts:
        keys["loss.dynamic_sampling"] = True
    if "rs" in parts:
        rules, bounds = str(parts["rs"]).split(","), str(parts.get("rs_threshold", "2.0")).split(",")
        named = zip(rules, bounds * len(rules), strict=False)
        keys["loss.rollout_rs"] = {
            rule.strip(): bound.split("_") if "_" in bound else bound for rule, bound in named
        }


def _add_batches(done: Translation) -> None:
    """Add the numbers of prompts, of updates and of steps."""
    keys, parts, number = done.keys, done.parts, done.number
    group = number("group_size") or 1
    if batch := number("device_batch"):
        responses = number("generation_batch") or batch * number("accumulation") * number("processes")
        keys["data.prompts_per_step"] = max(1, round(responses / group))
        keys["cluster.processes_per_node"] = parts["processes"]
        if number("processes") == 1:
            done.note("to add", "data.prompts_per_step and cluster.processes_per_node are for one process")
        if number("steps_per_generation"):
            updates = number("steps_per_generation") / (number("accumulation") or 1)
            keys["loss.minibatches"] = max(1, round(updates))
    elif "device_batch" in parts:
        done.note("to add", f"data.prompts_per_step: {parts['device_batch']} responses on each process")
    prompts = number("data.prompts_per_step") or 1
    if size := number("minibatch_prompts") or number("minibatch_samples") / group:
        keys["loss.minibatches"] = max(1, round(prompts / size))
    epochs = number("epochs")
    if not epochs or "steps" in keys:
        return
    if rows := _rows(_listed(parts.get("train_files"))):
        keys["steps"] = max(1, round(epochs * (rows // prompts)))
    else:
        done.note("to add", f"steps: {epochs:g} epochs x rows / {prompts:g} prompts a step")


def _add_data(done: Translation) -> None:
    """Add data, benchmarks and graders."""
    keys, parts, grader = done.keys, done.parts, dict[str, str]()
    if path := parts.get("reward_file"):
        module = Path(str(path)).stem
        grader["grader"] = f"{module}:{parts.get('reward_name', 'compute_score')}"
        done.note("to add", f"{path} as {module}.py in the working directory, for {grader['grader']}")
    if functions := parts.get("reward_functions"):
        done.note("to add", f"data.sources.0.grader: module:function for {functions}"[:120])
    files, named = _listed(parts.get("train_files")), _listed(parts.get("named_files"))
    if not files:
        done.note("to add", "data.sources.0.path: the training data")
    tests = dict(zip(named[::2], named[1::2], strict=False))
    tests = tests or {_name(path): path for path in _listed(parts.get("val_files"))}
    own = {ours: parts[part] for part, ours in DATA.items() if part in parts} | grader
    read = {"reader": "jsonl"}
    keys["data.sources"] = [{"name": _name(path), **read, "path": path, **own} for path in files or ["DATA"]]
    keys["evaluation.benchmarks"] = [{"name": n, **read, "path": path, **grader} for n, path in tests.items()]
    if not tests:
        done.keys = {key: value for key, value in keys.items() if not key.startswith("evaluation.")}


def _check(done: Translation) -> None:
    """Give values the types of their keys; leave out, with the reason, what cannot be as it is."""
    while True:
        try:
            recipe = parse(_nested(NEEDED | done.keys), "recipe")
        except RecipeError as error:
            why = str(error).removeprefix("recipe: ")
            key = why.partition(":")[0]
            known = key in done.keys
            if key not in done.assumed:
                done.note("left out" if known else "to mend", why)
            if not known:
                return
            del done.keys[key]
        else:
            typed = _flat(recipe.model_dump(mode="json", exclude_unset=True))
            done.keys = {key: value for key, value in typed.items() if key in done.keys}
            return


def _flat(tree: dict[str, Any], at: str = "") -> dict[str, Any]:
    """Return values and lists by their dotted keys; the bounds of ``loss.rollout_rs`` stay together."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, dict) and f"{at}{key}" != "loss.rollout_rs"
        flat |= _flat(value, f"{at}{key}.") if is_section else {f"{at}{key}": value}
    return flat


def _nested(keys: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, last = key.split(".")
        at = tree
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def read(file: Path, trainer: str) -> dict[str, Any]:
    """Return the keys of a configuration with their values as text or lists."""
    text = file.read_text(encoding="utf-8")
    try:
        if file.suffix == ".py":
            return dict(_of_python(text))
        if file.suffix in (".yaml", ".yml", ".json"):
            sections = read_value(text) or {}
            if not isinstance(sections, dict):
                raise ValueError(f"expected a mapping of keys, found a {type(sections).__name__}")
            return {key: value for key, value in _flat(sections).items() if "${" not in str(value)}
        return dict(_of_shell(text, DOTTED if trainer == "verl" else OPTION))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as a configuration: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not valid YAML: {in_one_line(error)}") from None


def _of_python(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of TRL's classes: constants, or else their source."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    for call in (call for call in calls if ast.unparse(call.func).rpartition(".")[2] in PYTHON_CALLS):
        for word in (word for word in call.keywords if word.arg not in NO_OPTIONS):
            value = getattr(word.value, "value", None) if isinstance(word.value, ast.Constant) else None
            yield str(word.arg), ast.unparse(word.value) if value is None else str(value)


def _of_shell(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, Any]]:
    """Yield ``a.b=c`` or ``--a c`` (``pattern``) of a script, with its variables put in. Of branches (``if``,
    ``case``) the first value of a name counts, elsewhere the last."""
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text).replace("\\\n", " ")
    text = re.sub(r"\$\(\((.*?)\)\)", lambda sum_: "$[" + re.sub(r"\s", "", sum_[1]) + "]", text)
    variables, yielded, depth, option, listed = dict(os.environ), set[str](), 0, "", list[str]()
    for word in shlex.split(text):
        depth += (word in ("if", "case")) - (word.rstrip(";") in ("fi", "esac"))
        match = pattern.fullmatch(word)
        if assigned := re.fullmatch(r"(\w+)=(.*)", word, re.DOTALL):
            if not (depth and variables.get(assigned[1])):
                variables[assigned[1]] = _expanded(assigned[2], variables)
            option = ""
        elif match and pattern is DOTTED:
            if not (depth and match[1] in yielded):
                yielded.add(match[1])
                value = _expanded(match[2].rstrip(")"), variables)
                yield match[1], read_value(value) if value.startswith("[") else value
        elif match:
            option, listed = match[1].replace("-", "_"), []
            yield option, _expanded(match[2], variables) if match[2] else "true"
        elif option and re.fullmatch(r"[^()|&;\\]+", word):
            listed.append(_expanded(word, variables))
            yield option, listed[0] if len(listed) == 1 else [*listed]
        else:
            option = ""


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Return the text with variables and sums put in; commands are left out."""
    text = re.sub(r"\$\([^()]*(\)|$)", "", text)
    while match := VARIABLE.search(text):
        value = variables.get(match[1] or match[3]) or match[2] or ""
        text = text[: match.start()] + value + text[match.end() :]
    return re.sub(r"\$\[(.*?)\]", lambda sum_: _sum(sum_[1], variables), text)


def _sum(text: str, variables: dict[str, str]) -> str:
    """Return the value of shell arithmetic of whole numbers and variables, empty for anything else."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0]) or "0", text)
    if not re.fullmatch(r"(\d+|[-+()]|[*/](?![*/]))+", text):
        return ""
    try:
        return str(eval(text.replace("/", "//")))
    except (SyntaxError, ZeroDivisionError, TypeError):
        return ""


def _listed(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value] if value else [])]


def _name(path: str) -> str:
    """Return a name for a file: that of its folder for ``train.parquet``."""
    file = Path(path)
    return file.parent.name if file.stem in ("train", "test", "val") and file.parent.name else file.stem


def _rows(files: list[str]) -> int:
    """Return the number of rows of local files, 0 if one is not there."""
    if not all(map(os.path.isfile, files)):
        return 0
    tables = (dataset(name, format="parquet" if name.endswith("parquet") else "json") for name in files)
    return sum(table.count_rows() for table in tables)
