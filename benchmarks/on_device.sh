#!/bin/sh
# All GPU benchmarks, the most wanted first, on a lent machine that returns few files and nothing that
# is written after its time is over: after every command $OUT/results.tgz holds what there is so far.
#
#   benchmarks/on_device.sh kernels            decode and packing tables
#   benchmarks/on_device.sh budget 8b 3328     one model and length, all budgets, in 8 minutes; 26b: an H200
#   benchmarks/on_device.sh presets quality    tables of the presets' quality, on four GPUs
#   benchmarks/on_device.sh presets speed      and of their speed, on four H200; SMALL=2 tries both on a CPU
#   benchmarks/on_device.sh mquant             linears, decode steps, whole models, tile sizes
#   benchmarks/on_device.sh quality 256 24     recipes on the held-out tasks: samples, calibration, and
#                                              "normed x32,hidden x64" w4a8: outlier channels, rows
#   benchmarks/on_device.sh tests              the GPU tier
#   benchmarks/on_device.sh sanitize racecheck decode kernels under a tool of compute-sanitizer
export PYTHONPATH=src
mkdir -p /tmp/results "$OUT"
keep() {
  tar czf /tmp/results.tgz -C /tmp results
  mv /tmp/results.tgz "$OUT/results.tgz"
}

kernels() {
  python -m duotone bench kernel --table decode --impl cuda --minutes 4 --out /tmp/results/h200.json
  keep
  python -m duotone bench kernel --table pack --out /tmp/results/packing.json
  keep
}

# What results/budget has of it already is not measured again.
budget() {
  cp -r results/budget /tmp/results/ 2> /dev/null
  budget_rows "$1" "$2" --minutes 8
  keep
}

budget_rows() {
  model=$1 tokens=$2
  shift 2
  python -m duotone bench generate --model "internvl2.5-$model" --tokens "$tokens" "$@" \
    --budget 5GB,10GB,15GB,20GB,25GB,30GB --out /tmp/results/budget \
    --row plain --row duotone@1 --row calibrated@1 --row duotone-mixed@4 --row "plain, rtn-w8a8" \
    --row "duotone@1, rtn-w8a8" --row "calibrated@1, rtn-w8a8" --row "duotone-mixed@4, rtn-w8a8"
}

# All that names `duotone` and `duotone-mixed`, for where these have become other specs; four lanes.
# Lanes of speed need a GPU each: on two, LANES="0 1" and then LANES="2 3".
# Captions need pycocoevalcap, which may have been carried along; METEOR follows on a CPU:
# python -m benchmarks.quality.table --rescore FOLDER --out NEW
presets() {
  [ "$1" = quality ] || presets_of_budgets
  gpus=$(nvidia-smi -L 2> /dev/null | grep -c GPU)
  for lane in ${LANES:-0 1 2 3}; do
    CUDA_VISIBLE_DEVICES=$((lane % (gpus > 0 ? gpus : 1))) "presets_$1" $lane > "/tmp/results/presets-$1-$lane.log" 2>&1 &
    lanes="$lanes $!"
  done
  while sleep 20; do keep; done &
  wait $lanes
  kill $!
  keep
  tail -n 3 /tmp/results/presets-"$1"-*.log
}

presets_of_budgets() {
  python -m benchmarks.generate.kept results/budget /tmp/results/budget duotone duotone-mixed $ON
}

ON=${SMALL:+--device cpu}
QUALITY="python -m benchmarks.quality.table"

# Three lanes have a task each, the last one rows among all schemes. Of those files that have other rows:
# python -m benchmarks.quality.joined FOLDER results/quality
presets_quality() {
  export PYTHONPATH=src:.carry
  end="--minutes ${MINUTES:-7} $ON"
  if [ "$1" = 3 ]; then
    for task in captions documents sequences; do
      $QUALITY schemes --tasks $task --n ${SMALL:-200} $end --out /tmp/results/schemes \
        --rows "duotone @4;duotone @2;duotone @1;duotone-mixed @4;duotone-mixed @2;duotone-mixed @1" &
      $QUALITY schemes --tasks $task --n ${SMALL:-400} $end --out /tmp/results/schemes-tuned \
        --rows "duotone-tuned;duotone @1;duotone-whole @1;calibquant @1" &
    done
  else
    task=$(echo captions documents sequences | cut -d " " -f $(($1 + 1)))
    for later in "" --later-question; do
      $QUALITY ingredients --tasks $task $later --n ${SMALL:-500} $end --out /tmp/results/quality \
        --rows "duotone @8;duotone @4;duotone @2;duotone @1" &
    done
    $QUALITY schemes --tasks $task --n ${SMALL:-200} $end --out /tmp/results/schemes-stream \
      --rows "duotone-stream @2, own window;duotone-mixed @2;duotone-mixed @4" &
    python -m benchmarks.transform.table widths --tasks $task --samples ${SMALL:-200} \
      --calibration ${SMALL:-64} --minutes ${MINUTES:-7} --out /tmp/results/transform/widths &
  fi
  wait
}

