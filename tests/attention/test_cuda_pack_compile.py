"""The packing kernels compile for sm_90 without a GPU, and say what they cannot do."""

import pytest
import torch

from duotone.attention.cuda import group_pack, runtime
from duotone.quant import KVSpec, TensorSpec

from pack_cases import BF16, FP16, FP32, GroupCase, inner, kivi

GROUPS = [
    GroupCase(kivi(2), 128),
    GroupCase(inner(2, "hybrid"), 128, norm=FP16),
    GroupCase(KVSpec(TensorSpec(1, "tokens", 128), TensorSpec(4, "channels")), 64, dtype=FP16),
    GroupCase(KVSpec(TensorSpec(4, "tokens", 32), inner(1, "symmetric").value), 80, dtype=FP32),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOTONE_CACHE", str(tmp_path))


@pytest.mark.parametrize("align", [16, 4], ids=["aligned", "words"])
@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_group_pack_compiles(case, align) -> None:
    pytest.importorskip("cuda.core", reason="compiling CUDA sources needs cuda-core and NVRTC")
    norm = 0 if case.norm is None else 1 + group_pack.INPUTS[case.norm]
    macros = group_pack.macros_of(case.form, case.specs, case.dtype)
    macros |= {"ALIGN": align, "NORM": norm}
    assert runtime.compiled(group_pack.SOURCE, "sm_90", macros)[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec(2, "tokens", 32, levels="lloyd"), "Lloyd levels"),
        (TensorSpec(2, "tokens", 32, gain="fit"), "gain"),
        (TensorSpec(2, "tokens", 32, energy=1.0), "energies"),
        (TensorSpec(2, "tokens", 32, eta=0.1), "eta"),
        (TensorSpec(2, "tokens", 32, classes=((4, 1 / 4),)), "classes"),
        (TensorSpec(2, "tokens", 32, transform="hadamard"), "transform"),
        (TensorSpec(8, "tokens", 32), "1, 2, 4 bits"),
        (TensorSpec(2, "tokens", 32, param_dtype="bfloat16"), "float16"),
        (TensorSpec(2, "tokens"), "by 32, 64 or 128"),
        (TensorSpec(2, "tokens", 256), "by 32, 64 or 128"),
        (TensorSpec(2, "span", 32), "float16 scales"),
    ],
    ids=str,
)
def test_what_groups_cannot_be_is_named(spec, reason) -> None:
    assert reason in group_pack.pack_reason(KVSpec(spec, kivi(2).value))
    assert "value is" in group_pack.pack_reason(KVSpec(kivi(2).key, spec))
    assert group_pack.pack_reason(kivi(2)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": torch.zeros(2, 1, 64, 64)}, "consecutive channels"),
        ({"key": torch.zeros(2, 1, 128, 64, dtype=BF16)[:, :, ::2].mT.contiguous().mT}, "consecut"),
        ({"index": torch.zeros(2, 40, dtype=torch.long)}, "multiple of 32"),
        ({"index": torch.zeros(1, 64, dtype=torch.long)}, "multiple of 32"),
        ({"records": 7}, "contiguous records of"),
        ({"specs": kivi(2, levels="lloyd")}, "Lloyd"),
    ],
    ids=["types", "strides", "tokens", "batch", "records", "specs"],
)
def test_arguments_that_do_not_fit_are_refused(change, message) -> None:
    case = GroupCase(kivi(2), 64)
    form = case.form
    nbytes = form.nbytes - change.pop("records", 0)
    given = {
        "key": torch.zeros(2, 1, 64, 64, dtype=BF16),
        "value": torch.zeros(2, 1, 64, 64, dtype=BF16),
        "index": torch.zeros(2, 64, dtype=torch.long),
        "tiles": torch.zeros(2, dtype=torch.long),
        "where": torch.zeros(2, dtype=torch.long),
        "form": form,
        "specs": case.specs,
        "data": torch.zeros(2, 1, 3, nbytes, dtype=torch.uint8),
    } | change
    with pytest.raises(ValueError, match=message):
        group_pack.group_pack(**given)


def test_rows_that_are_moved_lose_their_alignment() -> None:
    x = torch.zeros(1, 2, 3, 72, dtype=BF16)
    assert group_pack.alignment(x[..., :64]) == 16
    assert group_pack.alignment(x[..., 2:66]) == 4
    assert group_pack.alignment(x[..., 1:65]) == 2
    assert group_pack.alignment(x[..., :65]) == 2
