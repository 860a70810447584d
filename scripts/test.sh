#!/usr/bin/env bash
# All tests, or those that need a GPU; what follows goes to pytest.
#
#   bash scripts/test.sh                        all
#   bash scripts/test.sh gpu                    only those marked gpu; nothing to do where there is no GPU
#   bash scripts/test.sh tests/flow -k shift    some
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source launch/environment.sh
export OMP_NUM_THREADS=1

if [[ "${1:-}" != gpu ]]; then
  # Two workers: a test mostly waits for processes that it started. Files stay whole, so that a world serves many cases.
  exec "$WAN_DS_PYTHON" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
fi

if ! "$WAN_DS_PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no GPU here: no test to run"
  exit 0
fi
code=0
"$WAN_DS_PYTHON" -m pytest -q -m gpu "${@:2}" || code=$?
if [[ "$code" == 5 ]]; then
  echo "no test needs a GPU"
  exit 0
fi
exit "$code"
