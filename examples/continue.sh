#!/usr/bin/env bash
# A model of general text continues on one's own text: what it learns there, and what it forgets. docs/continue.md explains the settings.
#   examples/continue.sh OUT GENERAL OWN    GENERAL, OWN: a file or folder of text each; everything is written into OUT
#   VOCAB=8000 SEQ_LEN=128                  sizes
#   CONFIG=quickstart                       a preset or file with model.nsp=false
#   PHASES='[{share = 0.3, data.masking.strategy = "causal"}, {share = 0.7}]'      a detour through causal LM
#   BASE="section.key=value …"              further settings of the general model's training
#   EXTRA="section.key=value …"             of the training that continues
set -euo pipefail
[ $# -eq 3 ] || { echo "usage: examples/continue.sh OUT GENERAL OWN" >&2 && exit 2; }
out=$1
config=${CONFIG:-quickstart}
read -r -a base <<<"${BASE:-}"
read -r -a extra <<<"${EXTRA:-}"

# One vocabulary: a mixture needs it, and the general model keeps its own.
build=(python -m data_prep build --held-out 0.05 --seq-len "${SEQ_LEN:-128}")
"${build[@]}" --input "$2" --output "$out/general" --vocab-size "${VOCAB:-8000}"
"${build[@]}" --input "$3" --output "$out/own" --tokenizer "$out/general/tokenizer.model"

python megabert/train.py --config "$config" --data "$out/general" --run "$out/base" "${base[@]}"
echo "before:"
python -m megabert evaluate --model "$out/base" --data "$out/own" "$out/general"

# A quarter of the rows is general text; the rate is warmed up again; and the run ends when the loss on the held-out own text has not
# improved in three evaluations.
python megabert/train.py --config "$config" --data "$out/own" --run "$out/continued" init_from="$out/base" \
  data.mix="{\"$out/general\" = 0.25}" \
  schedule.name=linear schedule.total_steps=300 schedule.warmup_steps=30 schedule.final_ratio=0.1 optimizer.lr=3e-3 \
  phases="${PHASES:-[]}" eval.interval=25 eval.patience=3 checkpoint.keep=3 "${extra[@]}"

# What was learned and what was forgotten. `best` is the checkpoint with the lowest loss on the own text.
echo "after:"
python -m megabert evaluate --model "$out/continued/best" --data "$out/own" "$out/general"

# The mean of the checkpoints that the run has kept.
rm -rf "$out/mean" # of a command that ended early
python -m megabert average --run "$out/continued" --output "$out/mean"
python -m megabert evaluate --model "$out/mean" --data "$out/own" "$out/general"
