"""Configurations of other trainers: keys and values from YAML, arguments, Python, and launch scripts.

bash runs a launch script in the sandbox, without network, with an empty home. What it starts does not run: a
stand-in for each program (launch/stand_in.sh) writes down its arguments, and ends well.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import sys
import tarfile
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import yaml

from megatron_eqlen.graders.sandbox.client import Command, CommandEnd, Sandbox, folder_files
from megatron_eqlen.graders.sandbox.command import FOLDER, CommandLimits
from megatron_eqlen.graders.sandbox.probe import commands_refused
from megatron_eqlen.graders.sandbox.program import Isolation
from megatron_eqlen.recipe.naming import flat
from megatron_eqlen.recipe.others import row_of
from megatron_eqlen.recipe.yaml_values import in_one_line, read_value

OWN = f"{FOLDER}/.eqlen"
HOME, HERE = f"{OWN}/home", f"{OWN}/here"
# Limits of what a script may read of its repository: files, bytes of each, and parts of its path.
MOST_FILES, MOST_BYTES, DEEPEST = 5000, 1 << 17, 8
# ``--beta=0.04``, ``--report_to``, Hydra's ``-cn``
OPTION = re.compile(r"-(-[A-Za-z][\w.-]*|c[npd])(?:=(.*))?", re.DOTALL)
# ``data.train_files=[a,b]``, ``+trainer.seed=1``, ``~critic.model``, ``steps=3``
HYDRA = re.compile(r"\+{0,2}(~\w+(?:\.[\w-]+)+|(?:[a-z]\w*|[\w@]+(?:[./][\w@*-]+)+)(?==))=?(.*)", re.DOTALL)
# ``python3.12``, ``/opt/bin/torchrun``
LAUNCHER = re.compile(r"(.*/)?(accelerate|deepspeed|torchrun|trl|python[\d.]*)")
PYTHON_CALLS = re.compile("GRPOConfig|GRPOTrainer|LoraConfig|get_peft_model|ModelConfig|ScriptArguments")
# ``dataclasses.replace(args, beta=0.1)``, ``vars(args).update(beta=0.1)``
CHANGES = re.compile(r"(.*\.)?replace|(vars\(.*\)|.*\.__dict__)\.update")
# Arguments of TRL's classes that are no options.
OBJECTS = ("args", "train_dataset", "eval_dataset", "peft_config", "processing_class", "callbacks")
# What a configuration takes its defaults from that is verl's: its values are those of others_defaults.yaml.
BASES = r".*hydra/.*|.*?(\w+)(@.*)?': '\1'}|(.*\W)?(_self_|ppo\w*_trainer|(dp|hf|legacy|megatron)_\w+)\W*"


def read(file: Path, trainer: str, words: Sequence[str], remarks: list[str]) -> dict[str, Any]:
    """Return the keys of a configuration with their values as text or lists; what is to be said goes to
    ``remarks``. ``words``: arguments and NAME=VALUE of the environment of a script."""
    file.stat()  # raises FileNotFoundError
    try:
        if file.suffix not in (".py", ".txt", ".args", ".yaml", ".yml", ".json"):
            return _of_script(file, trainer, words, remarks)  # in any encoding
        if words:
            raise ValueError(f"expected a script to take {words[0]!r}, which other files do not")
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            return _of_python(text, remarks)
        found = text.splitlines() if file.suffix in (".txt", ".args") else read_value(text)
        if isinstance(found, list) and all(isinstance(word, str) for word in found):
            return _of_words(found, trainer, file)
        keys = _of_yaml(str(file.resolve()), file, {})
        # Hydra's ``${data.seed}`` takes the value of another key, perhaps of a file that is not here.
        if key := next((key for key, value in keys.items() if "${" in str(value)), ""):
            raise ValueError(f"{key}: {keys[key]}: expected resolved values (verl: --cfg job --resolve)")
        return keys
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: cannot be read as a configuration: {in_one_line(error)}") from None


def _of_script(file: Path, trainer: str, words: Sequence[str], remarks: list[str]) -> dict[str, Any]:
    """Return the keys of the last training command that bash starts for the script."""
    # ``NGPUS=8`` is for the script's environment; all other words are its arguments.
    variables = dict(word.split("=", 1) for word in words if re.match(r"\w+=", word))
    arguments = [word for word in words if not re.match(r"\w+=", word)]
    started, missing, written, end = launched(file, arguments, variables)
    launchers = ((n for n, word in enumerate(command) if LAUNCHER.fullmatch(word)) for command in started)
    # What stands before the first launcher is another program's: ``srun --nodes 2 python train.py``.
    commands = [command[next(first, 0) :] for command, first in zip(started, launchers, strict=True)]
    configured = [_of_words(command, trainer, file, written) for command in commands]
    # A training gives two known keys or more, and half as many as the best has; others are servers and so on.
    known = [sum(bool((row := row_of(trainer, key)) and row.ours) for key in keys) for keys in configured]
    training = [keys for keys, n in zip(configured, known, strict=True) if n > 1 and 2 * n >= max(known)]
    if not training:
        # The last line that is no trace of ``set -x``.
        said = re.findall(r"^[^+\s].*", "\n" + end.output, re.MULTILINE) or [""]
        others = ", ".join(dict.fromkeys(" ".join(command[:3]) for command in commands)) or "no command"
        expected = f"expected a script that starts a training of {trainer}, found {others:.200}"
        how = f"{end.status if end.code is None else end.code}: {said[-1][-300:]}"
        give = "give what it takes from its environment behind it, NAME=VALUE, or its arguments behind --"
        raise ValueError(f"{expected}; bash ended it with {how} ({give}; or save them, docs/from_verl.md)")
    remarks += [f"The script starts {len(training)} trainings; this is the last one."] * (len(training) > 1)
    remarks += [f"The script reads {name}, which is not there." for name in dict.fromkeys(missing)]
    return training[-1]


def _of_words(words: list[str], trainer: str, file: Path, written: Mapping[str, str] = {}) -> dict[str, Any]:
    """Return the keys in a command's arguments, ``a.b=c`` (verl) or ``--a b c``, and its program, over those
    of files that they name: verl's ``--config-name``, TRL's ``--config``. ``written``: see `_of_yaml`."""
    options, keys, option = dict[str, Any](), dict[str, Any](), ""
    for word in words:
        if match := OPTION.fullmatch(word):
            option, value = match[1].lstrip("-").replace("-", "_"), match[2]
            # ``--no_bf16`` is ``bf16=false``.
            if trainer == "trl" and option.startswith("no_") and row_of(trainer, option[3:]):  # of a switch
                option, value = option[3:], "false"
            options[option] = "true" if value is None else value.strip("'\"")
            option = option if value is None else ""
        elif trainer == "verl" and (match := HYDRA.fullmatch(word)):
            key, value, option = match[1], match[2], ""
            keys.pop(key.lstrip("~"), None)
            with contextlib.suppress(yaml.YAMLError):  # or else it stays text
                # Hydra reads ``{a:1}``, YAML only ``{a: 1}``; ``{url:http://x}`` keeps its second colon.
                spaced = re.sub(r":(?=[^\s/])", ": ", value) if value.startswith("{") else value
                value = read_value(spaced) if re.match(r"[\[{'\"]", value) else value
            keys |= {key[1:]: "null"} if key[0] == "~" else flat({key: value}) if "=" in word else {}
        elif word.endswith(".py") or word == "-m" or (word == "trl" and not options):
            option, options["program"] = ("", Path(word).name) if word[-3:] == ".py" else ("program", "true")
        elif option:
            # ``--reward_funcs a b`` has several values.
            options[option] = word if options[option] == "true" else [*listed(options[option]), word]
    name = str(options.get("config_name", options.get("cn", ""))).removesuffix(".yaml")
    paths = [str(options[key]) for key in ("config", "config_file") if key in options and trainer == "trl"]
    if name and trainer == "verl" and (keys or "verl" in str(options.get("program"))):
        given = (options[key] for key in ("config_path", "cp", "config_dir", "cd") if key in options)
        paths = [] if re.fullmatch(BASES, name) else [f"{next(given, 'config')}/{name}.yaml"]
    for path in paths:
        keys = _of_yaml(path, file, written) | keys  # what the command gives comes first
    return keys | {key: options[key] for key in options if trainer != "verl" or key == "program"}


def _of_yaml(path: str, file: Path, written: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of a YAML file. ``written``: YAML files as the script ``file`` leaves them, by path."""
    # Relative to the script's folder, to one above it, as its repository's root, or to here.
    names = [os.path.normpath(folder / path) for folder in (*file.resolve().parents, Path())]
    name = next((name for name in names if name in written or os.path.isfile(name)), None)
    if name is None:
        raise ValueError(f"it reads {path}, which is not there; give the resolved configuration")
    tree = read_value(written[name] if name in written else Path(name).read_text(encoding="utf-8"))
    if not isinstance(tree, dict):  # nothing, where a program writes it
        raise ValueError(f"{path}: expected a mapping of keys or a list of arguments, found {tree!r:.80}")
    defaults = [str(each) for each in tree.get("defaults", [])]
    if others := ", ".join(each for each in defaults if not re.fullmatch(BASES, each)):
        remedy = "give the resolved configuration (--cfg job --resolve)"
        raise ValueError(f"{path} takes values from {others}; {remedy}")
    return {key: value for key, value in flat(tree).items() if key.split(".")[0] not in ("defaults", "hydra")}


