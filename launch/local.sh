#!/usr/bin/env bash
# One job on this machine, through DeepSpeed's launcher.
#
#   bash launch/local.sh 2 recipe=quickstart                   two ranks
#   bash launch/local.sh recipe=quickstart run_name=mine       a rank per visible GPU, or one on the CPU
#   bash launch/local.sh 2 scripts/other.py key=value          another script than scripts/train.py
#
# CUDA_VISIBLE_DEVICES is respected, the port is a free one, and a SIGINT or SIGTERM reaches every rank. The exit code is
# 0 only if the run finished, 130 or 143 after a signal. WAN_DS_GRACE_SECONDS (25) is how long ranks may take to save
# after a signal before they are killed.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

source "$here/environment.sh"
exec "$WAN_DS_PYTHON" "$here/local.py" "$@"
