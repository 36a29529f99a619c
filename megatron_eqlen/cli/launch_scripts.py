"""Configurations of other trainers: keys and values from YAML, arguments, Python, and launch scripts.

A launch script runs, as bash reads it; what it starts does not:

    script ─► bash in the sandbox: no network, an empty home, a stand-in for each program that it may start
                └─► a stand-in (launch/stand_in.sh) writes down its arguments, and ends well
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
MOST_FILES, MOST_BYTES, DEEPEST = 5000, 1 << 17, 8
"""Limits of what a script may read of its repository: files, bytes of each, and parts of its path."""
# ``--beta=0.04``, ``--report_to``
OPTION = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
# ``data.train_files=[a,b]``, ``+trainer.seed=1``, ``~critic.model``, ``steps=3``
HYDRA = re.compile(r"\+{0,2}(~\w+(?:\.[\w-]+)+|(?:[a-z]\w*|[\w@]+(?:[./][\w@*-]+)+)(?==))=?(.*)", re.DOTALL)
# ``python3.12``, ``/opt/bin/torchrun``
LAUNCHER = re.compile(r"(.*/)?(accelerate|deepspeed|torchrun|trl|python[\d.]*)")
PYTHON_CALLS = re.compile("GRPOConfig|GRPOTrainer|LoraConfig|get_peft_model|ModelConfig|ScriptArguments")
OBJECTS = ("args", "train_dataset", "eval_dataset", "peft_config", "processing_class", "callbacks")
"""Arguments of TRL's classes that are no options."""


def read(file: Path, trainer: str, words: Sequence[str], remarks: list[str]) -> dict[str, Any]:
    """Return the keys of a configuration with their values as text or lists; what is to be said goes to
    ``remarks``. ``words``: arguments and NAME=VALUE of the environment of a script."""
    file.stat()  # raises FileNotFoundError
    try:
        if file.suffix not in (".py", ".txt", ".args", ".yaml", ".yml", ".json"):
            return _of_script(file, trainer, words, remarks)  # in any encoding
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            return _of_python(text)
        found = text.splitlines() if file.suffix in (".txt", ".args") else read_value(text) or {}
        if isinstance(found, list) and all(isinstance(word, str) for word in found):
            return _of_words(found, trainer, file)
        if not isinstance(found, dict):
            raise ValueError(f"expected a mapping of keys or a list of arguments, found {found!r:.80}")
        keys = flat(found)
        # Hydra's ``${data.seed}`` takes the value of another key, perhaps of a file that is not here.
        if key := next((key for key, value in keys.items() if "${" in str(value)), ""):
            raise ValueError(f"{key}: {keys[key]}: expected resolved values (verl: --cfg job --resolve)")
        return keys
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as a configuration: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not valid YAML: {in_one_line(error)}") from None


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
    # A command is a training if it gives two known keys or more, and half as many as the best has. Others are
    # servers, conversions of checkpoints, or other trainers.
    known = [sum(bool((row := row_of(trainer, key)) and row.ours) for key in keys) for keys in configured]
    training = [keys for keys, n in zip(configured, known, strict=True) if n > 1 and 2 * n >= max(known)]
    if not training:
        # The last line that is no trace of ``set -x``.
        said = ["", *(line for line in end.output.splitlines() if line.strip() and line[0] != "+")]
        others = ", ".join(dict.fromkeys(" ".join(command[:3]) for command in commands)) or "no command"
        raise ValueError(
            f"expected a script that starts a training of {trainer}, found {others:.200}; bash ended it with "
            f"{end.status if end.code is None else end.code}: {said[-1][-300:]} (give what it takes from its "
            "environment behind it, NAME=VALUE, or its arguments behind --; or save them, docs/from_verl.md)"
        )
    remarks += [f"The script starts {len(training)} trainings; this is the last one."] * (len(training) > 1)
    remarks += [f"The script reads {name}, which is not there." for name in dict.fromkeys(missing)]
    return training[-1]


def _of_words(words: list[str], trainer: str, file: Path, written: Mapping[str, str] = {}) -> dict[str, Any]:
    """Return the keys in a command's arguments, ``a.b=c`` (verl) or ``--a b c``, and its program, over those
    of the file that they name: verl's ``--config-name``, if it is not its own, TRL's ``--config``,
    ``--config_file``. ``written``: YAML files that the script writes, by name."""
    options, keys, option = dict[str, Any](), dict[str, Any](), ""
    for word in words:
        if match := OPTION.fullmatch(word):
            option, value = match[1].replace("-", "_"), match[2]
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
    name = str(options.get("config_name", "")).removesuffix(".yaml")
    paths = [str(options[key]) for key in ("config", "config_file") if key in options and trainer == "trl"]
    # ``ppo_trainer`` and ``ppo_megatron_trainer`` are verl's own, whose values are the defaults.
    if trainer == "verl" and keys and name and not re.fullmatch(r"ppo(_\w+)?_trainer", name):
        paths = [f"{options.get('config_path', options.get('config_dir', 'config'))}/{name}.yaml"]
    for path in paths:
        # Relative to here, to the script's folder, or to a folder above it, as its repository's root.
        places = (folder / path for folder in (Path(), *file.resolve().parents))
        texts = (each.read_text(encoding="utf-8") for each in places if each.is_file())
        base = next(texts, written.get(Path(path).name))
        if base is None:
            raise ValueError(f"it reads {path}, which is not there; give the resolved configuration")
        # What the command gives comes before what the file says.
        below = flat(read_value(base))
        keys = {key: below[key] for key in below if key.split(".")[0] not in ("defaults", "hydra")} | keys
    return keys | {key: options[key] for key in options if trainer != "verl" or key == "program"}