def _of_python(text: str, remarks: list[str]) -> dict[str, Any]:
    """Return the arguments of TRL's classes, of each one's last call: literals, functions of rewards, or the
    source in ``${}``, as of what is assigned to them later and of what is made from them."""
    for name, own in re.findall(rf"\b({PYTHON_CALLS.pattern}) as (\w+)", text):
        text = re.sub(rf"\b{own}\b", name, text)
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt | ast.expr | ast.keyword))
    calls, later = dict[str, Mapping[str, ast.AST]](), dict[str, ast.AST]()
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        match node:
            case ast.Call(func) if name := PYTHON_CALLS.fullmatch(ast.unparse(func).rpartition(".")[2]):
                remarks += [f"The file has several {name[0]}; this is the last one's."] * (name[0] in calls)
                own = ("r", "lora_alpha") if name[0] == "LoraConfig" else ()  # 8, unless it says
                words = {word.arg or "**": word.value for word in node.keywords}
                calls[name[0]] = dict.fromkeys(own, ast.Constant(8)) | words
            case ast.Call(ast.Name("setattr"), [_, ast.Constant(str() as key), _]):
                later |= {key: node} if _acts(key) else {}
            case ast.Call(func, _, given) if CHANGES.fullmatch(ast.unparse(func)):
                later |= {word.arg: node for word in given if word.arg and _acts(word.arg)}
            case ast.ClassDef(bases=[of, *_]) | ast.Call(_, [ast.Name() | ast.Attribute() as of, *_]):
                is_theirs = PYTHON_CALLS.fullmatch(ast.unparse(of).rpartition(".")[2])
                later |= {ast.unparse(node).partition("(")[0]: of} if is_theirs else {}
            case ast.Attribute(ast.Name(of), key, ast.Store()) if of != "self":
                later |= {key: node} if _acts(key) else {}
            case ast.keyword("load_in_4bit" | "load_in_8bit" as key, value):
                later[key] = value
    words = {k: v for given in (*calls.values(), later) for k, v in given.items() if k not in OBJECTS}
    texts = {key: str(v.value) if isinstance(v, ast.Constant) else ast.unparse(v) for key, v in words.items()}
    named = {key for key, v in words.items() if any(isinstance(node, ast.Name) for node in ast.walk(v))}
    return texts | {key: f"${{{key}: {texts[key]}}}" for key in named - {"reward_funcs"}}


