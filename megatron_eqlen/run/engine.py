"""Start of a rank's engine: vLLM in this process, servers, or none on ranks that drive none."""

from __future__ import annotations

from pathlib import Path

from megatron_eqlen.engines.protocol import Engine, IdleEngine
from megatron_eqlen.hf.folder import HFFolder
from megatron_eqlen.job import Job
from megatron_eqlen.run.replicas import Replicas


def start_engine(job: Job, replicas: Replicas, syncs_first: bool) -> Engine:
    """Start this rank's engine, with the weights that the recipe starts from."""
    recipe, rollout, ends = job.recipe, job.recipe.rollout, job.tokenizer.eos_token_ids
    path, longest = str(job.folder), recipe.longest_context
    if not replicas.drives:
        return IdleEngine(longest)
    if not syncs_first:
        # without a sync vLLM reads the folder itself
        HFFolder(path).check_vllm_reads_the_same()
    if rollout.engine == "server":
        from megatron_eqlen.engines.servers import ServerEngine

        dtype, run = recipe.model.dtype, Path(recipe.run_folder)
        return ServerEngine(path, rollout, ends, longest, syncs_first=syncs_first, run=run, dtype=dtype)
    from megatron_eqlen.engines.colocated import ColocatedEngine  # imports vLLM

    if syncs_first:  # the sync brings the weights
        rollout = rollout.model_copy(update={"vllm": {"load_format": "dummy"} | rollout.vllm})
    return ColocatedEngine(path, rollout, recipe.model.dtype, ends, longest, recipe.seed)