def _of_python(text: str) -> dict[str, Any]:
    """Return the arguments of TRL's classes: literals, functions of rewards, or the source in ``${}``."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if PYTHON_CALLS.fullmatch(ast.unparse(call.func).rpartition(".")[2])]
    words = {word.arg or "**": word.value for call in calls for word in call.keywords}
    texts = {key: str(v.value) if isinstance(v, ast.Constant) else ast.unparse(v) for key, v in words.items()}
    named = {key for key, v in words.items() if any(isinstance(node, ast.Name) for node in ast.walk(v))}
    texts |= {key: f"${{{key}: {texts[key]}}}" for key in named - {"reward_funcs"}}
    return {key: texts[key] for key in words if key not in OBJECTS}


def listed(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value] if value else [])]


def launched(
    script: Path, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> tuple[list[list[str]], list[str], dict[str, str], CommandEnd]:
    """Run the script with bash, where it can do no harm, in its repository (the next folder above it with
    ``.git``, or else its own folder). Return the commands that it starts, in order, the files that it reads
    settings from and does not find, the YAML files that it writes, by name, and its end. Raises ValueError
    where there is no sandbox."""
    if refusal := commands_refused():
        raise ValueError(
            f"{script}: bash runs a script in the sandbox, and this machine has none ({refusal}); save the "
            "arguments of its training command, one a line, as args.txt, and give that (docs/from_verl.md)"
        )
    script = script.resolve()
    root = next((folder for folder in script.parents if (folder / ".git").exists()), script.parent)
    # ``settings.sh``, which each bash reads, makes the stand-ins; they come before all programs.
    given = {"PATH": f"{OWN}/bin:/usr/bin:/bin", "HOME": HOME, "USER": "user", "SLURM_JOB_ID": "1"}
    given |= {"BASH_ENV": f"{OWN}/settings.sh", "MASTER_ADDR": "127.0.0.1", **(variables or {})}
    place = f"{HERE}/{script.relative_to(root)}"
    # ``cat`` ends when no process holds its pipe any more: the script has ended, and what it left running.
    start = f'cd {HERE}; {{ bash "$@" 9>&1 >&8 8>&- | timeout 5 cat; exit ${{PIPESTATUS[0]}}; }} 8>&1'
    start = ["bash", "-c", start, "-", place, *arguments]
    limits = CommandLimits(seconds=20, processes=64, memory_mb=1024, folder_mb=128)
    with contextlib.closing(Sandbox(Isolation(True, True, True), sys.executable)) as sandbox:
        end = sandbox.command(Command(start, environment=given), _furnished(root, script), limits)
    files = folder_files(end.folder)

    def text_of(name: str) -> str:
        text = files[name].decode(errors="replace")
        return text.replace(HERE, str(root)).replace(HOME, str(Path.home()))

    # A file for each command, named by its time: arguments that end with NUL.
    def recorded(folder: str) -> list[list[str]]:
        names = sorted(name for name in files if f".eqlen/{folder}/" in name)
        return [text_of(name).split("\0")[:-1] for name in names]

    here = ".eqlen/here/"
    yamls = (name for name in files if here in name and name.endswith((".yaml", ".yml")))
    new = [name for name in yamls if not (root / name.partition(here)[2]).exists()]
    written = {Path(name).name: text_of(name) for name in new}
    return [words[1:] for words in recorded("record")], [name for (name,) in recorded("missing")], written, end


def _furnished(root: Path, script: Path) -> bytes:
    """Return the folder that a script starts in, packed: its repository's small files, and stand-ins."""
    packed, seen = io.BytesIO(), set[Path]()

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = Path(member.name).relative_to(".eqlen/here")
        file = root / name
        if file.is_file():  # a link's content is copied
            member.type, member.size = tarfile.REGTYPE, file.stat().st_size
        elif not file.is_dir() or name.name.startswith("."):
            return None
        # The script's own folder is packed first, so that the limits leave out the rest.
        fits = member.size <= MOST_BYTES and len(name.parts) <= DEEPEST and len(seen) < MOST_FILES
        if not fits or name in seen or not os.access(file, os.R_OK):
            return None
        seen.add(name)
        member.mode = 0o755
        return member

    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(Path(__file__).with_name("launch"), ".eqlen")
        for place in (script, script.parent, root):
            archive.add(place, f".eqlen/here/{place.relative_to(root)}", filter=kept)
    return packed.getvalue()
