#!/usr/bin/env python
"""Write search puzzles as DeepMath-103K parquet files: OUT/train.parquet and OUT/test.parquet.

    tools/make_search.py --out runs/search/data

Responses have a heavy tail of lengths (megatron_eqlen/toys/search.py); the dials shape it. With
``--pauses 0.25 --closing 90`` a stream has 6 to 9 pairs. The files share no question; the same arguments
write the same rows.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from megatron_eqlen.processes.failures import run_script
from megatron_eqlen.toys.search import Dials, make_rows
from megatron_eqlen.toys.synthetic import write_split


def main() -> None:
    default = Dials()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--train", type=int, default=1800, help="questions to train on")
    parser.add_argument("--test", type=int, default=256, help="held-out questions")
    parser.add_argument(
        "--moduli", type=int, nargs="+", default=default.moduli, help="primes: mean tries of a search"
    )
    parser.add_argument("--offsets", type=int, default=default.offsets, help="terms without x: longer tries")
    parser.add_argument(
        "--gives-up", type=float, default=default.gives_up, help="probability before each try"
    )
    parser.add_argument("--in-order", type=float, default=default.in_order, help="share of orderly searches")
    parser.add_argument("--checks", type=float, default=default.checks, help="share that check the answer")
    parser.add_argument(
        "--remarks", type=float, default=default.remarks, help="share of tries that say they do not fit"
    )
    parser.add_argument("--pauses", type=float, default=default.pauses, help="mean number after a term")
    parser.add_argument(
        "--closing", type=float, default=default.closing, help="mean number of pauses after the answer"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dials = Dials(**{field.name: getattr(args, field.name) for field in fields(Dials)})
    rows = make_rows(args.train + args.test, args.seed, dials)
    write_split(args.out, rows, args.test)


if __name__ == "__main__":
    run_script(main)
