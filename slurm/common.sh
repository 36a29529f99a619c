# Sourced by the batch scripts: the Python that runs, and where. Steps start with "${step[@]}".
#   CONTAINER_IMAGE     for pyxis and enroot: a squashfs file, or registry#image:tag; unset: no container
#   CONTAINER_MOUNTS    what the image must see besides the working directory: /data:/data,/models:/models
#   EQLEN_PYTHON        in the image; default: where the Dockerfile puts it, without an image .venv's
#   HET_GROUP           the component of a heterogeneous job that a script is for (het.sbatch sets it)
of_group() { # of_group SLURM_NAME: its value for that component
    local name=$1${HET_GROUP:+_HET_GROUP_$HET_GROUP}
    echo "${!name:-}"
}
step=(srun ${HET_GROUP:+--het-group="$HET_GROUP"})
once=() # before a command of the batch script itself
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    step+=(
        --container-image="$CONTAINER_IMAGE" --container-name="eqlen-$SLURM_JOB_ID" # a node unpacks it once
        --container-mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" --container-workdir="$PWD"
    )
    once=("${step[@]}" --nodes=1 --ntasks=1)
    EQLEN_PYTHON=${EQLEN_PYTHON:-/opt/megatron_eqlen/.venv/bin/python}
fi
export EQLEN_PYTHON=${EQLEN_PYTHON:-.venv/bin/python}
# SLURM 22.05 and newer do not tell srun what sbatch was asked for, and may pin a task to one core.
export SRUN_CPUS_PER_TASK=$(of_group SLURM_CPUS_PER_TASK)
[ -n "$SRUN_CPUS_PER_TASK" ] || unset SRUN_CPUS_PER_TASK
