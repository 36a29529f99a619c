"""``eqlen recipe --from verl FILE``: a recipe of ours from another trainer's configuration.

    script ─► bash, in the sandbox ─► arguments ─┐
    resolved YAML, TRL's YAML, saved arguments ──┴─► keys ─► the table others.yaml ─► recipe, with holes

Every key of theirs ends as ``same``, ``changed``, ``lost`` or ``irrelevant``. A lost key is a hole in the
recipe, ``???``, which ``recipe.load`` refuses. Batches, steps and bounds that follow from several keys are
computed here.
"""

from __future__ import annotations

import ast
import math
import os
import re
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pyarrow.dataset import dataset
from pydantic import TypeAdapter

from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.recipe import Recipe, RecipeError
from megatron_eqlen.recipe.engine_options import OPTIMIZER_DEFAULTS, check_options
from megatron_eqlen.recipe.load import HOLE
from megatron_eqlen.recipe.others import TRAINERS, Row, defaults, table
from megatron_eqlen.recipe.yaml_values import Options, Plain, in_one_line, read_value, to_yaml

UNSET = re.compile(r"|none|null|\?\?\?")
NOTHING = re.compile(UNSET.pattern + r"|false|\[\]|\{\}|-1(\.0*)?|0(\.0*)?")
"""Values that ask for nothing, of a key without a counterpart."""
LEARNED = re.compile("no such option|expected|must not depend|objective's alone|what is trained")
"""Reasons why an engine's option is refused that change what is learned."""
NEEDED: dict[str, Any] = {"name": "mine", "steps": "1000000", "model.path": "MODEL", "objective": "grpo"}
NEEDED["data.sources"] = [{"name": "mine", "path": "DATA"}]
"""Values in place of holes, so that the others can be checked."""
PYTHON_CALLS = ("GRPOConfig", "GRPOTrainer", "LoraConfig", "ModelConfig", "ScriptArguments")
NO_OPTIONS = (None, "args", "train_dataset", "eval_dataset", "peft_config", "processing_class", "callbacks")
"""Arguments of TRL's classes that are objects."""
HYDRA = re.compile(r"(?:\+{0,2})(~?[\w@]+(?:\.[\w@*-]+)+|model_engine)=?(.*)", re.DOTALL)
OPTION = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
OPTIONS = TypeAdapter(Options)
ALIASES = {"open-r1": "trl@0.18"}
EFFECTS = {
    "what is learned": ("objective", "loss", "reward", "teacher", "optimizer", "lora", "model", "steps"),
    "what is sampled": ("data", "sampling", "group_size", "environment", "rollout"),
    "evaluation": ("evaluation",),
    "speed, memory and records": (),
}
"""Effects of a change, the gravest first, with the sections and keys that have them."""


@dataclass
class Translation:
    """Recipe keys from another trainer's, and what became of each of these."""

    trainer: str
    version: str
    keys: dict[str, Any]
    """Our keys, dotted, as texts, lists and mappings."""
    theirs: dict[str, Any]
    remarks: list[str]
    outcomes: dict[str, str] = field(default_factory=dict)
    """``same``, ``changed``, ``lost`` or ``irrelevant``, by key of theirs."""
    holes: dict[str, str] = field(default_factory=dict)
    """Why a key of ours is a hole, or a key of theirs that has no counterpart."""
    changes: dict[str, str] = field(default_factory=dict)
    """Effects by the key of ours and what was there."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Keys of theirs that a key of ours, or a part, comes from."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Values from which keys are computed, by the names that the table gives them (``as``)."""

    def text(self, source: str) -> str:
        """Return the recipe as YAML, what became of their keys as comments above it."""
        wide = textwrap.TextWrapper(
            112, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        of = f"{self.trainer} {self.version}".strip()
        lines = [f"From {source}; what it leaves out has the default of {of}.", *self.remarks]
        if self.holes:
            lines += ["", "To fill in (???); a line that has no counterpart here is deleted:"]
            lines += [f"  {key}: {why}" for key, why in self.holes.items()]
        for effect in EFFECTS:
            changed = [f"  {text}" for text, own in self.changes.items() if own == effect]
            lines += ["", f"Changes {effect}:", *changed] if changed else []
        for end, what in (("same", "As there"), ("irrelevant", "Without effect here")):
            if named := [key for key, own in self.outcomes.items() if own == end]:
                lines += ["", *wide.wrap(f"{what} ({len(named)}): {', '.join(named)}")]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines) + to_yaml(_nested(self.keys))

    def hole(self, ours: str, key: str, why: str) -> None:
        """Leave a hole for the key of ours, or under theirs. ``key``: theirs, or a part's name."""
        self.holes[ours] = "; ".join(filter(None, (self.holes.get(ours), why)))
        for theirs in (key, *self.sources.get(key, ()), *self.sources.get(ours, ())):
            self.outcomes |= {theirs: "lost"} if theirs in self.theirs else {}

    def change(self, ours: str, key: str, text: str) -> None:
        """Say how a key of ours differs from what was there. ``key``: theirs, or a part's name."""
        key = next(iter(self.sources.get(key, ())), key)
        top = ours.partition(".")[0]
        effect = next((effect for effect, tops in EFFECTS.items() if top in tops), [*EFFECTS][-1])
        self.changes[f"{key} -> {ours}: {text}"] = effect
        if self.outcomes.get(key) == "same":
            self.outcomes[key] = "changed"

    def number(self, name: str, default: float = 0.0) -> float:
        """Return one of ``parts`` or ``keys``; ``default`` for none and for what is no number."""
        with suppress(TypeError, ValueError):
            return float(self.parts.get(name, self.keys.get(name, default)))
        return default

    def is_on(self, name: str, default: str = "false") -> bool:
        return str(self.parts.get(name, default)).lower() == "true"


