"""``eqlen recipe --from verl FILE``: a recipe of ours from another trainer's configuration.

Every key of theirs ends as ``same``, ``changed``, ``lost`` or ``irrelevant``. A lost key is a hole in the
recipe, ``???``, which ``recipe.load`` refuses. What follows from several keys is computed here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jinja2 import Template
from pyarrow.dataset import dataset

from megatron_eqlen.cli.launch_scripts import listed, read
from megatron_eqlen.job import parse
from megatron_eqlen.recipe import Recipe, RecipeError
from megatron_eqlen.recipe.load import HOLE
from megatron_eqlen.recipe.naming import flat, nested
from megatron_eqlen.recipe.others import TRAINERS, Row, defaults, read_table, row_of, table
from megatron_eqlen.recipe.yaml_values import Plain, read_value, to_yaml

UNSET = re.compile(r"|none|null|\?\?\?")
# Values that ask for nothing, of a key without a counterpart.
NOTHING = re.compile(UNSET.pattern + r"|false|\[\]|\{\}|-1(\.0*)?|0(\.0*)?")
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:, *([^${}]*))?\}")
UNREAD = "no value, where its default is {}: does the script take it from its environment, or compute it?"
# Reasons why an engine's option that is refused changes what is learned, or has no effect there either.
LEARNED = re.compile("no such option|expected|must not depend|objective's alone|what is trained")
NO_EFFECT = re.compile("acts only with|has no effect|clip.* with surrogate")
SOURCES, TESTS, GRADER = "data.sources", "evaluation.benchmarks", "data.sources.0.grader"
ENGINES = ("model.megatron.", "rollout.vllm.")
# Values in place of holes, so that the other keys can be checked.
NEEDED: dict[str, Any] = {"name": "mine", "steps": "1000000", "model.path": "MODEL", "objective": "grpo"}
NEEDED[SOURCES] = [{"name": "mine", "path": "DATA"}]
# Effects of a change, the gravest first, with the beginnings of the keys that have them.
EFFECTS: dict[str, str] = read_table()["effects"]


@dataclass
class Translation:
    """Recipe keys from another trainer's, and what became of each of these. ``left_out``: their defaults;
    ``keys``: ours, dotted, and parts from which keys are computed, by name; ``outcomes``: the end of each of
    theirs; ``holes``, ``changes``: reasons and effects; ``sources``: theirs, by the key of ours or part."""

    trainer: str
    version: str
    theirs: dict[str, Any]
    left_out: dict[str, Any]
    remarks: list[str]
    keys: dict[str, Any]
    outcomes: dict[str, str] = field(default_factory=dict)
    holes: dict[str, str] = field(default_factory=dict)
    changes: dict[str, str] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)

    def text(self, source: str) -> str:
        """Return the recipe as YAML, what became of their keys as comments above it."""
        template = Path(__file__).with_name("translation.jinja").read_text(encoding="utf-8")
        head = Template(template, trim_blocks=True).render(source=source, done=self, effects=EFFECTS)
        ours = {key: value for key, value in self.keys.items() if _is_ours(key)}
        # A key of theirs without a counterpart stays dotted: a hole under a name that no recipe has.
        tree = nested(ours) | {key: value for key, value in self.keys.items() if key not in ours}
        return "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines()) + to_yaml(tree)

    def hole(self, ours: str, key: str, why: str) -> None:
        """Leave a hole for the key of ours, or under theirs. ``key``: theirs, or a part's name."""
        if ours == key in self.theirs and key in Recipe.model_fields:  # another key of the same name
            ours = f"{self.trainer}.{key}"
        before, (what, _, reason) = self.holes.get(ours, ""), why.partition(": ")
        # A reason that several keys share is said once: ``a=1, b=2: not known here``.
        is_known = reason and before.endswith(f": {reason}")
        self.holes[ours] = f"{what}, {before}" if is_known else "; ".join(filter(None, (before, why)))
        lost = {key, *self.sources.get(key, ()), *self.sources.get(ours, ())} & self.theirs.keys()
        self.outcomes |= dict.fromkeys(lost, "lost")

    def change(self, ours: str, key: str, text: str) -> None:
        """Say how a key of ours differs from what was there. ``key``: theirs, or a part's name."""
        # A part is called by the key of theirs that it comes from.
        key = next(iter(self.sources.get(key, ())), key)
        effects = (effect for effect, begins in EFFECTS.items() if ours.startswith((*begins.split(),)))
        self.changes[f"{key} -> {ours}: {text}"] = next(effects, [*EFFECTS][-1])
        self.outcomes |= {key: "changed"} if self.outcomes.get(key) == "same" else {}

    def number(self, name: str, default: float = 0.0) -> float:
        """Return one of ``keys``; ``default`` for none and for what is no number, which is a hole."""
        with suppress(TypeError, ValueError):
            return float(self.keys.get(name, default))
        if not (_is_ours(name) or NOTHING.fullmatch(str(self.keys[name]).lower())):
            ours = next(row.ours for row in table()[self.trainer] if row.part == name)
            self.hole(ours, name, f"{', '.join(self.sources[name])}={self.keys[name]}: expected a number")
            self.keys[name] = None
        return default

    def is_on(self, name: str) -> bool:
        return not NOTHING.fullmatch(str(self.keys.get(name, "")).lower())


