#!/bin/bash
# Rows of `duotone bench serve` on random weights of an 8B shape, each on a GPU of its own, after
# `run.sh unpack` of both folders. A start with torch.compile takes 150 s.
#
#   bash benchmarks/serve/lent/servers.sh full 0 duotone_2bit & ... full 1 bf16 & wait
#   bash benchmarks/serve/lent/servers.sh rates 0 duotone_2bit
#
# Files of one load can be joined: their rows lie in a list.
set -uo pipefail
kind=$1 gpu=$2 row=$3
here=$(dirname "$0") model=/tmp/llama-8b
[ -d $model ] || PYTHONPATH=src:. python3 -m benchmarks.serve.model llama-8b $model || true
case $kind in
  full) load="--output-tokens 2048 --rates inf --waves 3" pieces="--stream-interval 8" ;;
  rates) load="--output-tokens 512 --rates 1,4 --prompts 64" pieces= ;;
esac
bash "$here/run.sh" gpu "$gpu" python3 -m duotone bench serve $model --cache 30GB --row "$row" \
  --input-tokens 4096 $load --server-options "--load-format dummy $pieces" \
  --out "/tmp/results/$kind/$row.json" >"/tmp/$kind-$row.log" 2>&1
tail -n 3 "/tmp/$kind-$row.log" | cut -c 1-600