def translate(trainer: str, file: Path, words: Sequence[str] = ()) -> Translation:
    """Return the recipe for a configuration of ``trainer``, perhaps with its version (``verl@0.6``).
    ``words``: arguments and NAME=VALUE of its environment, for a script. Raises ValueError for a file without
    a configuration of that trainer."""
    trainer, _, version = ALIASES.get(trainer, trainer).partition("@")
    if trainer not in TRAINERS:
        known = ", ".join((*TRAINERS, *ALIASES))
        raise ValueError(f"--from: expected {known}, perhaps with @VERSION, found {trainer!r}")
    left_out, remarks = defaults(trainer, version), list[str]()
    theirs = read(file, trainer, words, remarks)
    rows, row_of = table()[trainer], {key: _row(trainer, key) for key in theirs}
    if ours := theirs.keys() & {"group_size", "sampling", "objective", "data.sources", "model.path"}:
        raise ValueError(
            f"{file}: expected a file of {trainer}, found a recipe of this package ({min(ours)})"
        )
    if (known := sum(map(bool, row_of.values()))) < max(1, len(theirs) / 2):
        raise ValueError(
            f"{file}: expected a configuration of {trainer} (launch script, resolved YAML, saved arguments, "
            f"TRL's Python), found {len(theirs)} keys, {known} of them its own"
        )
    done = Translation(trainer, version, {"name": file.stem, "sampling": "independent"}, theirs, remarks)
    given = {row.computed for row in row_of.values() if row}
    for row in rows:
        for key in (key for key in theirs if row_of[key] is row):
            _take(row, key, theirs[key], done)
        if (
            row.theirs in left_out
            and row.theirs not in theirs
            and (not row.computed or row.computed not in given)
        ):
            _take(row, row.theirs, left_out[row.theirs], done)
    for key in (key for key, row in row_of.items() if row is None):
        done.hole(key, key, f"{theirs[key]!s:.60}: not known here")
    for add in (_add_learning, _add_corrections, _add_batches, _add_evaluation, _add_data, _check):
        add(done)
    return done


def _row(trainer: str, key: str) -> Row | None:
    rows = table()[trainer]
    exact = (row for row in rows if row.theirs == key)
    return next(exact, None) or next((row for row in rows if fnmatchcase(key, row.theirs)), None)


