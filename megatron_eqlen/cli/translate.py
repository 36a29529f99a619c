"""``eqlen recipe --from verl FILE``: a recipe of ours from another trainer's configuration.

The configuration is a YAML file, a shell script with ``key=value`` or ``--key value``, or TRL's Python.
Nothing of it is executed. The table ``recipe/others.yaml`` says what each key becomes.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.recipe import RecipeError
from megatron_eqlen.recipe.engine_options import check_options
from megatron_eqlen.recipe.others import Row, table
from megatron_eqlen.recipe.yaml_values import in_one_line, read_value, to_yaml

NOTHING = ("", "none", "null", "false", "[]", "{}", "-1", "???")
"""Values that ask for nothing."""
NEEDED = {"name": "mine", "steps": "1000000", "model": {"path": "MODEL"}}
"""Values in place of keys that are still to be added, so that the others can be checked."""
COUNTED: tuple[str, ...] = ("keys translated", "need none here", "without a counterpart", "unknown")
PYTHON_CALLS = ("GRPOConfig", "GRPOTrainer", "LoraConfig", "ModelConfig", "ScriptArguments")
ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*))?\}|(\w+))")


@dataclass
class Translation:
    """Recipe keys from another trainer's, and what is to be said about them."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Our keys, dotted, as texts, lists and mappings."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Sentences under each of the headings ``to add``, ``another meaning``, ``no counterpart``,
    ``unknown``."""
    counts: dict[str, int] = field(default_factory=dict)

    def note(self, heading: str, text: str) -> None:
        known = self.notes.setdefault(heading, [])
        known += [text] * (text not in known)

    def text(self, source: str) -> str:
        """Return the recipe as YAML, the notes as comments above it."""
        counts = ", ".join(f"{number} {what}" for what, number in self.counts.items())
        lines = [f"From {source}: {counts}."]
        for heading, notes in self.notes.items():
            lines += ["", f"{heading.capitalize()}:", *(f"  {note}" for note in notes)]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines) + to_yaml(_nested(self.keys))


def translate(trainer: str, file: Path) -> Translation:
    """Return the recipe for a configuration of ``trainer``. Raises ValueError for a file without one."""
    theirs = read(file, trainer)
    rows = table()[trainer]
    if not any(_row(rows, key) for key in theirs):
        raise ValueError(
            f"{file}: expected a configuration of {trainer} (YAML, a shell script, or TRL's Python), found "
            f"{len(theirs)} keys and none of its"
        )
    done, parts = Translation({"name": file.stem, "sampling": "independent"}), {}
    counts = dict.fromkeys(COUNTED, 0)
    for row in rows:
        given = {key: value for key, value in theirs.items() if _row(rows, key) is row}
        if row.default is not None and not given and not row.lost:
            _take(row, row.theirs, row.default, done, parts, False)
        for key, value in given.items():
            counts[_take(row, key, value, done, parts, True)] += 1
    for key in theirs:
        if _row(rows, key) is None:
            done.note("unknown", f"{key}={_shown(theirs[key])}")
            counts["unknown"] += 1
    done.counts = counts
    _compute(done, parts, file)
    _check(done)
    return done


def _row(rows: list[Row], key: str) -> Row | None:
    exact = (row for row in rows if row.theirs == key)
    return next(exact, None) or next((row for row in rows if fnmatchcase(key, row.theirs)), None)


def _take(row: Row, key: str, value: Any, done: Translation, parts: dict[str, Any], given: bool) -> str:
    """Translate one key; return the heading under which it is counted."""
    small = str(value).lower()
    if row.always:
        return "need none here"
    if row.lost:
        if small == str(row.default).lower() or small in NOTHING or re.fullmatch(r"0(\.0*)?", small):
            return "need none here"
        done.note("no counterpart", f"{key}={_shown(value)}: {row.lost}")
        return "without a counterpart"
    if row.values is not None:
        by_case = {name.lower(): new for name, new in row.values.items()}
        if small not in by_case:
            done.note("no counterpart", f"{key}={_shown(value)}: {row.ours} has {', '.join(row.values)}")
            return "without a counterpart"
        value = by_case[small]
    elif small in NOTHING[:3] or small == "???":
        return "need none here"
    if row.differs and given:
        done.note("another meaning", f"{key} -> {row.ours}: {row.differs}")
    if row.computed in ("megatron", "vllm"):
        _pass_through(str(row.ours), key, value, done)
    elif row.computed:
        parts[row.computed] = value
    else:
        done.keys |= value if isinstance(value, dict) else {str(row.ours): value}
    return "keys translated"


def _pass_through(ours: str, key: str, value: Any, done: Translation) -> None:
    name, _, below = re.split(r"override_transformer_config\.|engine_kwargs\.vllm\.|rollout\.", key)[
        -1
    ].partition(".")
    try:
        check_options(ours, {name: value})
    except ValueError as error:
        done.note("no counterpart", f"{key}={_shown(value)}: {error}")
    else:
        done.keys[f"{ours}.{name}" + f".{below}" * bool(below)] = value


def _compute(done: Translation, parts: dict[str, Any], file: Path) -> None:
    """Add the keys that follow from several of theirs."""
    keys, get = done.keys, parts.get
    group = _number(keys.get("group_size")) or 1
    if "device_batch" in parts:  # TRL
        responses = _number(get("device_batch")) * _number(get("accumulation")) * _number(get("processes"))
        keys["data.prompts_per_step"] = max(1, round(_number(get("generation_batch") or responses) / group))
        keys["cluster.processes_per_node"] = get("processes")
        if get("steps_per_generation"):
            keys["loss.minibatches"] = round(
                _number(get("steps_per_generation")) / _number(get("accumulation"))
            )
        if get("processes") == "1":
            done.note("to add", "data.prompts_per_step and cluster.processes_per_node are for one process")
    prompts = _number(keys.get("data.prompts_per_step")) or 1
    if size := _number(get("minibatch_prompts")) or _number(get("minibatch_samples")) / group:
        keys["loss.minibatches"] = max(1, round(prompts / size))
    _clip(keys, parts)
    _correct(keys, parts)
    _sources(keys, parts, done)
    if (steps := _number(get("max_steps"))) > 0:
        keys["steps"] = round(steps)
    if "steps" not in keys and get("epochs"):
        if rows := _rows(get("train_files")):
            keys["steps"] = max(1, round(_number(get("epochs")) * (rows // prompts)))
        else:
            done.note("to add", f"steps: {get('epochs')} epochs x rows / {prompts:g} prompts a step")
    updates = _number(keys.get("steps")) * _number(keys.get("loss.minibatches", 1))
    warmup = _number(get("warmup_steps", 0))
    keys["optimizer.warmup_steps"] = max(0, round(warmup))
    if (ratio := _number(get("warmup_ratio")) or warmup % 1) and not (warmup >= 1):
        keys["optimizer.warmup_steps"] = round(ratio * updates)
        if not updates:
            done.note("to add", f"optimizer.warmup_steps: {ratio:g} x steps x loss.minibatches")
    for part, key in (("save_every", "checkpoint.every"), ("eval_every", "evaluation.every")):
        if (every := _number(get(part))) > 0 and not (part == "eval_every" and "benchmarks" not in parts):
            keys[key] = round(every)
    path = _number(keys.get("data.max_prompt_length", 2048)) + _number(
        keys.get("rollout.max_response_length")
    )
    keys["packing.max_tokens_per_row"] = round(max(path, _number(get("row_tokens"))))
    if experiment := re.sub(r"[^\w.,=+@ -]+", "-", str(get("experiment", ""))).strip("-"):
        keys["name"] = experiment[:100]
    if "wandb" in str(get("logger", "")):
        keys["report.wandb_project"] = get("project", keys["name"])


def _clip(keys: dict[str, Any], parts: dict[str, Any]) -> None:
    if "epsilon" in parts:
        keys["loss.clip_ratio_low"] = parts["epsilon"]
        keys["loss.clip_ratio_high"] = parts.get("epsilon_high", parts["epsilon"])
    if keys.get("loss.surrogate", "ppo") != "ppo" or keys.get("objective") in ("gspo", "cispo"):
        keys.pop("loss.clip_ratio_c", None)
    if keys.get("loss.surrogate") == "vespo":
        del keys["loss.clip_ratio_low"], keys["loss.clip_ratio_high"]
    if _number(keys.get("loss.clip_ratio_low")) > 1:  # no ratio lies below 0
        keys["loss.clip_ratio_low"] = "1"
    if _number(keys.get("loss.kl_coef")) == 0:
        keys.pop("loss.kl_estimator", None)
    if not _is_true(keys.get("loss.dynamic_sampling")):
        keys.pop("loss.max_num_gen_batches", None)
    if not _number(keys.get("lora.rank")):
        keys.pop("lora.alpha", None)


def _correct(keys: dict[str, Any], parts: dict[str, Any]) -> None:
    """Add the corrections of the mismatch: ``0.5_5.0`` is a band in verl, TRL's masks are bands from 0."""
    if keys.get("loss.rollout_is", "none") != "none" and (bound := parts.get("is_threshold")):
        keys["loss.rollout_is_threshold"] = _band(bound)
    if rules := parts.get("rs"):
        bounds = str(parts.get("rs_threshold", "2.0")).split(",")
        named = zip(str(rules).split(","), bounds * len(str(rules).split(",")), strict=False)
        keys["loss.rollout_rs"] = {name.strip(): _band(bound) for name, bound in named}
    if "dynamic_filter" in parts:
        keys["loss.dynamic_sampling"] = "true"


