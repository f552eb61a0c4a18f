#!/usr/bin/env bash
# The benchmarks of this machine, one after the other, each into benchmarks/results/<what>_<hardware>_<date>.json.
#   make bench                    every benchmark that takes minutes
#   make bench ONLY="data step"   some of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TF_CPP_MIN_LOG_LEVEL=3
label=$(python -c 'from benchmarks.common import hardware; print(hardware.label())')
suffix=${label}_$(date -u +%Y-%m-%d).json
read -r -a only <<<"${ONLY:-data prep ops step}"

for what in "${only[@]}"; do
  script=benchmarks/bench_$what.py
  if [ ! -f "$script" ]; then
    echo "no $script: passed over"
    continue
  fi
  versus=()
  [ "$what" != step ] || versus=(--vs hf)
  echo "== $script ${versus[*]}"
  python "$script" --json "benchmarks/results/${what}_$suffix" "${versus[@]}"
done