def _acts(key: str) -> bool:
    return bool((row := row_of("trl", key)) and not row.irrelevant)


def listed(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value] if value else [])]


def launched(
    script: Path, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> tuple[list[list[str]], list[str], dict[str, str], CommandEnd]:
    """Run the script with bash, where it can do no harm, in its repository (the next folder above it with
    ``.git``, or else its own). Return the commands that it starts, in order, what it reads and does not find,
    the YAML files that it leaves, by path, and its end. Raises ValueError where there is no sandbox."""
    if refusal := commands_refused():
        why = f"bash runs a script in the sandbox, and this machine has none ({refusal})"
        instead = "save the arguments of its training command, one a line, as args.txt, and give that"
        raise ValueError(f"{script}: {why}; {instead} (docs/from_verl.md)")
    script = script.resolve()
    root = next((folder for folder in script.parents if (folder / ".git").exists()), script.parent)
    # ``settings.sh``, which each bash reads, makes the stand-ins; they come before all programs.
    given = {"PATH": f"{OWN}/bin:/usr/bin:/bin", "HOME": HOME, "USER": "user", "SLURM_JOB_ID": "1"}
    given |= {"BASH_ENV": f"{OWN}/settings.sh", "MASTER_ADDR": "127.0.0.1", **(variables or {})}
    start = ["bash", f"{OWN}/start.sh", f"{HERE}/{script.relative_to(root)}", *arguments]
    limits = CommandLimits(seconds=20, processes=64, memory_mb=1024, folder_mb=128)
    with contextlib.closing(Sandbox(Isolation(True, True, True), sys.executable)) as sandbox:
        end = sandbox.command(Command(start, environment=given), _furnished(root, script), limits)
    files = folder_files(end.folder)

    def outside(text: str) -> str:
        return text.replace(HERE, str(root)).replace(HOME, str(Path.home()))

    def text_of(name: str) -> str:
        return outside(files[name].decode(errors="replace"))

    # A file for each command, named by its time: arguments that end with NUL.
    def recorded(folder: str) -> list[list[str]]:
        return [text_of(name).split("\0")[:-1] for name in sorted(files) if f".eqlen/{folder}/" in name]

    yamls = (name for name in files if name.endswith((".yaml", ".yml")))
    written = {outside(f"{FOLDER}/{name}"): text_of(name) for name in yamls}
    return recorded("record"), [name for (name,) in recorded("missing")], written, end


def _furnished(root: Path, script: Path) -> bytes:
    """Return the folder that a script starts in, packed: its repository's small files, and stand-ins."""

    def may_run(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mode = 0o755
        return member

    packed, found = io.BytesIO(), {root: None, script: None}
    # The script's own folder comes first, so that the limits leave out the rest.
    for folder, inner, names in chain(os.walk(script.parent), os.walk(root)):
        inner[:] = (name for name in inner if name[0] != "." and len(found) < MOST_FILES)
        found |= dict.fromkeys(Path(folder, name) for name in (*inner, *names))
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(Path(__file__).with_name("launch"), ".eqlen")
        for path in islice(found, MOST_FILES):
            place, is_file = path.relative_to(root), path.is_file()
            archive.dereference = is_file  # a link's content is copied
            fits = path.stat().st_size <= MOST_BYTES if is_file else path.is_dir()
            if fits and len(place.parts) <= DEEPEST and os.access(path, os.R_OK):
                archive.add(path, f".eqlen/here/{place}", recursive=False, filter=may_run)
    return packed.getvalue()