def _band(text: Any) -> Any:
    return str(text).split("_") if "_" in str(text) else text


def _sources(keys: dict[str, Any], parts: dict[str, Any], done: Translation) -> None:
    """Add data, benchmarks and graders."""
    grader = None
    if path := parts.get("reward_file"):
        file = Path(str(path))
        grader = f"{file.stem}:{parts.get('reward_name', 'compute_score')}"
        done.note("to add", f"{path} as {file.stem}.py in the working directory, for {grader}")
    if "reward_functions" in parts:
        done.note("to add", f"data.sources.0.grader: module:function for {_shown(parts['reward_functions'])}")
    files, named = _listed(parts.get("train_files")), _listed(parts.get("named_files"))
    benchmarks = dict(zip(named[::2], named[1::2], strict=False)) or {
        _name(path): path for path in _listed(parts.get("val_files"))
    }
    if not files:
        done.note("to add", "data.sources.0.path: the training data")
    more = {
        ours: parts[part]
        for ours, part in (("config", "dataset_config"), ("split", "dataset_split"))
        if part in parts
    }
    more |= {"grader": grader} if grader else {}
    keys["data.sources"] = [
        {"name": _name(path), "reader": "jsonl", "path": path, **more} for path in files or ["DATA"]
    ]
    if benchmarks:
        parts["benchmarks"] = benchmarks
        own = {"grader": grader} if grader else {}
        keys["evaluation.benchmarks"] = [
            {"name": name, "reader": "jsonl", "path": path, **own} for name, path in benchmarks.items()
        ]
    else:
        keys.pop("evaluation.samples", None)


