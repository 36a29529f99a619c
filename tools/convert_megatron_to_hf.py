#!/usr/bin/env python
"""Convert a Megatron torch_dist checkpoint, saved at any parallel layout, to a Hugging Face folder.

tools/convert_megatron_to_hf.py runs/NAME/checkpoints models/NAME --source models/Qwen3-32B --verify
"""

import sys

from megatron_eqlen.cli.convert import main

if __name__ == "__main__":
    sys.exit(main("megatron-to-hf"))
