#!/usr/bin/env bash
# Runs from_pretrained.py in the environment that tests/export/setup made.
set -euo pipefail
home="$(getent passwd "$(id -u)" | cut -d: -f6)"
python="$home/.cache/shardd/python/bin/python"
if [[ ! -x $python ]]; then
  echo "there is no $python; run tests/export/setup" >&2
  exit 1
fi
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS=1
exec "$python" tests/export/from_pretrained.py --bin=. --data=docs/numerics.md \
  --data=docs/formats/segments.md
