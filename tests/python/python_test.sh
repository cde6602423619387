#!/usr/bin/env bash
# Runs one test of the package in the environment that tests/export/setup made.
set -euo pipefail
home="$(getent passwd "$(id -u)" | cut -d: -f6)"
python="$home/.cache/shardd/python/bin/python"
if [[ ! -x $python ]]; then
  echo "there is no $python; run tests/export/setup" >&2
  exit 1
fi
export PYTHONPATH="$PWD/client/python:$PWD/tests/python" OMP_NUM_THREADS=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=
export SHARDD_DAEMON_BINARY="$PWD/server/shardd" PYTHONDONTWRITEBYTECODE=1
unset RANK WORLD_SIZE SHARDD_ADDRESS
exec "$python" -u "tests/python/$1.py"
