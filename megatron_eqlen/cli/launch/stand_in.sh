#!/bin/bash
# Stands for every program that a launch script may start: writes down its arguments, and ends well.
name=${EQLEN_NAME:-${0##*/}}; unset EQLEN_NAME
case $name in
  python*) [[ $1 == -c && -x /usr/bin/python3 ]] && exec /usr/bin/python3 "$@" ;;  # a value of the script
esac
printf '%s\0' "$name" "$@" > "$(mktemp "/work/.eqlen/record/$EPOCHREALTIME.XXXXXX")"
case $name in
  scontrol) [[ $* != "show hostnames"* ]] || echo localhost ;;
  ssh) exec bash -c "${*: -1}" ;;
  tmux)
    [[ $1 != has* ]] || exit 1
    for word; do [[ $word != *" "* ]] || bash -c "$word"; done ;;
  sbatch) for word; do [[ -f $word ]] && exec bash "$word" "${@:2}"; done ;;
esac
while (($#)); do  # a launcher of another shell
  case $1 in
    bash | sh | */bash | */sh) exec bash "${@:2}" ;;
    --wrap) exec bash -c "$2" ;;
    --wrap=*) exec bash -c "${1#*=}" ;;
  esac
  shift
done
exit 0
