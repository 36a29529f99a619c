#!/usr/bin/env python
"""Translates every configuration in folders with ``eqlen recipe --from``, and prints what became of its keys.

tools/translations.py verl ~/verl/examples ~/verl/recipe
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_eqlen.cli.translate import translate

ENDS = ("same", "changed", "lost", "irrelevant")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trainer", help="verl, trl or slime, perhaps with a version: verl@0.6")
    parser.add_argument("places", nargs="+", type=Path, metavar="FOLDER", help="folder, or a file")
    parser.add_argument("--ends", default="*.sh", help="names of the files in folders (default: *.sh)")
    arguments = parser.parse_args()
    total, lost, refused = Counter[str](), Counter[str](), 0
    print("| file | " + " | ".join(ENDS) + " | holes |\n|---|" + "---|" * (len(ENDS) + 1))
    for place in arguments.places:
        for file in sorted(place.rglob(arguments.ends)) if place.is_dir() else [place]:
            try:
                done = translate(arguments.trainer, file)
            except ValueError as error:
                refused += 1
                print(f"| {file.name} | refused: {error!s:.300} |", flush=True)
                continue
            ends = Counter(done.outcomes.values())
            if unended := done.theirs.keys() - done.outcomes.keys():
                raise AssertionError(f"{file}: {unended} have not ended")
            total += ends
            lost.update(key for key, end in done.outcomes.items() if end == "lost")
            counts = " | ".join(str(ends[end]) for end in ENDS)
            print(f"| {file.name} | {counts} | {', '.join(done.holes)} |", flush=True)
    print(f"\n{', '.join(f'{total[end]} {end}' for end in ENDS)}; {refused} files refused")
    print("lost: " + ", ".join(f"{key} {count}" for key, count in lost.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
