"""Writes ``verl_rollout_corr.json``: the results of verl's own ``rollout_corr_helper`` for random log-probs.

    python tests/tables/make_verl_rollout_corr.py CLONE_OF_VERL

The table was made with verl 1dda039b9 (August 2026). Modules that verl imports but does not use here (its
data protocol, its configuration, its devices) are replaced by empty ones.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

LENGTHS = [1, 3, 8, 5, 12, 2]
BOUNDS = {
    "token_k1": [0.7, 1.4], "token_k2": 0.05, "token_k3": 0.05,
    "seq_sum_k1": 1.5, "seq_sum_k2": 0.2, "seq_sum_k3": 0.2,
    "seq_mean_k1": [0.95, 1.1], "seq_mean_k2": 0.04, "seq_mean_k3": 0.04,
    "seq_max_k2": 0.1, "seq_max_k3": 0.1,
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    *(
        {"rollout_is": level, "rollout_is_threshold": t}
        for level in ("token", "sequence")
        for t in (1.2, [0.8, 1.3])
    ),
    *({"rollout_rs": {option: bound}} for option, bound in BOUNDS.items()),
    {"rollout_rs": {"token_k1": 1.5, "seq_mean_k3": 0.04}},
    {"rollout_is": "token", "rollout_is_threshold": [0.8, 1.3], "rollout_rs": {"seq_max_k2": 0.1}},
]


def main(clone: Path) -> None:
    helper = load_helper(clone)
    torch.manual_seed(0)
    engine = [(-torch.rand(n, dtype=torch.float64) * 3).round(decimals=4).tolist() for n in LENGTHS]
    trainer = [
        (torch.tensor(row) + 0.25 * torch.randn(len(row))).round(decimals=4).tolist() for row in engine
    ]
    cases = [case | compute(helper, case, trainer, engine) for case in CASES]
    table = {"trainer": trainer, "engine": engine, "cases": cases}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in table.items())
    Path(__file__).with_name("verl_rollout_corr.json").write_text(
        "{" + lines.replace("}, {", "},\n{") + "}\n"
    )


def compute(helper: Any, case: dict[str, Any], trainer: list, engine: list) -> dict[str, Any]:
    """Return weights and masks of all tokens, one after the other, and all metrics."""
    options, bounds = case.get("rollout_rs") or {}, []
    for bound in options.values():
        bounds.append("_".join(map(str, bound)) if isinstance(bound, list) else str(bound))
    threshold = case.get("rollout_is_threshold")
    mask = padded([[1.0] * len(row) for row in engine])
    weights, kept, metrics = helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=padded(trainer),
        rollout_log_prob=padded(engine),
        response_mask=mask,
        rollout_is=case.get("rollout_is"),
        rollout_is_threshold="_".join(map(str, threshold)) if isinstance(threshold, list) else threshold,
        rollout_rs=",".join(options) or None,
        rollout_rs_threshold=",".join(bounds) or None,
    )
    real = mask.bool()
    weights = torch.ones_like(mask) if weights is None else weights["rollout_is_weights"]
    return {
        "weights": [round(weight, 9) for weight in weights[real].tolist()],
        "kept": kept[real].long().tolist(),
        "metrics": {name.partition("/")[2]: round(value, 9) for name, value in metrics.items()},
    }


def padded(rows: list[list[float]]) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def load_helper(clone: Path) -> Any:
    class Proto:
        @staticmethod
        def from_dict(tensors: dict) -> dict:
            return tensors

    empty: dict[str, dict[str, Any]] = {
        "verl": {}, "verl.utils": {}, "verl.trainer": {}, "verl.trainer.config": {}, "verl.workers": {},
        "verl.workers.config": {}, "verl.protocol": {"DataProto": Proto}, "tensordict": {"TensorDict": dict},
        "verl.trainer.config.algorithm": {"RolloutCorrectionConfig": dict},
        "verl.workers.config.actor": {"PolicyLossConfig": dict},
        "verl.utils.device": {"get_device_name": lambda: "cpu", "get_torch_device": lambda: torch.cpu},
    }  # fmt: skip
    for name, content in empty.items():
        sys.modules[name] = module = ModuleType(name)
        module.__dict__.update(content)
    sys.modules["verl.utils"].torch_functional = load(  # type: ignore[attr-defined]
        clone / "verl/utils/torch_functional.py", "verl.utils.torch_functional"
    )
    return load(clone / "verl/trainer/ppo/rollout_corr_helper.py", "rollout_corr_helper")


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(Path(sys.argv[1]))
