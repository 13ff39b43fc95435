#!/usr/bin/env bash
# Runs vlmrb with the container's arguments, in this very process, so that signals and exit codes pass unchanged.
set -euo pipefail

runs="${VLMRB_RUNS_DIR:-/app/runs}"

# Better said now, in one line, than after an hour at the first checkpoint. Help and doctor write nothing.
case "${1:-}" in
  "" | -* | doctor) ;;
  *)
    if ! probe="$(mktemp --tmpdir="$runs" .writable.XXXXXX 2> /dev/null)"; then
      echo "vlmrb: user $(id -u):$(id -g) cannot write to $runs: mount a folder that this user owns, or run the" \
        "container as its owner (docker run --user UID:GID)" >&2
      exit 73 # EX_CANTCREAT
    fi
    rm -f "$probe"
    ;;
esac

# With --user the id may have no home; matplotlib, Triton and torch.compile keep caches there.
if [[ ! -w "${HOME:-/nonexistent}" ]]; then
  HOME="$(mktemp --directory)"
  export HOME
fi

exec vlmrb "$@"
