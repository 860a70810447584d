# Sourced by the other scripts: sets WAN_DS_PYTHON to an interpreter that has wan_ds and everything it needs.
#
# If WAN_DS_PYTHON is set already, that environment is used as it is. Else .venv at the top of the repository is,
# which is made and filled at the first call and whenever setup.py or the constraints changed.

wan_ds_environment() {
  local repo venv wanted
  repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

  if [[ -n "${WAN_DS_PYTHON:-}" ]]; then
    if ! "$WAN_DS_PYTHON" -c 'import importlib.util, sys
sys.exit(not all(map(importlib.util.find_spec, ("torch", "deepspeed", "diffusers", "hydra"))))'; then
      echo "environment: WAN_DS_PYTHON=$WAN_DS_PYTHON lacks what wan_ds needs; unset it, or install there:" \
        "\"$WAN_DS_PYTHON\" -m pip install -c launch/constraints.txt -e \".[demo,test]\"" >&2
      return 1
    fi
    WAN_DS_PYTHON=$(command -v "$WAN_DS_PYTHON")
    [[ "$WAN_DS_PYTHON" == /* ]] || WAN_DS_PYTHON="$PWD/$WAN_DS_PYTHON"
    echo "environment: $WAN_DS_PYTHON (WAN_DS_PYTHON)" >&2
  else
    venv="$repo/.venv"
    # The path is part of it, because an environment does not survive that its checkout is moved.
    wanted=$({ echo "$repo"; cat "$repo/setup.py" "$repo/launch/constraints.txt"; } | cksum)
    if [[ "$(cat "$venv/installed" 2>/dev/null)" == "$wanted" ]]; then
      echo "environment: .venv" >&2
    else
      (
        # Two jobs that start together: the second waits, and finds the work done.
        if command -v flock >/dev/null; then flock 9; fi
        [[ "$(cat "$venv/installed" 2>/dev/null)" == "$wanted" ]] || wan_ds_install "$repo" "$venv" "$wanted"
      ) 9>"$repo/.venv.lock" || return 1
    fi
    WAN_DS_PYTHON="$venv/bin/python"
  fi
  export WAN_DS_PYTHON
  # This checkout is what runs, also when the environment has another one or none.
  export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
  # DeepSpeed looks for ninja, and wandb for its own programs, on the path.
  PATH="$(dirname "$WAN_DS_PYTHON"):$PATH"
}

wan_ds_install() {
  local repo=$1 venv=$2 wanted=$3 python=${PYTHON:-python3}
  echo "environment: installing into .venv, which takes some minutes the first time" >&2
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "environment: $python is not Python 3.10 or later; name one: PYTHON=/path/to/python3" >&2
    return 1
  fi
  # The mark is written last, so that an installation that was cut short is taken up again.
  rm -f "$venv/installed"
  if ! "$python" -m venv "$venv" >&2; then
    echo "environment: could not make $venv; on Debian and Ubuntu: apt-get install python3-venv" >&2
    return 1
  fi
  if ! (cd "$repo" && "$venv/bin/python" -m pip install -q -q -c launch/constraints.txt -e ".[demo,test]" >&2); then
    echo "environment: pip failed, see above; run the same command again to go on, or delete .venv to start afresh" >&2
    return 1
  fi
  echo "$wanted" >"$venv/installed"
}

wan_ds_environment || return 1
