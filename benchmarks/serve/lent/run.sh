#!/bin/bash
# Runs vLLM 0.33 from the packages of bundles.sh on a machine without a package registry, step by step:
#
#   bash benchmarks/serve/lent/run.sh unpack FOLDER            of each, b1 and b2
#   bash benchmarks/serve/lent/run.sh gpu 1 COMMAND ...        with this GPU alone
#
# Results that COMMAND writes to /tmp/results are in $OUT/results.tgz afterwards.
set -uo pipefail
site=${SITE:-/tmp/site}
mkdir -p "$site/bin" /tmp/results

unpack() {
  python3 - "$site" "$1" <<'PY'
import lzma, pathlib, sys, tarfile

site, folder = map(pathlib.Path, sys.argv[1:])
for file in folder.glob("*.tar.xz"):
    with tarfile.open(file) as packed:
        packed.extractall(site, filter="fully_trusted")
for file in folder.glob("*.so.xz"):
    inner = "vllm/vllm_flash_attn" if "_fa" in file.name else "vllm"
    (site / inner).mkdir(parents=True, exist_ok=True)
    (site / inner / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
PY
  # Spawned processes import this file, so it needs the guard.
  printf '#!/usr/bin/env python3\nfrom vllm.entrypoints.cli.main import main\n\nif __name__ == "__main__":\n    main()\n' \
    > "$site/bin/vllm"
  chmod +x "$site/bin/vllm"
  local version info=$site/duotone.dist-info
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: duotone\nVersion: %s\n' "$version" > "$info/METADATA"
  printf '[vllm.general_plugins]\nduotone = duotone.serve.plugin:register\n' > "$info/entry_points.txt"
}

gpu() {
  export CUDA_VISIBLE_DEVICES=$1
  shift
  export PATH=$site/bin:$PATH PYTHONPATH=$PWD/src:$PWD:$site HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
  export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_PLUGINS=duotone
  "$@"
  local status=$?
  [ -z "${OUT:-}" ] || tar czf "$OUT/results.tgz" -C /tmp results
  return $status
}

"$@"
