# Read by every bash (BASH_ENV) that runs a launch script: a file or folder that is not here ends no script.
if [[ ! -d /work/.eqlen/bin ]]; then
  mkdir -p /work/.eqlen/{bin,home,record,missing}
  chmod +x /work/.eqlen/stand_in.sh
  # bash asks for a stand-in for every other program that it does not find
  for name in accelerate apt apt-get aws conda curl deepspeed docker git gsutil hf huggingface-cli ip kill kinit killall \
    kubectl mpirun nsys numactl nvidia-smi pip pip3 pkill podman python python3 ray sbatch scontrol scp screen sleep squeue srun \
    ssh sudo systemctl tmux torchrun trl uv wandb wget /usr/bin/python3.*[0-9]; do
    ln -s ../stand_in.sh "/work/.eqlen/bin/${name##*/}"
  done
fi
eqlen_note() { printf '%s\0' "$1" > "$(mktemp "/work/.eqlen/missing/$EPOCHREALTIME.XXXXXX")"; }
command_not_found_handle() {
  [[ $1 != *.*=* ]] || eqlen_note "the line $* as a command" # the line before it does not continue
  [[ $1 != -* ]] || { eqlen_note "the line $* as a command"; return 127; }
  EQLEN_NAME=$1 /work/.eqlen/stand_in.sh "${@:2}"
}
source() {
  if [[ -e $1 ]] || builtin type -P -- "$1" > /dev/null; then builtin source "$@"
  else eqlen_note "$1"; fi
}
function . { source "$@"; }
cd() { builtin cd "$@" 2> /dev/null || true; }
ulimit() { builtin ulimit "$@" 2> /dev/null || true; }
nohup() { "$@"; }
for name in chmod chown cp ln mkdir mv rm tee touch; do
  eval "$name() { command $name \"\$@\" 2> /dev/null || true; }"
done
if [[ -f $0 ]]; then # what its lines for sbatch ask for
  while read -r name value; do
    name=SLURM_${name^^}
    [[ -v ${name//-/_} ]] || export "${name//-/_}=$value"
  done < <(sed -nE 'h; s/^#SBATCH +--(gres[= ]gpu:|gpus-per-node[= ])([a-zA-Z][^:]*:)?([0-9]+).*/gpus-on-node \3/p; g
    s/^#SBATCH +-N[= ]?(\S+).*/nodes \1/p; s/^#SBATCH +--([a-z-]+)[= ](\S+).*/\1 \2/p' "$0")
  [[ ! -v SLURM_NODES ]] || export SLURM_NNODES=${SLURM_NNODES-$SLURM_NODES} SLURM_JOB_NUM_NODES=${SLURM_JOB_NUM_NODES-$SLURM_NODES}
fi
unset name value
eqlen_unset() { # note the variables without a value that a command reads, in no test: $X, ${X}, ${X%.*}, $((X + 1))
  local text=$1 before rest name names
  case $text in "["* | "test "* | "case "*) return 0 ;; esac
  while [[ $text == *\'*\'* ]]; do text=${text%%\'*}${text#*\'*\'}; done
  while [[ $text == *\$* ]]; do
    before=${text%%\$*} text=${text#*\$} rest=${text#\{}
    if [[ $text == "(("* ]]; then # ``${X:-1}`` in it comes later
      rest=${text%%"))"*}
      IFS=' ' read -ra names <<< "${rest//[!A-Za-z0-9_\$\{]/ }"
      for name in "${names[@]}"; do [[ $name != [A-Za-z_]* || -v $name ]] || eqlen_note "\$$name"; done
      continue
    fi
    name=${rest%%[!A-Za-z0-9_]*}
    [[ $name == [A-Za-z_]* && $before != *\\ && $before != *"$name="* ]] || continue
    [[ $text == "$rest" || ${rest#"$name"} == [}%#/,^@]* || ${rest#"$name"} == :[0-9\ ]* ]] || continue
    [[ -v $name ]] || eqlen_note "\$$name"
  done
}
eqlen_program() { # a program at a path that is not here, or another machine's launcher, has a stand-in of that name
  local word words
  IFS=$' \t\n' read -ra words <<< "$1"
  for word in "${words[@]}"; do [[ $word == [A-Za-z_]*=* ]] || break; done
  word=${word//[\"\']/} # the half of a quoted text, or of ``$(basename $X)``, is no program
  [[ $word != *[!A-Za-z0-9_./~+@\$\{\}:-]* ]] || return 0
  shift; eval "set -- $word"
  [[ $1 == */* && $1 != *[!A-Za-z0-9_./+-]* ]] || return 0
  [[ ! -e $1 || ${1##*/} == @(python*|torchrun|accelerate|deepspeed|trl) ]] || return 0
  declare -F "$1" > /dev/null || eval "function $1 { EQLEN_NAME=$1 /work/.eqlen/stand_in.sh \"\$@\"; }"
}
# what a stand-in does not answer ends no script either
set -T; trap 'set +e; [[ $BASH_COMMAND != *\$* ]] || eqlen_unset "$BASH_COMMAND" 2> /dev/null
  [[ $BASH_COMMAND != *[\$/]* ]] || eqlen_program "$BASH_COMMAND" "$@" 2> /dev/null' DEBUG
