#!/usr/bin/env bash
# From text to a trained and evaluated BERT on one machine: build shards, train launch/quickstart.toml on two ZeRO ranks, stop
# half way and resume, evaluate, fill in three sentences before and after training, draw the loss curve. `make quickstart` runs it
# in the environment.
#   CORPUS="path …"  text instead of the built-in corpus     OUT=dir   output folder (runs/quickstart)
#   STEPS=n          updates (600)                           RANKS=n   ranks (2; 1 on a machine with one GPU)
#   SEQ_LEN, VOCAB   row length and tokenizer size           EXTRA="section.key=value …"  further overrides
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-runs/quickstart}
STEPS=${STEPS:-600}
half=$((STEPS / 2))
read -r -a corpus <<<"${CORPUS:-pydoc}"
read -r -a extra <<<"${EXTRA:-}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TF_CPP_MIN_LOG_LEVEL=3

section() { printf '\n== %s\n' "$*"; }

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
RANKS=${RANKS:-$((gpus == 1 ? 1 : 2))}
settings=("schedule.total_steps=$STEPS" "schedule.warmup_steps=$((STEPS / 20))" zero.stage=2)
if [ "$gpus" = 0 ]; then
  cores=$(nproc)
  export DS_ACCELERATOR=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > RANKS ? cores / RANKS : 1))}
fi

train() {
  local port
  port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  deepspeed --quiet --num_gpus "$RANKS" --master_port "$port" megabert/train.py \
    --config launch/quickstart.toml --data "$OUT/data" --run "$OUT/run" "${settings[@]}" "${extra[@]}" "$@"
}

started=$SECONDS
for folder in "$OUT/data" "$OUT/run"; do
  if [ -e "$folder" ] && [ ! -e "$OUT/.quickstart" ] && [ "$OUT" != runs/quickstart ]; then
    echo "error: $folder exists and was not made by quickstart, which would replace it; set OUT to another folder" >&2
    exit 2
  fi
done
rm -rf "$OUT/data" "$OUT/run"
mkdir -p "$OUT"
touch "$OUT/.quickstart"

quiet=()
[ -t 2 ] || quiet=(--quiet) # no progress bar in a log

section "1/4 shards from ${CORPUS:-the English documentation installed on this machine}"
python -m data_prep build --input "${corpus[@]}" --output "$OUT/data" \
  --seq-len "${SEQ_LEN:-128}" --vocab-size "${VOCAB:-8000}" --held-out 0.02 "${quiet[@]}"

section "2/4 BERT-Tiny on $RANKS ranks, ZeRO stage 2, stopped at step $half of $STEPS"
train --stop-after "$half"
python -m megabert evaluate --model "$OUT/run" --data "$OUT/data" >"$OUT/half.json"

section "3/4 the same command again: resumed to step $STEPS"
train

section "4/4 held-out text, the same masked positions each time ($((SECONDS - started)) s so far)"
python - "$OUT" <<'PYTHON'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
lines = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
start, *_, end = (line for line in lines if "eval/mlm_loss" in line)
rows = [start, json.loads((out / "half.json").read_text()), end]
keys = ["eval/mlm_loss", "eval/mlm_accuracy", "eval/perplexity"]
print(f"{'':30}" + "".join(f"{k.removeprefix('eval/'):>16}" for k in keys))
for name, row in zip(("untrained", "stopped", "resumed and finished"), rows, strict=True):
    print(f"{name + ', step ' + str(row['step']):30}" + "".join(f"{row[k]:16.4f}" for k in keys))
if rows[-1]["eval/mlm_loss"] >= start["eval/mlm_loss"]:
    sys.exit("error: the held-out loss did not fall")
PYTHON
echo
python examples/what_it_learned.py "$OUT/run" "$OUT/data"

section "the run on one page"
python -m megabert report "$OUT/run"

echo
echo "everything is in $OUT; to view it:"
printf '  %q --logdir %q\n' "$(command -v tensorboard)" "$OUT/run/tensorboard"