# Budgets: of the files that are there, rows of the presets alone.
presets_speed() {
  case $1 in
    0)
      presets_generate h200-b1 --row plain --row "plain, cuDNN off" ${SMALL:+--tokens 60 --calls 2}
      [ "$SMALL" ] || kernels
      ;;
    1)
      presets_generate h200-b32 --batch ${SMALL:-32} --tokens 8292 --new-tokens 60 --calls 2 \
        --row plain ${SMALL:+--tokens 60}
      ;;
    2) [ "$SMALL" ] || for model in 26b 8b; do budget_rows $model 3328; done ;;
    3) [ "$SMALL" ] || for model in 26b 8b; do budget_rows $model 8192; done ;;
  esac
}

presets_generate() {
  out=/tmp/results/generate/$1.json
  shift
  rm -f "$out"
  python -m duotone bench generate --out "$out" "$@" --row "StaticCache, compiled" --row duotone@1 \
    --row duotone-mixed@4 --row kivi@2 --row "plain, rtn-w4a8" --row "duotone@1, rtn-w4a8" $ON \
    ${SMALL:+--model tiny}
}

mquant() {
  python -m benchmarks.mquant.speed --out /tmp/results/mquant
  keep
  python -m benchmarks.mquant.model --out /tmp/results/mquant
  keep
  python -m benchmarks.mquant.tune --out /tmp/results/mquant --seconds 200
  keep
}

# pycocoevalcap, which scores captions, may have been carried along. $3, $4: stresses and recipes, as
# --stress and --recipes have them.
quality() {
  for part in 1/8 2/8 3/8 4/8 5/8 6/8 7/8 8/8; do
    PYTHONPATH=src:.carry python -m benchmarks.mquant.quality --part $part --n "$1" \
      --calibration "$2" --stress "${3:-none}" ${4:+--recipes "$4"} --out /tmp/results/quality &
  done
  wait
  keep
}

PYTEST="python -m pytest -q -o addopts=--import-mode=importlib -p no:benchmark"
PYTEST="$PYTEST -p no:cacheprovider -m gpu"

# All files at once: most of their time is compilation.
tests() {
  for file in $(find tests -name 'test_*_gpu.py' | sort); do
    timeout 420 $PYTEST "$file" > "/tmp/results/$(echo "${file#tests/}" | tr / -).log" 2>&1 &
  done
  wait
  tail -n 1 /tmp/results/*test_*_gpu.py.log
  keep
}

# Cases of a file of tests/attention/cuda, $2, under tool $1. Other kernels are left out with `--kernel-regex`,
# which saves minutes; the tool fails over clusters then.
sanitize_cases() {
  tool=$1 file=$2 cases=$3
  shift 3
  timeout 120 compute-sanitizer --tool "$tool" "$@" $PYTEST "tests/attention/cuda/$file.py" \
    -k "$cases" > "/tmp/results/$tool-$(echo "$file-$cases" | tr ' /' '--').log" 2>&1 &
}

sanitize() {
  sanitize_cases "$1" spans/test_decode_gpu teams --kernel-regex kns=decode
  sanitize_cases "$1" spans/test_decode_gpu "kept_or_made and 6-1 and 900"
  for cases in exponentials teams; do
    sanitize_cases "$1" classes/test_decode_gpu $cases --kernel-regex kns=decode
  done
  sanitize_cases "$1" test_paged_gpu teams --kernel-regex kns=decode
  sanitize_cases "$1" groups/test_decode_gpu matches --kernel-regex kns=decode
  sanitize_cases "$1" dense/test_window_gpu token
  sanitize_cases "$1" test_saved_gpu loaded --kernel-regex kns=decode
  sanitize_cases "$1" test_joint_gpu "spans_streams or windows_are_read or classes_and_windows" \
    --kernel-regex kns=decode
  wait
  grep "SUMMARY" /tmp/results/"$1"-*.log
  grep -L "SUMMARY" /tmp/results/"$1"-*.log | sed 's/$/: has not ended/'
  keep
}

"$@"