def _check(done: Translation) -> None:
    """Give values the types of their keys, and note what cannot be as it is."""
    try:
        recipe = parse(_nested(_flat(NEEDED) | done.keys), "recipe")
    except RecipeError as error:
        done.note("to mend", str(error).removeprefix("recipe: "))
        return
    typed = _flat(recipe.model_dump(mode="json", exclude_unset=True))
    done.keys = {key: value for key, value in typed.items() if key in done.keys}


def _flat(tree: dict[str, Any], at: str = "") -> dict[str, Any]:
    """Return values and lists by their dotted keys; the bounds of ``loss.rollout_rs`` stay together."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{at}{key}"
        is_section = isinstance(value, dict) and name != "loss.rollout_rs"
        flat |= _flat(value, f"{name}.") if is_section else {name: value}
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
            found = _flat(read_value(text) or {})
            return {key: value for key, value in found.items() if "${" not in str(value)}
        return dict(_of_shell(text, dotted=trainer == "verl"))
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: cannot be read as a configuration: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not valid YAML: {in_one_line(error)}") from None


def _of_python(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of TRL's classes: constants, or else their source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in PYTHON_CALLS:
            for word in node.keywords:
                if word.arg not in (None, "args", "train_dataset", "eval_dataset", "peft_config"):
                    value = word.value.value if isinstance(word.value, ast.Constant) else None
                    yield str(word.arg), ast.unparse(word.value) if value is None else str(value)


def _of_shell(text: str, dotted: bool) -> Iterator[tuple[str, Any]]:
    """Yield ``a.b=c`` (``dotted``) or ``--a c`` of a script, with its variables put in. Of branches (``if``,
    ``case``) the first value of a name counts, elsewhere the last."""
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text).replace("\\\n", " ")
    text = ARITHMETIC.sub(lambda sum_: "$[" + re.sub(r"\s", "", sum_[1]) + "]", text)
    variables, yielded, depth, option = dict(os.environ), set[str](), 0, ""
    for word in shlex.split(text):
        depth += (word in ("if", "case")) - (word.rstrip(";") in ("fi", "esac"))
        if match := re.fullmatch(r"(\w+)=(.*)", word, re.DOTALL):
            if not (depth and variables.get(match[1])):
                variables[match[1]] = _expanded(match[2], variables)
            option = ""
        elif dotted and (
            match := re.fullmatch(r"\(?\+{0,2}([\w@]+(?:\.[\w@]+)+|model_engine)=(.*)", word, re.DOTALL)
        ):
            if not (depth and match[1] in yielded):
                yielded.add(match[1])
                yield match[1], _value(_expanded(match[2].rstrip(")"), variables))
        elif not dotted and (match := re.fullmatch(r"\(?--([a-z][\w-]+)(?:=(.*))?", word, re.DOTALL)):
            option = match[1].replace("-", "_")
            yield option, _value(_expanded(match[2], variables)) if match[2] else "true"
            earlier: list[str] = []
        elif option and re.fullmatch(r"[^()|&;\\]+", word):
            earlier.append(_expanded(word, variables))
            yield option, earlier[0] if len(earlier) == 1 else [*earlier]
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

    def of(node: ast.AST) -> int:
        match node:
            case ast.Expression(body):
                return of(body)
            case ast.Constant(int(value)):
                return value
            case ast.Name(name):
                return int(variables.get(name) or 0)
            case ast.BinOp(left, sign, right):
                return OPERATORS[type(sign)](of(left), of(right))
            case _:
                raise ValueError

    try:
        return str(of(ast.parse(text.replace("$", ""), mode="eval")))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return ""


def _value(text: str) -> Any:
    """Return a list for ``[a, b]``, else the text."""
    return read_value(text) if text.startswith("[") else text


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _listed(value: Any) -> list[str]:
    return [] if not value else [str(each) for each in value] if isinstance(value, list) else [str(value)]


def _name(path: str) -> str:
    """Return a name for a file: that of its folder for ``train.parquet``."""
    file = Path(path)
    return file.parent.name if file.stem in ("train", "test", "val") and file.parent.name else file.stem


def _rows(files: Any) -> int:
    """Return the number of rows of local files, 0 if one is not there."""
    count = 0
    for file in map(Path, _listed(files)):
        if not file.is_file():
            return 0
        if file.suffix == ".parquet":
            count += pq.read_metadata(file).num_rows
        else:
            with file.open("rb") as lines:
                count += sum(1 for _ in lines)
    return count


def _shown(value: Any) -> str:
    return f"{value}"[:80]
