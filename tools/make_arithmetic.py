#!/usr/bin/env python
"""Write chains of arithmetic as DeepMath-103K parquet files: OUT/train.parquet and OUT/test.parquet.

    tools/make_arithmetic.py --out data/arithmetic

The files share no question; the same arguments write the same rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_eqlen.processes.failures import run_script
from megatron_eqlen.toys.synthetic import make_rows, write_split


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--train", type=int, default=8000, help="questions to train on")
    parser.add_argument("--test", type=int, default=200, help="held-out questions")
    parser.add_argument("--min-operands", type=int, default=3, help="shortest chain")
    parser.add_argument("--max-operands", type=int, default=6, help="longest chain")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = make_rows(args.train + args.test, args.seed, args.min_operands, args.max_operands)
    write_split(args.out, rows, args.test)


if __name__ == "__main__":
    run_script(main)
