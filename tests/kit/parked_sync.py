"""A rank in the test of a sync from a parked trainer: ``OLD_MODEL NEW_MODEL``."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from megatron_eqlen.run.generation import Generator
from tests.kit.rollout_kit import generate, open_engine, requests
from tests.kit.updates import build_policy


def main(old: Path, new: Path) -> None:
    """Print the output of an engine of ``old`` after a sync from a parked trainer of ``new``."""
    sampled = {"max_response_length": 20, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    policy = build_policy(str(new), {"rollout": sampled | {"park_trainer": "all"}})
    policy.park()
    generator = Generator.__new__(Generator)
    generator.session = SimpleNamespace(stage=lambda *_: nullcontext({}))  # pyright: ignore[reportAttributeAccessIssue]
    generator.recipe, generator.patience = policy.recipe, 0.0
    generator.engine = open_engine(old, temperature=1.0)
    generator.update_weights(policy)
    assert not policy.memory.on_device()["weights"], "parked again"
    print(json.dumps(generate(generator.engine, requests(4))), flush=True)
    generator.engine.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
