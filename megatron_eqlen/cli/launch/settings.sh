# Read by every bash (BASH_ENV) that runs a launch script: a file or folder that is not here ends no script.
if [[ ! -d /work/.eqlen/bin ]]; then
  mkdir -p /work/.eqlen/{bin,home,record,missing}
  chmod +x /work/.eqlen/stand_in.sh
  # bash asks for a stand-in for every other program that it does not find
  for name in accelerate apt apt-get aws conda curl deepspeed docker git gsutil hf huggingface-cli ip kill kinit killall \
    kubectl mpirun nsys numactl nvidia-smi pip pip3 pkill podman python python3 ray sbatch scontrol scp screen sleep squeue srun \
    ssh sudo systemctl tmux torchrun trl uv wandb wget; do
    ln -s ../stand_in.sh "/work/.eqlen/bin/$name"
  done
fi
command_not_found_handle() {
  [[ $1 != -* ]] || return 127 # the line before it does not continue
  EQLEN_NAME=$1 /work/.eqlen/stand_in.sh "${@:2}"
}
source() {
  if [[ -e $1 ]] || builtin type -P -- "$1" > /dev/null; then builtin source "$@"
  else printf '%s\0' "$1" > "$(mktemp "/work/.eqlen/missing/$EPOCHREALTIME.XXXXXX")"; fi
}
function . { source "$@"; }
cd() { builtin cd "$@" 2> /dev/null || true; }
ulimit() { builtin ulimit "$@" 2> /dev/null || true; }
for name in chmod chown cp ln mkdir mv rm tee touch; do
  eval "$name() { command $name \"\$@\" 2> /dev/null || true; }"
done
if [[ -f $0 ]]; then # what its lines for sbatch ask for
  while read -r name value; do
    name=SLURM_${name^^}
    [[ -v ${name//-/_} ]] || export "${name//-/_}=$value"
  done < <(sed -nE 's/^#SBATCH +-N[= ]?(\S+).*/nodes \1/p; s/^#SBATCH +--([a-z-]+)[= ](\S+).*/\1 \2/p' "$0")
  [[ ! -v SLURM_NODES ]] || export SLURM_NNODES=${SLURM_NNODES-$SLURM_NODES} SLURM_JOB_NUM_NODES=${SLURM_JOB_NUM_NODES-$SLURM_NODES}
fi
unset name value
eqlen_unset() { # note the variables without a value that a command reads: $X and ${X}, in no test
  local text=$1 before rest name
  case $text in "["* | "test "* | "case "*) return 0 ;; esac
  while [[ $text == *\'*\'* ]]; do text=${text%%\'*}${text#*\'*\'}; done
  while [[ $text == *\$* ]]; do
    before=${text%%\$*} text=${text#*\$} rest=${text#\{}
    name=${rest%%[!A-Za-z0-9_]*}
    [[ $name == [A-Za-z_]* && $before != *\\ && $before != *"$name="* ]] || continue
    [[ $text == "$rest" || ${rest#"$name"} == \}* ]] || continue
    [[ -v $name ]] || printf '%s\0' "\$$name" > "$(mktemp "/work/.eqlen/missing/$EPOCHREALTIME.XXXXXX")"
  done
}
# what a stand-in does not answer ends no script either
set -T; trap 'set +e; [[ $BASH_COMMAND != *\$* ]] || eqlen_unset "$BASH_COMMAND" 2> /dev/null' DEBUG