def translate(trainer: str, file: Path, words: Sequence[str] = ()) -> Translation:
    """Return the recipe for a configuration of ``trainer``, perhaps with its version (``verl@0.6``).
    ``words``: a script's arguments and NAME=VALUE. Raises ValueError for a file without a configuration."""
    trainer, _, version = {"open-r1": "trl@0.18"}.get(trainer, trainer).partition("@")
    if trainer not in TRAINERS:
        raise ValueError(f"--from: expected {', '.join(TRAINERS)} or open-r1, found {trainer!r}")
    left_out, remarks = defaults(trainer, version), list[str]()
    theirs = read(file, trainer, words, remarks)
    # ``{"min_lr": 1e-7}`` has keys of its own.
    folded = [key for key in theirs if trainer == "trl" and re.fullmatch(r"\{[^{}]+\}", str(theirs[key]))]
    theirs = flat(theirs | {key: read_value(theirs[key]) for key in folded})
    named = {key: str(value) for key, value in (left_out | theirs).items()}
    for key in (key for key, value in theirs.items() if "${" in str(value)):  # another key of theirs
        theirs[key] = REFERENCE.sub(lambda match: named.get(match[1], match[2] or match[0]), str(theirs[key]))
    rows = {key: row_of(trainer, key) for key in theirs}
    known = sum(map(bool, rows.values()))
    # verl's trainer has this section; the rest it shares with other programs of verl.
    other = trainer == "verl" and not any(key.startswith("actor_rollout_ref.") for key in theirs)
    if other or known < max(1, len(theirs) / 3):
        found = f"{len(theirs)} keys, {known} of them its own" + ", none of actor_rollout_ref" * other
        expected = f"a configuration of {trainer} (script, YAML, Python)"
        raise ValueError(f"{file}: expected {expected}, found {found}")
    keys = {"name": file.stem, "sampling": "independent"}
    done = Translation(trainer, version, theirs, left_out, remarks, keys)
    given = {row.part for row in rows.values() if row and row.part}
    # In the table's order, since a later row overrules an earlier one.
    for row in table()[trainer]:
        for key in (key for key in theirs if rows[key] is row):
            _take(row, key, theirs[key], done)
        # A key that is left out acts by its default there, unless another key gives the same part.
        if row.theirs in left_out.keys() - theirs.keys() and row.part not in given:
            _take(row, row.theirs, left_out[row.theirs], done)
    for key in (key for key, row in rows.items() if row is None):
        done.hole(key, key, f"{theirs[key]!s:.60}: not known here")
    for add in (_add_learning, _add_batches, _add_data, _check):
        add(done)
    return done


