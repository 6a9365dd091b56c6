#!/bin/bash
# Makes two folders of packages, FOLDER/b1 (24 MB) and FOLDER/b2 (24 MB), from which vLLM 0.33 runs on a
# machine with Python 3.12, torch 2.11, Hopper GPUs and no package registry; run.sh uses them there.
#
#   PIP="python3.12 -m pip" bash benchmarks/serve/lent/bundles.sh FOLDER
#
# Needs pip of Python 3.12 and xz; 1.5 GB of disk, four minutes on two cores.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) pip=${PIP:-python3.12 -m pip}
get="$pip install --quiet --no-deps --only-binary=:all:"
mkdir -p "$1" && cd "$1"
rm -rf site so extra b1 b2 && mkdir -p site so b1 b2

# Its extensions are of torch's stable ABI from 2.11 on, so they load there although it asks for 2.14.
$pip download --quiet --no-deps --only-binary=:all: -d cuda vllm==0.33.0
wheel=$(echo cuda/vllm-0.33.0-*.whl)
unzip -q -o "$wheel" 'vllm/*' 'vllm-0.33.0.dist-info/*' -d site -x '*.so' 'vllm/vllm-rs' \
  'vllm/third_party/fmha_sm100/*' 'vllm/third_party/deep_gemm/*' 'vllm/third_party/triton_kernels/*' \
  'vllm/vllm_flash_attn/cute/*'
unzip -q -o -j "$wheel" 'vllm/_C_stable_libtorch.abi3.so' 'vllm/_moe_C_stable_libtorch.abi3.so' \
  'vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so' 'vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so' -d so
for name in _C_stable_libtorch _moe_C_stable_libtorch; do
  python3 "$here/prune_fatbin.py" "so/$name.abi3.so" "so/$name.pruned" 90
  xz -6 -c "so/$name.pruned" > "b2/$name.abi3.so.xz"
done
xz -6 -c so/_vllm_fa3_C.abi3.so > b2/_vllm_fa3_C.abi3.so.xz
# TurboQuant's first and last layers want FlashAttention 2, which Hopper compiles from PTX: that of
# bfloat16 and 128 channels alone.
python3 "$here/prune_fatbin.py" so/_vllm_fa2_C.abi3.so so/fa2.pruned 80 \
  'traitsILi128E(Li\d+E){3}(Lb[01]E){2}N7cutlass10bfloat16_t' --ptx
xz -6 -c so/fa2.pruned > b1/_vllm_fa2_C.abi3.so.xz

# Found by importing and serving there, one missing module after another.
$get --target extra cbor2 pyzmq oss-harmony==0.0.11 openai==3.54.0 httpx2==2.16.2 sniffio msgspec \
  pybase64 cachetools xgrammar==0.2.8 apache-tvm-ffi==0.1.11 'fastapi<0.137' starlette \
  partial-json-parser 'llguidance<1.8' compressed-tensors==0.17.0 loguru pydantic==2.14.3 \
  pydantic_core==2.50.4 typing_inspection annotated_types prometheus-fastapi-instrumentator watchfiles \
  python-json-logger setproctitle blake3 diskcache uvicorn orjson lark==1.2.2 ijson \
  model-hosting-container-standards jmespath depyf==0.20.0 astor dill jsonschema \
  jsonschema-specifications referencing rpds-py py-cpuinfo jaxtyping wadler-lindig beartype supervisor
tar -C site --exclude=__pycache__ --exclude='*/configs/*.json' --exclude='*/static/*' \
  -cJf b1/vllm.tar.xz vllm vllm-0.33.0.dist-info
tar -C extra --exclude=__pycache__ --exclude=bin -cJf b1/extra.tar.xz .
du -sb b1 b2
