"""Conversion both ways on a model of a few GB made on the spot: speed against raw read and write of the same
bytes, and peak memory against the two largest tensors.

``qwen3_next_80b`` has as many tensors as the 80B, each a 32nd of its length and width: what conversion needs
there beside the two largest tensors, which are 622 MB each in the real one.

Raw is a plain copy of the same files in 16 MiB blocks. All writes end with fsync. Memory is the process's
peak resident set minus what it held before, so pages of mapped files count as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_eqlen import hf
from megatron_eqlen.hf.config import parse_config
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.hf.folder import INDEX, HFFolder
from megatron_eqlen.models.convert import hf_to_megatron, megatron_to_hf, verify_hash
from megatron_eqlen.models.groups import start, stop
from megatron_eqlen.recipe import ParallelRecipe
from tools.benchmarks.table import show

BLOCK = 16 << 20
SHARD = 1 << 30

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
SPARSE = DENSE | {
    "model_type": "qwen3_next",
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 128,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
THIN_80B = {
    "vocab_size": 4748,
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
SHIPPED_80B = Path(hf.__file__).parent / "configs" / "qwen3-next-80b-a3b-thinking.json"
FAMILIES = ["qwen3", "qwen3_next", "qwen3_next_80b"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="size of the model, in bfloat16")
    parser.add_argument("--folder", type=Path, help="where to work; needs five times the size")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    start(ParallelRecipe(), seed=0)
    results = []
    for family in args.families:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            results += measure(Path(folder), family, args.gigabytes)
    stop()
    show(results, "conversion, one process, warm page cache, all writes synced", args.json)


def measure(folder: Path, family: str, gigabytes: float) -> list[dict[str, Any]]:
    """Measure both directions for one model."""
    source, checkpoint, back = folder / "hf", folder / "megatron", folder / "back"
    make_model(source, family, gigabytes)
    largest = sum(sorted(entry.nbytes for entry in HFFolder(source).entries.values())[-2:])
    results = []
    for direction, convert, read in (
        ("hf -> megatron", lambda: hf_to_megatron(source, checkpoint), source),
        ("megatron -> hf", lambda: megatron_to_hf(checkpoint, source, back), checkpoint),
    ):
        size = sum(file.stat().st_size for file in read.iterdir())
        raw, _ = timed(lambda read=read: copy(read, folder / "raw"))
        shutil.rmtree(folder / "raw")
        seconds, memory = timed(convert)
        results.append(
            {
                "family": family,
                "direction": direction,
                "tensors": len(HFFolder(source).entries),
                "GB": size / 1e9,
                "GB/s": size / 1e9 / seconds,
                "raw GB/s": size / 1e9 / raw,
                "of raw": raw / seconds,
                "extra MB": memory / 1e6,
                "two largest MB": largest / 1e6,
            }
        )
    verify_hash(checkpoint, back, source)
    return results


def make_model(folder: Path, family: str, gigabytes: float) -> None:
    """Make a Hugging Face folder with random bits, at least ``gigabytes``, in shards of about 1 GB."""
    folder.mkdir()
    raw = model_config(family, gigabytes)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    shard: dict[str, torch.Tensor] = {}
    weight_files: dict[str, str] = {}
    nbytes = 0
    for weight in weight_map(parse_config(raw, "benchmark")):
        for name, shape in zip(weight.hf, weight.shapes, strict=True):
            shard[name] = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
            nbytes += shard[name].nbytes
        if nbytes > SHARD:
            save_shard(folder, shard, weight_files)
            nbytes = 0
    save_shard(folder, shard, weight_files)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_files}), encoding="utf-8")


def model_config(family: str, gigabytes: float) -> dict[str, Any]:
    if family == "qwen3_next_80b":
        return json.loads(SHIPPED_80B.read_text(encoding="utf-8")) | THIN_80B
    raw = DENSE if family == "qwen3" else SPARSE
    layers = 4
    while model_bytes(raw | {"num_hidden_layers": layers}) < gigabytes * 1e9:
        layers += 4
    return raw | {"num_hidden_layers": layers}


def save_shard(folder: Path, shard: dict[str, torch.Tensor], weight_files: dict[str, str]) -> None:
    """Write and forget the tensors of ``shard``, and note where they are."""
    name = f"model-{len(set(weight_files.values())) + 1:05d}.safetensors"
    save_file(shard, folder / name)
    weight_files.update(dict.fromkeys(shard, name))
    shard.clear()


def model_bytes(raw: dict[str, Any]) -> int:
    weights = weight_map(parse_config(raw, "benchmark"))
    return sum(2 * math.prod(shape) for weight in weights for shape in weight.shapes)


def copy(source: Path, target: Path) -> None:
    """Read and write every file of a folder, plainly."""
    target.mkdir()
    block = bytearray(BLOCK)
    for file in source.iterdir():
        with open(file, "rb", buffering=0) as read, open(target / file.name, "wb", buffering=0) as write:
            while count := read.readinto(block):
                write.write(memoryview(block)[:count])
            os.fsync(write.fileno())


def timed(work: Callable[[], None]) -> tuple[float, int]:
    """Return (seconds, bytes of resident memory beyond those in use before)."""
    Path("/proc/self/clear_refs").write_text("5")  # start a new high-water mark
    before = resident("VmRSS")
    began = time.perf_counter()
    work()
    return time.perf_counter() - began, resident("VmHWM") - before


def resident(field: str) -> int:
    """Return a memory field of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) * 1024
