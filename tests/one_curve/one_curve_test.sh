#!/usr/bin/env bash
# Runs one_curve.py on the binaries that bazel built and the texts of the test.
set -euo pipefail
exec python3 tests/one_curve/one_curve.py --bin=. \
  --data=docs/numerics.md --data=docs/formats/segments.md "$@"