def _take(row: Row, key: str, value: Any, done: Translation) -> None:
    """Translate one key; one that is not in ``done.theirs`` stands for its default."""
    value = Plain(value) if isinstance(value, str) else value
    small, given = str(value).lower(), key in done.theirs
    ours = row.ours.replace("*", key.removeprefix(row.theirs[:-1])) or key  # an engine's option of that name
    # Compared as YAML reads them: ``1.0`` is 1, and ``False`` is false.
    neutral = Plain(re.sub(r"['\" ]", "", small)).value in [Plain(each).value for each in row.neutral]
    # What the table translates the value to.
    values = [new for name, new in row.values.items() if fnmatchcase(small, name.lower())]
    default = str(done.left_out.get(row.theirs, "")).lower()
    # True if the default does something, which a key without a value would switch off or take from elsewhere.
    acts = not (neutral or values or (NOTHING if small else UNSET).fullmatch(default))
    unread = "${" in small or (acts and UNSET.fullmatch(small))
    # A key without a counterpart is no loss while it asks for nothing.
    unset = not (row.values or unread) and (NOTHING if row.why else UNSET).fullmatch(small)
    idle = row.irrelevant or unset or (row.why and neutral) or (row.when and not done.is_on(row.when))
    done.outcomes |= {key: "irrelevant" if idle else "same"} if given else {}
    for name in {ours, row.part or ours} if row.ours and not (idle and row.why) else ():
        done.sources.setdefault(name, []).append(key)
    if idle:
        return
    # Lost: without a counterpart, without a value, or with a value that the table does not have.
    expected = f"expected {', '.join(row.values)}" if row.values and not values else ""
    if why := row.why or (UNREAD.format(default or "none") if unread else expected):
        beside = f", beside {done.keys[ours]!s:.60}" if row.why and ours in done.keys else ""
        done.hole(ours, key, f"{key}={value!s:.60}{beside}{'' if given else ' (its default)'}: {why}")
        return
    if row.part:
        done.keys[row.part] = value
    if (row.values or not row.part) and (row.effect or not neutral):
        new = values[0] if values else value
        done.keys |= new if isinstance(new, dict) else {ours: new}
        done.keys |= {name: value if more == "=" else more for name, more in row.also.items()}
    if row.effect and not neutral:
        done.change(ours, key, row.effect)


def _add_learning(done: Translation) -> None:
    """Add what is computed of objective, loss, teacher and optimizer."""
    keys, number, group = done.keys, done.number, done.number("group_size")
    # Advantages of these are divided by the standard deviation of their group.
    divides = keys.get("objective", "grpo") in ("grpo", "gspo", "cispo")
    if divides and "objective" not in done.holes and keys.get("loss.advantage") != "dr_grpo" and group > 1:
        more = f"advantages are {math.sqrt(group / (group - 1)):.3f} times theirs"
        done.change("objective", "objective", f"{more}: their standard deviation is over n - 1, ours over n")
    if "overlong" in keys:
        keys["loss.overlong_factor"] = number("overlong")
        if "reward_path" not in keys:
            keys["loss.overlong_factor"] /= 2
            text = "half of it: answers are +1 and -1 there, 1 and 0 here (as there: all of it)"
            done.change("loss.overlong_factor", "overlong", text)
    if number("loss.max_num_gen_batches", 1) <= 0:
        del keys["loss.max_num_gen_batches"]
        done.change("loss.max_num_gen_batches", "loss.max_num_gen_batches", "10 batches, there no limit")
    if done.is_on("distilled") and not (keys.keys() | done.holes.keys()) & {"teacher.path", "teacher.url"}:
        done.hole("teacher.path", "distilled", "the teacher's folder, or its name on the hub")
    for n, beta in enumerate(listed(keys.get("betas")), 1):
        keys[f"model.megatron.adam_beta{n}"] = Plain(beta)
    if number("min_lr_ratio"):
        keys["optimizer.min_lr"] = number("min_lr_ratio") * number("optimizer.lr", 1e-6)
    bound = str(keys.pop("loss.rollout_is_threshold", "2.0"))
    if keys.get("loss.rollout_is", "none") != "none":
        # TRL gives a mask's upper bound alone.
        pair = [1e-9, bound] if "mask" in str(keys.get("is_mode")) else bound.split("_")
        keys["loss.rollout_is_threshold"] = pair if len(pair) == 2 else bound  # a mask's, or a bound
    # Names of verl's earlier versions.
    older = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
    names = [older.get(name, name) for name in str(keys.get("rs", "")).replace(",", " ").split()]
    # A bound for each name, or one for all: ``0.5_2.0,10``.
    bounds = str(keys.get("rs_threshold", bound)).split(",") * len(names)
    rules = dict[str, Any](zip(names, (b.split("_") if "_" in b else b for b in bounds), strict=False))
    # A ratio of e^x has k2 = x^2 / 2, so this vetoes reciprocals as well.
    if veto := number("veto"):
        rules["seq_max_k2"] = f"{math.log(veto) ** 2 / 2:.4g}"
    keys |= {"loss.rollout_rs": rules} if rules else {}


