#!/usr/bin/env python
"""Measure a part of the system: ``tools/bench.py NAME [options]``; each benchmark prints a table and, with
``--json FILE``, writes the same numbers as JSON."""

from __future__ import annotations

import argparse
import importlib

BENCHMARKS = {
    "convert": "speed and memory of conversion to Megatron and back",
    "trees": "forward and backward of token trees against 2N and N + 1 sequences",
    "packing": "fill, balance and speed of the packer on simulated streams",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, summary in BENCHMARKS.items():
        module = importlib.import_module(f"megatron_eqlen.bench.{name}")
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
