#!/usr/bin/env bash
# Runs bench.gpu on a machine that has torch and a GPU, and perhaps nothing else: first puts the wheels that lie in
# .whl/ (if any) beside the packages that are there. Arguments go to bench.gpu. See docs/benchmarks/gpu.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
shopt -s nullglob
wheels=(.whl/*.whl)
if ((${#wheels[@]})); then
  site=build/gpu-site
  python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "${wheels[@]}"
  export PYTHONPATH="$PWD/$site${PYTHONPATH:+:$PYTHONPATH}"
fi
exec python3 -m bench.gpu "$@"