def _take(row: Row, key: str, value: Any, done: Translation) -> None:
    """Translate one key; one that is not in ``done.theirs`` stands for its default."""
    small, given, ours = str(value).lower(), key in done.theirs, str(row.ours).replace("[]", ".0")
    values = {name.lower(): new for name, new in (row.values or {}).items()}
    asks_nothing = (
        NOTHING.fullmatch(small) or row.asks_nothing(small) or (row.when and not done.number(row.when))
    )
    unset = row.values is None and UNSET.fullmatch(small)
    if row.irrelevant or (asks_nothing if row.lost else unset):
        done.outcomes |= {key: "irrelevant"} if given else {}
        return
    why = row.lost or (f"expected {', '.join(values)}" if values and small not in values else "")
    done.outcomes |= {key: "same"} if given else {}
    if why:
        done.hole(row.ours or key, key, f"{key}={value!s:.60}{'' if given else ' (its default)'}: {why}")
    elif row.computed in ("megatron", "vllm"):
        option = re.split(r"override_transformer_config\.|engine_kwargs\.vllm\.|rollout\.", key)[-1]
        value = Plain(value) if isinstance(value, str) else value
        try:
            check_options(ours, OPTIONS.validate_python({option.partition(".")[0]: value}))
            done.keys[f"{ours}.{option}"] = value
        except ValueError as error:
            if LEARNED.search(str(error)) and not asks_nothing:
                done.hole(key, key, f"{value!s:.60}: {error}")
            else:
                done.outcomes |= {key: "irrelevant"} if given else {}
    else:
        new = values[small] if values else value
        if row.computed:
            done.parts[row.computed] = value
        else:
            done.keys |= new if isinstance(new, dict) else {ours: new}
        for name in {ours, row.computed or ours}:
            done.sources.setdefault(name, []).append(key)
        if row.effect and not row.asks_nothing(small):
            done.change(ours, key, row.effect)


def _add_learning(done: Translation) -> None:
    """Add what is computed of objective, loss, teacher and optimizer."""
    keys, parts, number, group = done.keys, done.parts, done.number, done.number("group_size")
    divides = (
        keys.get("objective", "grpo") in ("grpo", "gspo", "cispo") and keys.get("loss.advantage") != "dr_grpo"
    )
    if divides and group > 1:
        more = f"{math.sqrt(group / (group - 1)):.3f} times theirs: their standard deviation is over n - 1"
        done.change("objective", "objective", f"advantages are {more}, ours over n")
    if "epsilon" in parts:
        keys["loss.clip_ratio_low"] = parts["epsilon"]
        keys["loss.clip_ratio_high"] = parts.get("epsilon_high") or parts["epsilon"]
    if "use_kl" in parts and not done.is_on("use_kl"):
        keys["loss.kl_coef"] = 0
    if "overlong" in parts:
        keys["loss.overlong_factor"] = number("overlong") / (1 if "reward_file" in parts else 2)
        if "reward_file" not in parts:
            text = "half of it: rewards of DAPO's and AIME's answers are +1 and -1 there, 1 and 0 here (where"
            done.change("loss.overlong_factor", "overlong", f"{text} they are 1 and 0 there: all of it)")
    if "dynamic_filter" in parts:
        keys["loss.dynamic_sampling"] = True
        if "nonzero_std" not in str(parts["dynamic_filter"]):
            done.hole(
                "loss.dynamic_sampling", "dynamic_filter", "replaces prompts whose rewards are all equal"
            )
    if number("gen_batches") > 0:
        keys["loss.max_num_gen_batches"] = parts["gen_batches"]
    elif "gen_batches" in parts:
        done.change("loss.max_num_gen_batches", "gen_batches", "10 batches, there no limit")
    if done.is_on("distilled"):
        keys |= {"teacher.path": parts.get("teacher"), "loss.teacher_coef": parts.get("teacher_coef", 1.0)}
        keys |= {} if done.is_on("task_rewards", "true") else {"loss.advantage": "none"}
        done.change(
            "teacher.path", "distilled", "the reverse KL of each sampled token acts through its advantage"
        )
        if "teacher" not in parts:
            done.hole("teacher.path", "distilled", "the teacher's folder, or its name on the hub")
    if isinstance(betas := parts.get("betas"), list):
        parts |= dict(zip(("adam_beta1", "adam_beta2"), betas, strict=False))
    if number("min_lr_ratio"):
        keys["optimizer.min_lr"] = number("min_lr_ratio") * number("optimizer.lr", 1e-6)
    keys |= {f"model.megatron.{name}": Plain(parts[name]) for name in OPTIMIZER_DEFAULTS if name in parts}


