#!/usr/bin/env bash
# The whole path on two ranks in a few minutes, also without a GPU: install, train a small Wan 2.2, make videos with it.
#
#   bash launch/quickstart.sh                          as the recipe says
#   bash launch/quickstart.sh train.steps=20           any override of the recipe
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source launch/environment.sh

gpus=$("$WAN_DS_PYTHON" -c 'import torch; print(torch.cuda.device_count())')
ranks=2
[[ "$gpus" == 1 ]] && ranks=1

# Rank 0 writes the run's folder into this file once the run has finished: no file, no success.
WAN_DS_FINISHED=$(mktemp -d)/run
export WAN_DS_FINISHED
trap 'rm -rf "$(dirname "$WAN_DS_FINISHED")"' EXIT

# Not the last command and not `exec`, so a signal that reaches this shell alone is passed on by hand.
"$WAN_DS_PYTHON" launch/local.py "$ranks" recipe=quickstart "$@" &
job=$!
trap 'kill -INT "$job"' INT
trap 'kill -TERM "$job"' TERM
code=0
while :; do
  wait "$job" && code=0 || code=$?
  kill -0 "$job" 2>/dev/null || break # else `wait` was only interrupted by a signal
done
[[ "$code" == 0 ]] || exit "$code"

run=$(<"$WAN_DS_FINISHED")
"$WAN_DS_PYTHON" scripts/sample.py run="$run"
echo "the run is in $run: videos in samples/, numbers in metrics.jsonl, weights in checkpoints/"
