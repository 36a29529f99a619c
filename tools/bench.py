#!/usr/bin/env python
"""Measure a part of the system: ``tools/bench.py NAME [options]``; each benchmark prints a table."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from megatron_eqlen.processes.cores import share_cores
from megatron_eqlen.processes.quiet import quiet

BENCHMARKS = {
    "gpu": "attention, delta rule, head and layers at the paper's shapes on one GPU, beside yardsticks",
    "trees": "forward and backward of token trees against 2N and N + 1 sequences",
    "peer": "steps of GRPO beside TRL, same model and batch",
    "servers": "the process that drives servers: CPU time a token, before a server that answers at once",
    "scale": "rank 0's work on the processor in a step, on any number of GPUs",
}


def main() -> None:
    names = "\n".join(f"  {name:10} {summary}" for name, summary in BENCHMARKS.items())
    chooser = argparse.ArgumentParser(
        description=f"{__doc__}\n\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chooser.add_argument("name", choices=BENCHMARKS)
    name = chooser.parse_args(sys.argv[1:2]).name
    quiet()
    share_cores()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    benchmark = importlib.import_module(f"tools.benchmarks.{name}")
    parser = argparse.ArgumentParser(prog=f"bench.py {name}", description=BENCHMARKS[name])
    benchmark.add_arguments(parser)
    args = parser.parse_args(sys.argv[2:])
    for option, value in vars(args).items():
        for number in value if isinstance(value, list) else [value]:
            # of all options only masks may be of no tokens
            if type(number) is int and number < (least := int(option != "kept")):
                name = option.replace("_", "-")
                parser.error(f"argument --{name}: expected a number from {least} on, found {number}")
    benchmark.run(args)


if __name__ == "__main__":
    main()
