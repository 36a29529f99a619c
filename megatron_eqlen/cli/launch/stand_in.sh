#!/bin/bash
# Stands for every program that a launch script may start: writes down its arguments, and ends well.
name=${EQLEN_NAME:-${0##*/}}; unset EQLEN_NAME
case ${name##*/} in
  python*) [[ $1 == -c && -x /usr/bin/python3 ]] && exec /usr/bin/python3 "$@" ;;  # a value of the script
esac
words=()
for word; do  # YAML files by their paths, those of other folders copied
  file=${word#*=}
  if [[ $file == *.y?(a)ml && -f $file ]]; then
    word=${word%"$file"} file=$(realpath -s "$file")
    [[ $file == /work/* ]] || { cp "$file" "/work/.eqlen/here/.eqlen-${file//\//-}"; file=/work/.eqlen/here/.eqlen-${file//\//-}; }
    word+=$file
  fi
  words+=("$word")
done
printf '%s\0' "$name" "${words[@]}" > "$(mktemp "/work/.eqlen/record/$EPOCHREALTIME.XXXXXX")"
case $name in
  scontrol) [[ $* != "show hostnames"* ]] || echo localhost ;;
  ssh) exec bash -c "${*: -1}" ;;
  tmux)
    [[ $1 != has* ]] || exit 1
    for word; do [[ $word != *" "* ]] || bash -c "$word"; done ;;
  sbatch)
    while (($#)); do
      case $1 in
        --export=*)
          IFS=, read -ra given <<< "${1#*=}"
          for word in "${given[@]}"; do [[ $word != *=* ]] || export "$word"; done ;;
        --wrap) exec bash -c "$2" ;;
        --wrap=*) exec bash -c "${1#*=}" ;;
        --?*=*) # before what its header says
          word=${1%%=*} word=${word#--} word=SLURM_${word^^}
          [[ $word != SLURM_NODES ]] || unset SLURM_NNODES SLURM_JOB_NUM_NODES
          export "${word//-/_}=${1#*=}" ;;
        *) [[ -f $1 ]] && exec bash "$@" ;;
      esac
      shift
    done
    cat > "/work/.eqlen/batch.$$"  # sbatch <<EOF
    exec bash "/work/.eqlen/batch.$$" ;;
esac
while (($#)); do  # a launcher of another shell
  case $1 in
    bash | sh | */bash | */sh) exec bash "${@:2}" ;;
  esac
  shift
done
exit 0
