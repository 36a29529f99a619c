"""Benchmarks behind ``tools/bench.py``: one file each, with ``add_arguments(parser)`` and ``run(args)``."""
