#!/usr/bin/env python
"""Write tiny programming problems in OpenCodeReasoning's schema, and their tests in TACO's.

    tools/make_programs.py --out runs/programs/data

A recipe reads them like the real ones, and the sandbox grades them:

    data.sources: [{name: programs, reader: opencodereasoning, path: runs/programs/data/split_0,
                    tests: runs/programs/data/tests}]

The same arguments write the same rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_eqlen.processes.failures import run_script
from megatron_eqlen.toys.programs import make_rows, write


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for split_0/ and tests/")
    parser.add_argument("--count", type=int, default=400, help="problems")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.out, *make_rows(args.count, args.seed))


if __name__ == "__main__":
    run_script(main)
