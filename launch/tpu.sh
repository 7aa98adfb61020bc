#!/usr/bin/env bash
# Cloud TPU VMs, one host or a pod, by queued resources:
#
#     export TPU=my-tpu ZONE=us-west4-a TYPE=v5litepod-16 VERSION=v2-alpha-tpuv5-lite SPOT=1
#     launch/tpu.sh create                                     # waits until the TPU is there
#     launch/tpu.sh setup "pip install 'jaxrl-llm[tpu]'"       # any shell command, on every host
#     launch/tpu.sh run python -m jaxrl_llm.train --config grpo_qwen.py --run_dir /mnt/shared/runs/a
#     launch/tpu.sh stop                                       # SIGTERM: saves, exit code 75
#     launch/tpu.sh delete
#
# `forever SETUP COMMAND ...` does all of it: it creates the TPU, runs the setup and the command, and begins anew where the
# TPU was preempted (spot TPUs cannot be started again) or the command ended with another code than 0 and 2. It gives up
# where the command ends within 600 seconds (RESTART_RESET) more than 5 times (RESTART_MAX) in succession on a TPU that is
# still there.
#
# gcloud runs the command on all hosts, where jax finds the others by itself. --run_dir must be on storage that all see.
set -u

usage() {
  echo "usage: launch/tpu.sh create | setup COMMAND | run COMMAND ... | stop | state | delete | forever SETUP COMMAND ..." >&2
  exit 2
}
case ${1:-} in
  create | stop | delete | state) ;;
  setup) [ $# -eq 2 ] || usage ;; # one shell command
  run) [ $# -ge 2 ] || usage ;;
  forever) [ $# -ge 3 ] || usage ;;
  *) usage ;;
esac

gcloud=(gcloud compute tpus)
: "${TPU:?set TPU to the name of the TPU}" "${ZONE:?set ZONE to its zone}"
pid_file=${PID_FILE:-/tmp/jaxrl_llm.pid} # on each host

on_hosts() { "${gcloud[@]}" tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"; }

state() {
  "${gcloud[@]}" queued-resources describe "$TPU" --zone="$ZONE" --format='value(state.state)' 2>/dev/null
}

create() {
  : "${TYPE:?set TYPE, such as v5litepod-16}" "${VERSION:?set VERSION, such as v2-alpha-tpuv5-lite}"
  local now
  now=$(state)
  case $now in
    '' | FAILED | SUSPENDING | SUSPENDED)
      if [ -n "$now" ]; then delete || return; fi
      "${gcloud[@]}" queued-resources create "$TPU" --node-id="$TPU" --zone="$ZONE" --accelerator-type="$TYPE" \
        --runtime-version="$VERSION" ${SPOT:+--spot} || return
      ;;
  esac
  until [ "$(state)" = ACTIVE ]; do
    case $(state) in
      FAILED | SUSPENDED)
        echo "tpu.sh: the request for $TPU is $(state)" >&2
        return 1
        ;;
    esac
    sleep "${POLL:-30}"
  done
}

run() {
  local words
  words=$(printf ' %q' "$@")
  on_hosts "echo \$\$ >$pid_file; exec$words"
}

stop() { on_hosts "kill -s TERM \$(cat $pid_file)"; }

delete() { "${gcloud[@]}" queued-resources delete "$TPU" --zone="$ZONE" --force --quiet; }

forever() {
  local setup=$1 status started failures=0
  shift
  while :; do
    status=1 started=$SECONDS
    if create && on_hosts "$setup"; then
      status=0
      run "$@" || status=$?
    fi
    case $status in 0 | 2) return "$status" ;; esac
    if [ "$(state)" = ACTIVE ] && ((SECONDS - started < ${RESTART_RESET:-600})); then
      failures=$((failures + 1))
      if ((failures > ${RESTART_MAX:-5})); then return "$status"; fi
    else
      failures=0
    fi
    echo "tpu.sh: exit code $status, the TPU is $(state); beginning anew" >&2
    sleep "${POLL:-30}"
  done
}

case $1 in
  setup) on_hosts "$2" ;;
  *) "$@" ;;
esac
