#!/usr/bin/env bash
# Trains the zoo on a machine that is lent: a process a model, weights back in parts.
#
#   bash training/zoo/on_device.sh train 150 [more arguments]   all, for so many seconds; parts 0 to 3 into $OUT
#   bash training/zoo/on_device.sh more 4                       parts 4 to 7, on the same machine
#   bash training/zoo/on_device.sh measure 8 120                presets and candidates on up to 8 x 32 held-out rows of every
#                                                               model and stress, in about 120 s; results.tgz into $OUT
#   bash training/zoo/on_device.sh talk 2 [more arguments]      benchmarks.quality.conversation on 2 x 32 conversations of every model;
#                                                               talk.tgz into $OUT
#
# Then `cat zoo.tar.* | tar x` makes zoo/MODEL/. MODELS names fewer, or those of unseen.py; with --resume in `more
# arguments` training goes on from the weights that lie on the machine. `measure` also takes weights
# that were carried, in .carry/zoo/MODEL/; files of `measure` go through benchmarks/quality/choose.py.
# SEED: of other rows than candidates were screened on. COMMVQ: training steps of its rows; CALIBRATE: sequences of
# `duotone calibrate`, which is also run without samples; without, these rows are left out.
set -uo pipefail
home=${ZOO:-/tmp/zoo} out=${OUT:?a folder that comes back}
export PYTHONPATH=src:. OMP_NUM_THREADS=2 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
parts() { for i in 0 1 2 3; do cp "$home/parts/zoo.tar.$(printf %02d $(($1 + i)))" "$out/" 2>/dev/null; done; }

if [ "$1" != train ] && [ -d .carry/zoo ]; then mkdir -p "$home/zoo" && cp -rn .carry/zoo/. "$home/zoo/"; fi # weights that were carried
if [ "$1" = measure ]; then
  gpus=$(nvidia-smi -L | wc -l) i=0
  for model in ${MODELS:-deep qwen3-vl gemma3 qwen2-vl llava internvl}; do
    for stress in none "keys x8" "values x16"; do
      gpu=$((i++ % gpus))
      CUDA_VISIBLE_DEVICES=$gpu OMP_NUM_THREADS=1 python3 -m benchmarks.quality.zoo "$model" --zoo "$home/zoo" \
        --stress "$stress" --device cuda --impl reference --candidates ${SEED:+--seed "$SEED"} ${COMMVQ:+--commvq "$COMMVQ"} \
        ${CALIBRATE:+--calibrate "$CALIBRATE" --made-up} \
        --batches "$2" --seconds "$3" --out "$home/results" \
        >"$home/$model-$stress.log" 2>&1 || tail -n 3 "$home/$model-$stress.log" &
    done
  done
  wait
  tar -C "$home" -czf "$out/results.tgz" results
  exit
fi
if [ "$1" = talk ]; then
  batches=$2; shift 2
  gpus=$(nvidia-smi -L | wc -l) i=0
  for model in ${MODELS:-deep qwen3-vl gemma3 qwen2-vl llava internvl}; do
    gpu=$((i++ % gpus))
  CUDA_VISIBLE_DEVICES=$gpu OMP_NUM_THREADS=1 python3 -m benchmarks.quality.conversation "$model" --zoo "$home/zoo" --rows 32 \
      --batches "$batches" --device cuda --impl reference --out "$home/talk" "$@" >"$home/$model-talk.log" 2>&1 || tail -n 3 "$home/$model-talk.log" &
  done
  wait
  tar -C "$home" -czf "$out/talk.tgz" talk
  exit
fi
if [ "$1" = more ]; then parts "$2"; ls -l "$out"; exit; fi
seconds=$2; shift 2
mkdir -p "$home/zoo" "$home/parts"
gpus=$(nvidia-smi -L | wc -l) i=0
for model in ${MODELS:-deep qwen3-vl gemma3 qwen2-vl llava internvl}; do
  gpu=$((i++ % gpus))
  CUDA_VISIBLE_DEVICES=$gpu timeout $((seconds + 90)) python3 -m training.zoo.train "$model" --seconds "$seconds" --out "$home/zoo" \
    --log-every 50 "$@" >"$home/$model.log" 2>&1 &
done
wait
for log in "$home"/*.log; do echo "== $log"; grep -v Writing "$log" | tail -n 4 | cut -c 1-900; done
rm -f "$home"/parts/*
cp "$home"/*.log "$home/zoo/"
tar -C "$home" -cf - zoo | split -b 16600000 -d - "$home/parts/zoo.tar."
parts 0
echo "parts: $(ls "$home/parts" | wc -l); further ones: on_device.sh more 4 (then 8), on this machine"