def _add_batches(done: Translation) -> None:
    """Add the numbers of prompts, of updates and of steps, and what is counted in steps."""
    keys, number, updates, group = done.keys, done.number, 1.0, done.number("group_size") or 1

    def whole(ours: str, part: str, exact: float) -> int:
        if (rounded := max(1, round(exact))) != exact:
            done.change(ours, part, f"{rounded}, there {exact:.4g}")
        return rounded

    # TRL counts responses on each process, in micro-batches, and updates instead of steps.
    if "per_device_train_batch_size" in keys:
        accumulated, nodes = number("gradient_accumulation_steps") or 1, number("cluster.nodes") or 1
        processes = nodes * (number("nproc_per_node") or number("num_gpus")) or number("num_processes")
        at_once = number("per_device_train_batch_size") * processes
        steps = number("steps_per_generation") or accumulated
        responses = number("generation_batch_size") or at_once * steps
        keys["data.prompts_per_step"] = max(1, round(responses / group))
        keys |= {"cluster.processes_per_node": round(processes / nodes)} if processes else {}
        in_step = responses / (at_once * accumulated) if at_once else 1
        keys["loss.minibatches"] = whole("loss.minibatches", "steps_per_generation", in_step)
        if not at_once or "cluster.processes_per_node" in done.holes:
            why = f"{keys['per_device_train_batch_size']} responses on each process x processes / {group:g}"
            done.hole("data.prompts_per_step", "per_device_train_batch_size", why)
        updates = keys["loss.minibatches"] * (number("loss.epochs") or 1)
    prompts = number("data.prompts_per_step") or 1
    # verl's mini-batch is in prompts, slime's batch of an update in responses.
    # A batch of 0 or less leaves 0, which the recipe refuses.
    keys |= {"loss.minibatches": 0} if "mini_batch" in keys else {}
    if (size := number("mini_batch") / (1 if done.trainer == "verl" else group)) > 0:
        keys["loss.minibatches"] = whole("loss.minibatches", "mini_batch", max(1.0, prompts / size))
    counted = {"checkpoint.every": "save_every", "evaluation.every": "eval_every", "steps": "max_steps"}
    for key, part in counted.items():
        if number(part) >= 1:
            # Theirs are updates, of which a step of ours may have several.
            keys[key] = whole(key, part, number(part) / updates)
        elif number(part) > 0:
            done.change(key, part, "a share of the run there, a number of steps here")
    files = listed(keys.get("train_files"))
    # Epochs become steps where the rows can be counted.
    if "steps" not in keys and files and all(map(os.path.isfile, files)):
        rows = dataset(files, format="parquet" if files[0].endswith("parquet") else "json").count_rows()
        keys["steps"] = max(1, round(number("epochs") * (rows // prompts)))
    elif "steps" not in keys and (number("epochs") or "steps" not in done.holes):
        done.hole("steps", "epochs", f"{number('epochs'):g} epochs x rows / {prompts:g} prompts a step")
    in_step = (number("loss.minibatches") or 1) * (number("loss.epochs") or 1)
    warmup = max(number("warmup_steps"), 0.0)
    # A share of all updates, or their number.
    if warmup < 1 and (share := number("warmup_ratio") or warmup):
        warmup = share * number("steps") * in_step
        if not warmup:
            done.hole("optimizer.warmup_steps", "warmup_ratio", f"{share:g} x steps x updates a step")
    elif done.trainer == "verl":  # its schedule counts steps, ours updates
        warmup *= in_step
    keys["optimizer.warmup_steps"] = round(warmup)
    longest = (number("data.max_prompt_length") or 2048) + number("rollout.max_response_length")
    if not done.holes.keys() & {"data.max_prompt_length", "rollout.max_response_length"}:
        keys["packing.max_tokens_per_row"] = round(max(longest, number("row_tokens")))
    if 0 < number("row_tokens") < longest and {*done.sources["row_tokens"]} & done.theirs.keys():
        done.change("packing", "row_tokens", f"{longest:g}: a row holds a prompt with its longest response")
    if 0 < number("context") < longest:
        text = f"a prompt with its response has up to {longest:g} tokens, there {number('context'):g}"
        done.change("rollout.max_response_length", "context", text)
    if name := re.sub(r"[^\w.,=+@ -]+", "-", str(keys.get("experiment", ""))).strip("-"):
        keys["name"] = name[:100]
    if "wandb" in str(keys.get("logger", "")) or done.is_on("use_wandb"):
        keys["report.wandb_project"] = keys.get("project", keys["name"])


def _add_data(done: Translation) -> None:
    """Add training data, what they are told, graders, and benchmarks with how their responses are sampled."""
    keys, files = done.keys, listed(done.keys.get("train_files"))
    functions, named = listed(keys.get("reward_functions")), listed(keys.get("eval_prompt_data"))
    if path := str(keys.get("reward_path") or ""):
        # ``./rewards/mine.py`` is ``rewards.mine``; a path that is no package keeps the file's name.
        module = path.removeprefix("./").removesuffix(".py")
        module = module.replace("/", ".") if re.fullmatch(r"\w+(/\w+)*", module) else Path(path).stem
        keys[GRADER] = f"{module}:{keys.get('reward_name') or 'compute_score'}"
        done.change(SOURCES, "reward_path", f"{module} is imported, also from the working directory")
    if len(functions) == 1 and re.fullmatch(r"\w+(\.\w+)+", functions[0]):
        keys[GRADER] = ":".join(functions[0].rsplit(".", 1))
    elif functions not in ([], ["accuracy"], ["accuracy_reward"]):
        done.hole(GRADER, "reward_functions", f"module:function, the reward of {', '.join(functions)}")
    # Keys of the first source are all sources'.
    own = {"reader": "jsonl"} | _popped(keys, f"{SOURCES}.0.")
    keys[SOURCES] = [{"name": name, "path": path, **own} for name, path in _named(files or [HOLE]).items()]
    for source in keys[SOURCES]:
        # A file that is named twice is drawn twice as often.
        source |= {"weight": n} if (n := files.count(source["path"])) > 1 else {}
    if len(files) > 1:
        done.change(SOURCES, "train_files", "files have shares of the prompts by weight, there by row")
    text = "a question that is text, no chat, gets it; instructions of DAPO-Math and GSM8K give way to it"
    ours = {"data.instruction": text, "data.max_prompt_length": "2048 tokens, longer prompts are left out"}
    for key in (key for key in ours if key not in keys):
        done.change(key, "train_files", ours[key])
    if "model.path" not in keys:
        done.hole("model.path", "", "the model's folder, or its name on the hub")
    if done.is_on("load") and keys["load"] != done.theirs.get("save"):
        done.change("model.path", "load", "training begins with that checkpoint there, if any: convert it")
    if not files:
        done.hole(f"{SOURCES}.0.path", "", "the training data, or its name on the hub")
    # slime's are pairs of name and file, or one file; verl's are files.
    tests = dict(zip(named[::2], named[1::2], strict=False)) or _named(named or listed(keys.get("val_files")))
    read = {key: own[key] for key in ("reader", "grader", "columns") if key in own}
    read |= _popped(keys, f"{TESTS}.0.")
    # TRL evaluates on another split of the training data; its strategy ``no`` has the value False.
    if done.is_on("eval_strategy") and keys["eval_strategy"].value and "train_files" in keys:
        tests, read["split"] = {"test": keys["train_files"]}, keys.get("dataset_test_split", "test")
        keys.setdefault("evaluation.samples", keys.get("group_size", 8))
        if "evaluation.every" not in keys:
            text = f"0, before and after training; there: {keys['eval_strategy']}"
            done.change("evaluation.every", "eval_strategy", text)
    keys[TESTS] = [{"name": name, **read, "path": path} for name, path in tests.items()]
    if "sampled" in keys and not done.is_on("sampled") and re.match(r"0\.[3-6]", done.version):
        keys["evaluation.temperature"] = 0
    # Keys that a greedy evaluation would not read are refused.
    if "evaluation.temperature" in keys and not done.number("evaluation.temperature"):
        keys = {key: keys[key] for key in keys if key not in ("evaluation.top_p", "evaluation.top_k")}
        if tests and done.number("evaluation.samples") > 1:
            done.change("evaluation.samples", "evaluation.samples", "1: greedy responses are all the same")
        keys["evaluation.samples"] = 1
    if unnamed := not tests and done.trainer != "trl" and done.number("eval_every") > 0:
        done.hole(TESTS, "eval_every", "the files of its evaluations")
    # Keys of evaluations without a benchmark do not act.
    done.keys = {key: keys[key] for key in keys if tests or unnamed or not key.startswith("evaluation.")}


def _check(done: Translation) -> None:
    """Give values the types of their keys, drop parts, and take out the values that a recipe refuses."""
    needed = NEEDED | ({"teacher.path": "TEACHER"} if done.is_on("distilled") else {})
    done.keys = {key: value for key, value in done.keys.items() if _is_ours(key)}
    keys, typed = {key: value for key, value in done.keys.items() if key not in done.holes}, dict[str, Any]()
    # Each round takes out the value that a recipe refuses, until the rest is a recipe.
    while not typed:
        try:
            recipe = parse(nested(needed | keys), "recipe").model_dump(mode="json", exclude_unset=True)
            typed = flat(recipe, ("loss.rollout_rs",))
        except RecipeError as error:
            why = str(error).removeprefix("recipe: ")
            key = next((key for key in keys if why.startswith((f"{key}:", f"{key}."))), "")
            if key and "cannot be imported" not in why:
                _refuse(key, why, done)
                del keys[key]
                continue
            done.remarks.append(f"eqlen check will say: {why}")  # it may be there later
            if not key:
                break
            keys[key] = [{**each, "grader": None} for each in keys[key]]
    # Values as their types have them, such as 1.0e-06 for the text "1e-6".
    done.keys |= {key: typed[key] for key in typed.keys() & keys.keys() if keys[key] == done.keys[key]}
    # ``data.sources.0.path``: a hole in each source.
    for key in done.holes:
        section, _, name = key.partition(".0.")
        if not name:
            done.keys[key] = HOLE
        elif section not in done.holes:
            same = done.keys.get(TESTS, []) if name in ("grader", "reader") else []
            for each in (*done.keys.setdefault(section, [{"name": "mine"}]), *same):
                each[name] = HOLE


def _refuse(key: str, why: str, done: Translation) -> None:
    """Leave a value out that does not act here, or make it a hole. ``why``: the error of a recipe with it."""
    if any(f"acts only with {hole}" in why for hole in done.holes):
        return  # it may, when that hole is filled
    of_engine, sources = key.startswith(ENGINES), done.sources.get(key, ())
    # An engine's option that changes nothing of what is learned can go.
    if NO_EFFECT.search(why) or (of_engine and not (done.is_on(key) and LEARNED.search(why))):
        done.outcomes |= dict.fromkeys({*sources} & done.theirs.keys(), "irrelevant")
        done.changes = {text: own for text, own in done.changes.items() if f"-> {key}:" not in text}
        del done.keys[key]
    else:
        named, hole = ", ".join(sources), key
        if of_engine and "expected" not in why:  # no value helps
            hole, named = named, f"{done.keys.pop(key)!s:.60}"
        done.hole(hole, key, f"{named}: {why.partition(': ')[2] or why}".removeprefix(": "))


def _is_ours(key: str) -> bool:
    return key.split(".")[0] in Recipe.model_fields


def _popped(keys: dict[str, Any], at: str) -> dict[str, Any]:
    """Remove the keys below ``at``, and return them as a section."""
    below = [key for key in keys if key.startswith(at)]
    return nested({key.removeprefix(at): keys.pop(key) for key in below})


def _named(paths: list[str]) -> dict[str, str]:
    """Return the files by names of their own: that of its folder for ``train.parquet``."""
    named = dict[str, str]()
    for path in dict.fromkeys(paths):
        name, folder = Path(path).stem, Path(path).parent.name
        name = folder if folder and name in ("train", "test", "val") else name
        named |= {f"{name}-{len(named) + 1}" if name in named else name: path}
    return named
