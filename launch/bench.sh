#!/usr/bin/env bash
# Run benchmarks on this machine, each with its results in benchmarks/results/<benchmark>_<hardware>_<date>.json.
#   make bench                    all that take minutes
#   make bench ONLY="data step"   some of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TF_CPP_MIN_LOG_LEVEL=3
label=$(python -c 'from benchmarks.common import hardware; print(hardware.label())')
suffix=${label}_$(date -u +%Y-%m-%d).json
read -r -a only <<<"${ONLY:-data prep ops step}"

for benchmark in "${only[@]}"; do
  script=benchmarks/bench_$benchmark.py
  versus=()
  [ "$benchmark" != step ] || versus=(--vs hf)
  echo "== $script ${versus[*]}"
  python "$script" --json "benchmarks/results/${benchmark}_$suffix" "${versus[@]}"
done