def _add_corrections(done: Translation) -> None:
    """Add corrections of the mismatch of trainer and engine."""
    keys, parts, mode = done.keys, done.parts, str(done.parts.get("is_mode", "none"))
    if (bound := done.number("tis")) > 0:
        keys |= {"loss.rollout_is": "token", "loss.rollout_is_threshold": bound}
    if "is_on" in parts:
        keys["loss.rollout_is"] = parts.get("is_level", "token") if done.is_on("is_on") else "none"
    if mode != "none" and keys.get("loss.rollout_is") != "none":
        keys["loss.rollout_is"] = mode.partition("_")[0]
    if keys.get("loss.rollout_is", "none") != "none" and "is_threshold" in parts:
        bound, low, masks = str(parts["is_threshold"]), parts.get("is_low"), mode.endswith("mask")
        keys["loss.rollout_is_threshold"] = bound.split("_") if "_" in bound else bound
        if masks:  # weights outside give no gradient
            keys["loss.rollout_is_threshold"] = [low or 1e-9, bound]
        elif low:
            done.hole("loss.rollout_is_threshold", "is_low", "weights are not raised to a bound")
    rules = dict[str, Any]()
    if "rs" in parts:
        older = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
        names = [name.strip() for name in str(parts["rs"]).split(",")]
        bounds = str(parts.get("rs_threshold", parts.get("is_threshold", "2.0"))).split(",")
        for name, bound in zip(names, bounds * len(names), strict=False):
            rules[older.get(name, name)] = bound.split("_") if "_" in bound else bound
    if veto := done.number("veto"):
        rules["seq_max_k2"] = f"{math.log(veto) ** 2 / 2:.4g}"
    keys |= {"loss.rollout_rs": rules} if rules else {}


