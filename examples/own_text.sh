#!/usr/bin/env bash
# From one's own text to a model in use: shards, pre-training, held-out figures, words for masks, vectors, a Hugging Face folder.
#   examples/own_text.sh OUT TEXT…          TEXT: files or folders; everything is written into OUT
#   VOCAB=8000 SEQ_LEN=128                  sizes
#   CONFIG=quickstart                       a preset (mini_modern: half an hour on two cores) or file with model.nsp=false
#   EXTRA="section.key=value …"             further settings of the training
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: examples/own_text.sh OUT TEXT…" >&2 && exit 2; }
out=$1
shift
read -r -a extra <<<"${EXTRA:-}"

python -m data_prep build --input "$@" --output "$out/data" --held-out 0.02 \
  --seq-len "${SEQ_LEN:-128}" --vocab-size "${VOCAB:-8000}"

# The same command again resumes from the newest checkpoint; `deepspeed --num_gpus N` in place of `python` for more ranks.
python megabert/train.py --config "${CONFIG:-quickstart}" --data "$out/data" --run "$out/run" "${extra[@]}"

python -m megabert evaluate --model "$out/run" --data "$out/data"
python -m megabert fill --model "$out/run" "This is the [MASK] of the text."
printf 'One line of text.\nAnd another one.\n' >"$out/lines.txt"
rm -rf "$out/vectors.npy" "$out/hf" # of a command that ended early
python -m megabert features --model "$out/run" --input "$out/lines.txt" --output "$out/vectors.npy"
python -m megabert export --model "$out/run" --output "$out/hf"
echo "Hugging Face's AutoModelForMaskedLM.from_pretrained loads the model from $out/hf"
