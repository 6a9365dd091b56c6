"""Options that pages do not bear, and GPUs without kernels: refused at start, without vLLM."""

from types import SimpleNamespace

import pytest
import torch

from duotone.attention.cuda.shared import runtime
from duotone.serve.refusals import check_device, check_dtype, check_kind, check_layer, check_options


def config(**changes: object) -> SimpleNamespace:
    """The parts of a `VllmConfig` that are asked."""
    found = {
        "drafts": None,
        "ubatches": False,
        "hybrid": False,
        "prefixes": True,
        "device": "cpu",
        "dtype": "duotone_2bit",
    } | changes
    return SimpleNamespace(
        speculative_config=found["drafts"],
        parallel_config=SimpleNamespace(use_ubatching=found["ubatches"]),
        model_config=SimpleNamespace(is_hybrid=found["hybrid"]),
        cache_config=SimpleNamespace(
            enable_prefix_caching=found["prefixes"], cache_dtype=found["dtype"]
        ),
        device_config=SimpleNamespace(device_type=found["device"]),
    )


def test_what_is_served_is_not_refused() -> None:
    for given in (config(), config(hybrid=True, prefixes=False), config(dtype="duotone_4bit")):
        check_dtype(given)
        check_options(given)
    check_layer([])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drafts": object()}, "without drafts; got --speculative-config"),
        ({"ubatches": True}, "got microbatches. Leave out --enable-dbo and --ubatch-size"),
        ({"hybrid": True}, "Give --no-enable-prefix-caching"),
    ],
    ids=["drafts", "microbatches", "hybrid"],
)
def test_options_are_refused_with_their_remedy(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_options(config(**changes))


def test_other_dtypes_and_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="duotone_2bit or duotone_4bit; got fp8"):
        check_dtype(config(dtype="fp8"))
    with pytest.raises(ValueError, match=r"got ALiBi slopes, sinks\. Leave such layers in 16 bit"):
        check_layer(["ALiBi slopes", "sinks"])


def test_other_kinds_of_layers_are_refused() -> None:
    """Llama 4's chunks, for one, would be served as full attention."""
    kinds = [type(name, (SimpleNamespace,), {}) for name in ("Attention", "ChunkedLocalAttention")]
    given = {"head_size": 64, "head_size_v": 64, "layer_name": "layers.0.attn"}
    check_kind(kinds[0](**given))
    with pytest.raises(ValueError, match=r"got ChunkedLocalAttention in layers\.0\.attn\. Serve"):
        check_kind(kinds[1](**given))
    with pytest.raises(ValueError, match=r"one head_dim; got 64 and 48 in layers\.0\.attn"):
        check_kind(kinds[0](**given | {"head_size_v": 48}))


def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps would go by plain torch, which waits for the host and cannot be captured."""
    monkeypatch.setattr(runtime, "missing", lambda device: "CUDA kernels need `pip install x`")
    with pytest.raises(ValueError, match=r"need `pip install x`. Install duotone\[vllm\] there"):
        check_options(config(device="cuda"))
    check_device(torch.device("cpu"))
    monkeypatch.setattr(runtime, "missing", lambda device: None)
    check_options(config(device="cuda"))
