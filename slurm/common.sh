# Sourced by the batch scripts: the Python that runs, and where; the run's record. Steps start with "${step[@]}".
#   CONTAINER_IMAGE     for pyxis and enroot: a squashfs file, or registry#image:tag; unset: no container
#   CONTAINER_MOUNTS    what the image must see besides the working directory: /data:/data,/models:/models
#   EQLEN_PYTHON        in the image; default: where the Dockerfile puts it, without an image .venv's
#   HET_GROUP           the component of a heterogeneous job that a script is for (het.sbatch sets it)
# The record of what happened to the run in $folder (megatron_eqlen/processes/events.py):
#   note KIND [TEXT [FIELDS]]   appends an event, in a line of its own whatever a full disk has torn
#   since_try KINDS             the events since the newest try began, oldest first
#   value FIELD                 of each event
note() {
    local text=${2:-}
    text=${text//\\/\\\\}
    text=${text//\"/\\\"}
    {
        ! command -v flock >/dev/null || flock -w 2 9
        printf '\n{"time": %(%s)T, "kind": "%s", "host": "%s"%s, "text": "%s"}\n' -1 "$1" \
            "${SLURMD_NODENAME:-$HOSTNAME}" "${3:+, $3}" "$text" >&9
    } 9>>"$folder/events.jsonl"
}
say() { echo "$2" && note "$@"; } # on the screen, too
events() { grep -E "^\{\"time\": [0-9.]+, \"kind\": \"($1)\"" "$folder/events.jsonl" 2>/dev/null; }
since_try() { events "try|$1" | awk '/"kind": "try"/ { n = 0; next } { found[n++] = $0 } END { for (i = 0; i < n; i++) print found[i] }'; }
value() { sed -nE "s/.*\"$1\": \"?([^\",}]*).*/\1/p"; }
newest_restart() { # of this job's tries; an image may have nothing but sed
    local restarts
    restarts=$(sed -nE 's/^\{"time": [0-9.]+, "kind": "try",.*"job": "'"$job"'", "restart": ([0-9]+).*/\1/p' \
        "$folder/events.jsonl" 2>/dev/null)
    echo "${restarts##*$'\n'}"
}
new_secret() { od -An -N16 -tx1 /dev/urandom | tr -d ' \n'; }
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