def _add_batches(done: Translation) -> None:
    """Add the numbers of prompts, of updates and of steps, and what is counted in steps."""
    keys, parts, number = done.keys, done.parts, done.number
    group, updates = number("group_size") or 1, 1.0
    if "device_batch" in parts:
        accumulated, processes = number("accumulation") or 1, number("processes") or 1
        at_once = number("device_batch") * processes
        responses = number("generation_batch") or at_once * (number("steps_per_generation") or accumulated)
        keys["data.prompts_per_step"] = max(1, round(responses / group))
        keys["cluster.processes_per_node"] = round(processes)
        keys["loss.minibatches"] = max(1, round(responses / (at_once * accumulated))) if at_once else 1
        if not (at_once and set(done.sources.get("processes", ())) & done.theirs.keys()):
            why = f"{parts['device_batch']} responses on each process x processes / {group:g}"
            done.hole("data.prompts_per_step", "device_batch", why)
        updates = keys["loss.minibatches"] * (number("loss.epochs") or 1)
    prompts = number("data.prompts_per_step") or 1
    if size := number("minibatch_prompts") or number("minibatch_samples") / group:
        keys["loss.minibatches"] = max(1, round(prompts / size))
    for key, part in {
        "checkpoint.every": "save_every",
        "evaluation.every": "eval_every",
        "steps": "max_steps",
    }.items():
        if number(part) >= 1:
            keys[key] = max(1, round(number(part) / updates))
        elif number(part) > 0:
            done.change(key, part, "a share of the run there, a number of steps here")
    rows = _rows(_listed(parts.get("train_files")))
    if "steps" not in keys and rows:
        keys["steps"] = max(1, round(number("epochs") * (rows // prompts)))
    elif "steps" not in keys:
        done.hole("steps", "epochs", f"{number('epochs'):g} epochs x rows / {prompts:g} prompts a step")
    warmup, total = max(number("warmup_steps"), 0.0), number("steps") * (number("loss.minibatches") or 1)
    if warmup < 1 and (share := number("warmup_ratio") or warmup):
        warmup = share * total * (number("loss.epochs") or 1)
        if not total:
            done.hole("optimizer.warmup_steps", "warmup_ratio", f"{share:g} x steps x updates a step")
    keys["optimizer.warmup_steps"] = round(warmup)
    longest = (number("data.max_prompt_length") or 2048) + number("rollout.max_response_length")
    keys["packing.max_tokens_per_row"] = round(max(longest, number("row_tokens")))
    if 0 < number("row_tokens") < longest and {*done.sources["row_tokens"]} & done.theirs.keys():
        done.change(
            "packing", "row_tokens", f"{longest:g}: a row holds at least a prompt with its longest response"
        )
    if name := re.sub(r"[^\w.,=+@ -]+", "-", str(parts.get("experiment", ""))).strip("-"):
        keys["name"] = name[:100]
    if "wandb" in str(parts.get("logger", "")) or done.is_on("use_wandb"):
        keys["report.wandb_project"] = parts.get("project", keys["name"])
    if not done.is_on("colocate", "true"):
        done.change(
            "cluster", "colocate", "generation and training share GPUs; apart: eqlen submit --servers N"
        )


def _add_evaluation(done: Translation) -> None:
    """Add benchmarks and how their responses are sampled."""
    keys, parts, number = done.keys, done.parts, done.number
    named, read = _listed(parts.get("named_files")), dict[str, Any](reader="jsonl")
    tests = dict(zip(named[::2], named[1::2], strict=False))
    tests = tests or {_name(path): path for path in _listed(parts.get("val_files"))}
    if str(parts.get("eval_strategy", "no")) != "no" and "train_files" in parts:
        tests, read["split"] = {"test": parts["train_files"]}, parts.get("test_split", "test")
        keys.setdefault("evaluation.samples", keys.get("group_size", 8))
    read |= {"limit": round(number("limit"))} if number("limit") > 0 else {}
    read |= _columns(parts, "eval_") or _columns(parts)
    keys["evaluation.benchmarks"] = [{"name": n, **read, "path": path} for n, path in tests.items()]
    if not tests:
        done.keys = {key: value for key, value in keys.items() if not key.startswith("evaluation.")}
        return
    if done.version.startswith(("0.3", "0.4", "0.5", "0.6")) and not done.is_on("sampled", "true"):
        keys["evaluation.temperature"] = 0
    if "evaluation.temperature" in keys and not number("evaluation.temperature"):
        for name in ("top_p", "top_k"):
            keys.pop(f"evaluation.{name}", None)
        if number("evaluation.samples") > 1:
            done.change("evaluation.samples", "evaluation.samples", "1: greedy responses are all the same")
        keys["evaluation.samples"] = 1


def _add_data(done: Translation) -> None:
    """Add training data, what they are told, and graders."""
    keys, parts, grader = done.keys, done.parts, "data.sources.0.grader"
    own = {
        ours: parts[part]
        for part, ours in {"dataset_config": "config", "dataset_split": "split"}.items()
        if part in parts
    }
    if path := parts.get("reward_file"):
        module = Path(str(path)).stem
        own["grader"] = f"{module}:{parts.get('reward_name') or 'compute_score'}"
        done.change(
            "data.sources", "reward_file", f"{module}.py lies in the working directory, or is installed"
        )
    functions = _listed(parts.get("reward_functions"))
    if len(functions) == 1 and re.fullmatch(r"\w+(\.\w+)+", functions[0]):
        own["grader"] = ":".join(functions[0].rsplit(".", 1))
    elif functions not in ([], ["accuracy"], ["accuracy_reward"]):
        done.hole(
            grader, "reward_functions", f"module:function that gives the reward of {', '.join(functions)}"
        )
    rule = str(parts.get("rm_type") or "").removeprefix("boxed_")
    if rule in ("math", "deepscaler", "dapo"):
        own["grader"] = "math"
        if rule == "dapo":
            done.change("reward", "rm_type", "rewards are 1 and 0, there +1 and -1")
    elif rule:
        done.hole(grader, "rm_type", f"{rule}: module:function of the response and the answer")
    if "custom_rm" in parts:
        done.hole(grader, "custom_rm", "module:function of (response, answer), not of (args, sample)")
    if "reader_file" in parts:
        done.hole(
            "data.sources.0.reader", "reader_file", "module:read, a function of a file (docs/extending.md)"
        )
    files = _listed(parts.get("train_files"))
    own |= _columns(parts)
    keys["data.sources"] = [
        {"name": _name(path), "reader": "jsonl", "path": path, **own} for path in files or [HOLE]
    ]
    if len(files) > 1:
        done.change(
            "data.sources",
            "train_files",
            "files have equal shares of the prompts (weight), not by their rows",
        )
    for benchmark in keys.get("evaluation.benchmarks", []):
        benchmark |= {"grader": own["grader"]} if "grader" in own else {}
    if system := parts.get("system"):
        keys |= {"data.instruction": system, "data.instruction_role": "system"}
    else:
        text = "a question that is text, no chat, gets it; instructions of DAPO-Math and GSM8K give way to it"
        done.change("data.instruction", "train_files", text)
    for key, what in {"model.path": "the model's folder", "data.sources.0.path": "the training data"}.items():
        if key not in keys and not (files and key.startswith("data")):
            done.hole(key, "", f"{what}, or its name on the hub")


def _columns(parts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    named = {ours: str(parts.get(f"{prefix}{ours}_column") or "") for ours in ("question", "answer")}
    kept = {ours: name for ours, name in named.items() if name not in ("", "prompt")}
    return {"columns": kept} if kept else {}


def _check(done: Translation) -> None:
    """Give values the types of their keys. A value that its key refuses is a hole; one that does not act here
    is left out."""
    keys, recipe = {key: value for key, value in done.keys.items() if key not in done.holes}, None
    while recipe is None:
        try:
            recipe = parse(_nested(NEEDED | keys), "recipe")
        except RecipeError as error:
            why = str(error).removeprefix("recipe: ")
            key = next((key for key in keys if why.startswith((f"{key}:", f"{key}."))), "")
            if not key:
                done.remarks.append(f"eqlen check will say: {why}")
                return
            if "acts only with" in why or "has no effect" in why:
                found = (theirs for theirs in done.sources.get(key, ()) if theirs in done.theirs)
                done.outcomes |= dict.fromkeys(found, "irrelevant")
                done.changes = {text: own for text, own in done.changes.items() if f"-> {key}:" not in text}
                del done.keys[key]
            else:
                named = ", ".join(done.sources.get(key, ()))
                done.hole(key, key, f"{named}: {why.partition(': ')[2] or why}")
            del keys[key]
    typed = _flat(recipe.model_dump(mode="json", exclude_unset=True))
    done.keys = {key: typed.get(key, value) for key, value in done.keys.items()}
    for key in done.holes:
        if item := re.fullmatch(r"(data\.sources|evaluation\.benchmarks)\.0\.(\w+)", key):
            done.keys.setdefault(item[1], [{"name": "mine"}])[0][item[2]] = HOLE
        else:
            done.keys[key] = HOLE


def _flat(tree: dict[str, Any], at: str = "") -> dict[str, Any]:
    """Return values and lists by their dotted keys; the bounds of ``loss.rollout_rs`` stay together."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, dict) and value and f"{at}{key}" != "loss.rollout_rs"
        flat |= _flat(value, f"{at}{key}.") if is_section else {f"{at}{key}": value}
    return flat


def _nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Return sections. A key that is not ours stays whole."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, last = key.split(".") if key.split(".")[0] in Recipe.model_fields else [key]
        at = tree
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def read(file: Path, trainer: str, words: Sequence[str], remarks: list[str]) -> dict[str, Any]:
    """Return the keys of a configuration with their values as text or lists; what is to be said goes to
    ``remarks``."""
    text = file.read_text(encoding="utf-8")
    try:
        if file.suffix == ".py":
            return _of_python(text)
        if file.suffix in (".txt", ".args"):
            return _of_words(text.splitlines(), trainer, file)
        if file.suffix not in (".yaml", ".yml", ".json"):
            return _of_script(file, trainer, words, remarks)
        found = read_value(text) or {}
        if isinstance(found, list) and all(isinstance(word, str) for word in found):
            return _of_words(found, trainer, file)
        if not isinstance(found, dict):
            raise ValueError(
                f"expected a mapping of keys or a list of arguments, found a {type(found).__name__}"
            )
        keys = _flat(found)
        if open_ := [f"{key}: {value}" for key, value in keys.items() if "${" in str(value)]:
            raise ValueError(f"{open_[0]}: expected resolved values (verl: --cfg job --resolve)")
        return keys
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as a configuration: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not valid YAML: {in_one_line(error)}") from None


def _of_script(file: Path, trainer: str, words: Sequence[str], remarks: list[str]) -> dict[str, Any]:
    """Return the keys of the last training command that bash starts for the script."""
    from megatron_eqlen.cli.launch_scripts import launched

    variables = dict(word.split("=", 1) for word in words if re.match(r"\w+=", word))
    found = launched(file, [word for word in words if not re.match(r"\w+=", word)], variables)
    configured = [_of_words(command, trainer, file) for command in found.commands]
    known = [sum(bool((row := _row(trainer, key)) and row.ours) for key in keys) for keys in configured]
    training = [
        keys for keys, count in zip(configured, known, strict=True) if count > 1 and 2 * count >= max(known)
    ]
    if not training:
        said = [line for line in found.end.output.splitlines() if line.strip() and line[0] != "+"]
        last, end = (said or [""])[-1], found.end
        raise ValueError(
            f"expected a script that starts a training of {trainer}, found {len(found.commands)} others; "
            f"bash ended it with {end.status if end.code is None else end.code}: {last[-300:]} (what it "
            "takes from its environment is given behind it: NAME=VALUE)"
        )
    remarks += [f"The script starts {len(training)} trainings; this is the last one."] * (len(training) > 1)
    remarks += [f"The script reads {name}, which is not there." for name in dict.fromkeys(found.missing)]
    return training[-1]


def _of_words(words: list[str], trainer: str, file: Path) -> dict[str, Any]:
    """Return the keys in a command's arguments, ``a.b=c`` (verl) or ``--a b c``, over those of the file
    that they name: verl's ``--config-name``, if it is not its own, TRL's ``--config``, ``--config_file``."""
    options: dict[str, Any] = {}
    keys, option = dict[str, Any](), ""
    for word in words:
        if match := OPTION.fullmatch(word):
            option = match[1].replace("-", "_")
            options[option] = "true" if match[2] is None else match[2].strip("'\"")
            option = option if match[2] is None else ""
        elif trainer == "verl" and (match := HYDRA.fullmatch(word)):
            keys = {key: value for key, value in keys.items() if key != match[1].lstrip("~")}
            keys |= _hydra(match[1], match[2]) if "=" in word else {}
            option = ""
        elif option:
            options[option] = word if options[option] == "true" else [*_listed(options[option]), word]
            option = "" if word.endswith(".py") else option
    name = str(options.get("config_name", "")).removesuffix(".yaml")
    if trainer == "slime" or (
        trainer == "verl" and (not keys or not name or re.fullmatch(r"ppo(_\w+)?_trainer", name))
    ):
        return options if trainer == "slime" else keys
    if trainer == "verl":
        name = f"{options.get('config_path', options.get('config_dir', 'config'))}/{name}.yaml"
    for path in (
        [name] if trainer == "verl" else [str(options[n]) for n in ("config", "config_file") if n in options]
    ):
        places = [Path(path), *(folder / path for folder in file.resolve().parents)]
        base = next((each for each in places if each.is_file()), None)
        if base is None:
            raise ValueError(f"it reads {path}, which is not there; give the resolved configuration")
        below = _flat(read_value(base.read_text(encoding="utf-8")))
        below = {key: value for key, value in below.items() if "${" not in str(value)}
        keys = {
            key: value for key, value in below.items() if key.split(".")[0] not in ("defaults", "hydra")
        } | keys
    return keys if trainer == "verl" else keys | options


def _hydra(key: str, value: str) -> dict[str, Any]:
    """Return the keys of an override of Hydra's; quotes, lists and mappings are read."""
    found: Any = value
    if re.match(r"[\[{'\"]", value):
        with suppress(yaml.YAMLError):  # or else it stays text
            found = read_value(re.sub(r":(?=[^\s/])", ": ", value) if value.startswith("{") else value)
    return _flat({key: found})


def _of_python(text: str) -> dict[str, Any]:
    """Return the arguments of TRL's classes: constants, or else their source."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in PYTHON_CALLS]
    words = {word.arg: word.value for call in calls for word in call.keywords if word.arg not in NO_OPTIONS}
    return {
        str(name): str(value.value) if isinstance(value, ast.Constant) else ast.unparse(value)
        for name, value in words.items()
    }


def _listed(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value] if value else [])]


def _name(path: str) -> str:
    """Return a name for a file: that of its folder for ``train.parquet``."""
    file = Path(path)
    return file.parent.name if file.stem in ("train", "test", "val") and file.parent.name else file.stem


def _rows(files: list[str]) -> int:
    """Return the number of rows of local files, 0 if there is none or one is not there."""
    if not all(map(os.path.isfile, files)):
        return 0
    tables = (dataset(name, format="parquet" if name.endswith("parquet") else "json") for name in files)
    return sum(table.count_rows() for table in tables)
