#!/usr/bin/env python
"""Convert a Hugging Face folder to a Megatron torch_dist checkpoint that loads at any parallel layout.

tools/convert_hf_to_megatron.py models/Qwen3-32B checkpoints/Qwen3-32B --verify
"""

import sys

from megatron_eqlen.cli.convert import main

if __name__ == "__main__":
    sys.exit(main("hf-to-megatron"))
