#!/usr/bin/env bash
# Run a training command until it is done:
#
#     launch/restart.sh python -m jaxrl_llm.train --config grpo_qwen.py --run_dir runs/a
#
# By its exit code (docs/recipes.md, "Signals and exit codes"):
#
#     0          done
#     75         stopped with its state saved: started again
#     2          input that cannot work: ends
#     130, 143   ended by a signal of somebody else: ends
#     others     a crash, or a lost process of several: started again after RESTART_DELAY seconds (15), but no more
#                than RESTART_MAX times (5) in succession; a start that ran RESTART_RESET seconds (600) counts anew
#
# SIGTERM and SIGINT are passed on once, and what the command then exits with is the exit code.
set -um # -m: the command has a process group of its own, so that Ctrl-C reaches it only through the traps

if [ $# -eq 0 ]; then
  echo "usage: launch/restart.sh COMMAND [ARGUMENT ...]" >&2
  exit 2
fi
max=${RESTART_MAX:-5} delay=${RESTART_DELAY:-15} reset=${RESTART_RESET:-600}
child='' stopping='' failures=0

# shellcheck disable=SC2317,SC2329 # called by the traps
pass_on() {
  stopping=$1
  if [ -n "$child" ]; then kill -s "$1" "$child" 2>/dev/null; fi
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT

while [ -z "$stopping" ]; do
  started=$SECONDS
  "$@" &
  child=$!
  status=0
  wait "$child" || status=$?
  while kill -0 "$child" 2>/dev/null; do # a trap has ended `wait`
    status=0
    wait "$child" || status=$?
  done
  child=''
  case $status in
    0 | 2 | 130 | 143) exit "$status" ;;
    75) pause=${RESTART_PAUSE:-1} failures=0 ;;
    *)
      if ((SECONDS - started >= reset)); then failures=0; fi
      failures=$((failures + 1)) pause=$delay
      if ((failures > max)); then
        echo "restart.sh: exit code $status, $failures times in succession: giving up" >&2
        exit "$status"
      fi
      ;;
  esac
  if [ -n "$stopping" ]; then exit "$status"; fi
  echo "restart.sh: exit code $status; starting again in $pause s" >&2
  sleep "$pause" &
  wait $! # a signal ends it
done
exit 143
