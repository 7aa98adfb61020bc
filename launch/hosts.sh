#!/usr/bin/env bash
# Run one command on several hosts by ssh, as the processes of one run:
#
#     launch/hosts.sh "gpu0 gpu1" python -m jaxrl_llm.train --config grpo_qwen.py --run_dir /shared/runs/a
#
# Each host needs ssh without a password, the same folder (this one), and --run_dir on storage that all see. The first
# host must be reached by the others on COORDINATOR_PORT (8476). SETUP is run first on each host: "source .venv/bin/activate".
#
# SIGTERM, Ctrl-C, and the loss of this script or of the connection end the command on every host by SIGTERM: training
# saves and exits with code 75. The exit code is the first that is not 0, of the hosts in their order, one of a lost
# process (1) or bad input (2) before 75.
#
#     launch/restart.sh launch/hosts.sh "gpu0 gpu1" python -m jaxrl_llm.train ...     # starts again what has stopped
set -u

if [ $# -lt 2 ]; then
  echo 'usage: launch/hosts.sh "HOST0 HOST1 ..." COMMAND [ARGUMENT ...]' >&2
  exit 2
fi
read -r -a hosts <<<"$1"
if [ ${#hosts[@]} -eq 0 ]; then
  echo "hosts.sh: no host is named; give them in one word: \"gpu0 gpu1\"" >&2
  exit 2
fi
shift
address=${hosts[0]#*@}:${COORDINATOR_PORT:-8476}

# On the host: standard input is open until the command has to stop.
# shellcheck disable=SC2016
remote='
cd "$1" || exit 2
eval "$2"
shift 2
exec 3<&0
"$@" </dev/null 3<&- &
child=$!
{ cat <&3 >/dev/null; kill -s TERM "$child"; } 2>/dev/null &
watcher=$!
exec 3<&-
wait "$child"
status=$?
pkill -s TERM -P "$watcher" 2>/dev/null; kill -s TERM "$watcher" 2>/dev/null
exit $status'

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/open"
exec 9<>"$folder/open" # the one writer: when it is closed, or this script ends, every host reads the end
trap 'exec 9>&-' TERM INT

processes=()
for i in "${!hosts[@]}"; do
  variables=("JAX_COORDINATOR_ADDRESS=$address" "JAX_NUM_PROCESSES=${#hosts[@]}" "JAX_PROCESS_ID=$i")
  words=$(printf ' %q' "$remote" hosts.sh "$PWD" "${SETUP:-}" env "${variables[@]}" "$@")
  ssh -o BatchMode=yes -o ServerAliveInterval=10 "${hosts[i]}" "exec bash -c$words" \
    <"$folder/open" 9>&- > >(sed -u "s/^/$i ${hosts[i]}: /" 9>&-) 2>&1 &
  processes+=($!)
done

result=0
for i in "${!processes[@]}"; do
  status=0
  wait "${processes[i]}" || status=$?
  while kill -0 "${processes[i]}" 2>/dev/null; do # a trap has ended `wait`
    status=0
    wait "${processes[i]}" || status=$?
  done
  if ((status != 0)); then echo "hosts.sh: ${hosts[i]} ended with exit code $status" >&2; fi
  if ((result == 0 || result == 75)) && ((status != 0)); then result=$status; fi
done
exit "$result"
