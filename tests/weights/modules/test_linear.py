"""Products by every implementation, exact, at tiny odd sizes in the interpreter."""

from dataclasses import replace

import pytest
import torch

from duotone.tools.slow_paths import SlowPaths, SlowPathWarning
from duotone.weights.kernels.devices import has_kernels
from duotone.weights.modules import linear as door
from duotone.weights.modules.linear import (
    IMPLEMENTATIONS,
    choose,
    linear_float,
    linear_int,
    unsupported,
)

from linear_cases import DEVICE, assert_grouped_close, expected, random_problem, random_weight

needs_kernels = pytest.mark.skipif(not has_kernels(DEVICE), reason="needs triton")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 48])
def test_the_reference_is_exact(bits: int, group: int | None) -> None:
    problem = random_problem(7, 9, 1200, bits, group=group, split=True, bias=True)
    y = linear_int(*problem.arguments, impl="reference", dtype=torch.float32)
    torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)
    problem.weight.scale.mul_(2)
    y2 = linear_int(*problem.arguments, impl="reference", dtype=torch.float32)
    assert not torch.equal(y, y2)


@pytest.mark.parametrize("group", [None, 60])
def test_the_references_are_exact_under_autocast(group: int | None) -> None:
    problem = random_problem(3, 9, 600, 8, group=group)
    x = torch.randn(3, 600, device=DEVICE)
    wanted = linear_float(x, problem.weight, impl="reference")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert (problem.x_q.float() @ problem.weight.codes.float().T).dtype == torch.bfloat16
        y = linear_int(*problem.arguments, impl="reference", dtype=torch.float32)
        assert torch.equal(linear_float(x, problem.weight, impl="reference"), wanted)
    torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)


# (tokens, outs, implementation); of 150 rows the second tile repeats some of the first.
FEW = [(1, 20, "gemv"), (3, 20, "w4a8-fused"), (3, 20, "w8a8-split"), (19, 20, "w8a8")]
ALL = [
    pytest.param(tokens, 136, impl, marks=pytest.mark.slow)
    for tokens in (1, 19, 40)
    for impl in IMPLEMENTATIONS[2:]
]


@needs_kernels
@pytest.mark.parametrize(("tokens", "outs", "impl"), [*FEW, (150, 20, "w8a8"), *ALL])
def test_kernels_are_exact(tokens: int, outs: int, impl: str) -> None:
    for bits in (4, 8):
        for split, bias in ((True, False), (False, True), (bits == 4, True)):
            problem = random_problem(tokens, outs, 1104, bits, split=split, bias=bias)
            if unsupported(impl, tokens, problem.weight, True) is None:
                y = linear_int(*problem.arguments, impl=impl, dtype=torch.float32)
                torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize(("bits", "impl"), [(8, "w8a8"), (4, "w4a8-scratch")])
def test_products_in_pieces_are_exact(
    bits: int, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from duotone.weights.kernels import configs

    monkeypatch.setattr(configs, "_MULTIPROCESSORS", 10)
    problem = random_problem(530, 640, 128, bits, split=True, bias=True)
    # 5 x 5 tiles, twenty at one time: five are left
    assert len(configs.gemm_pieces(530, problem.weight)) == 2
    y = linear_int(*problem.arguments, impl=impl, dtype=torch.float32)
    torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)


GROUPED = [(*few, group) for few in FEW for group in (32, 64, 128)]
GROUPED += [
    pytest.param(tokens, 137, impl, group, marks=pytest.mark.slow)
    for tokens in (1, 19, 40)
    for impl in IMPLEMENTATIONS[2:]
    for group in (32, 64, 128, 256, 1024)
]


@needs_kernels
@pytest.mark.parametrize(("tokens", "outs", "impl", "group"), GROUPED)
def test_kernels_take_groups(tokens: int, outs: int, impl: str, group: int) -> None:
    """Both widths where `impl` takes them; one that adds in the reference's order is exact."""
    for bits in (4, 8):
        ins = 1152 if group <= 128 else 2048
        problem = random_problem(tokens, outs, ins, bits, group=group, split=True, bias=True)
        if unsupported(impl, tokens, problem.weight, True) is None:
            y = linear_int(*problem.arguments, impl=impl, dtype=torch.float32)
            exact = impl in ("w8a8", "w4a8-scratch") and group <= 128
            assert_grouped_close(y, expected(problem), exact)


@needs_kernels
def test_the_last_round_is_cut_where_programs_would_idle() -> None:
    from duotone.weights.kernels.triton.gemm import GemmConfig, Rounds, rounds

    config = GemmConfig(128, 128, 128, parts=4)
    # Qwen2-VL-7B's qkv at 2,048 tokens on an H200: 48 tiles are left behind two rounds of 264.
    assert rounds(576, 3584, 264, config) == Rounds(264, 528, 48, 4, 896)
    assert rounds(448, 3584, 264, config) == Rounds(264, 448)  # 184 are left, none has two
    assert rounds(528, 3584, 264, config) == rounds(528, 3584, 264, replace(config, parts=1))
    assert rounds(5, 300, 4, config) == Rounds(4, 4, 1, 3, 128)


@needs_kernels
def test_too_few_tiles_for_all_programs_are_all_cut() -> None:
    from duotone.weights.kernels.triton.gemm import GemmConfig, Rounds, rounds

    config = GemmConfig(128, 128, 128, parts=8)
    # InternVL2.5-8B's o at 70 tokens on an H200
    assert rounds(32, 4096, 132, config) == Rounds(128, 0, 32, 4, 1024)
    assert rounds(32, 4096, 264, config) == Rounds(256, 0, 32, 8, 512)
    assert rounds(7, 300, 132, config) == Rounds(21, 0, 7, 3, 128)  # no part without columns
    assert rounds(1, 1100, 132, config) == Rounds(5, 0, 1, 5, 256)  # 9 steps: 2, 2, 2, 2, 1
    assert rounds(67, 4096, 132, config) == Rounds(67, 67)  # none has two programs
    assert rounds(7, 128, 132, config) == Rounds(7, 7)  # one step
    assert rounds(7, 4096, 7, config) == Rounds(7, 7)  # a program per tile, as per_sm=0 has it
    assert rounds(7, 4096, 132, replace(config, parts=1)) == Rounds(7, 7)


@needs_kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="rounds are of four programs")
@pytest.mark.parametrize(
    ("per_sm", "tokens", "ins"),
    [(4, 90, 256), (4, 90, 400), (100, 63, 400), (100, 1, 1008)],
    ids=["last-round", "last-round-odd", "all-tiles", "one-token"],
)
def test_parts_of_tiles_add_up_exactly(per_sm: int, tokens: int, ins: int) -> None:
    from duotone.weights.kernels.triton.gemm import GemmConfig, gemm_w8a8

    config = GemmConfig(32, 32, 64, warps=4, per_sm=per_sm, parts=4)
    for _ in range(2):  # counters and sums of the first run do not disturb the second
        problem = random_problem(tokens, 70, ins, 8, split=True, bias=True)
        x, scale, weight, *rest = problem.arguments
        y = gemm_w8a8(x, scale, weight.codes, weight, *rest, torch.float32, config)
        torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)


@needs_kernels
def test_tiles_with_groups_of_scales_stay_whole() -> None:
    from duotone.weights.kernels.triton.gemm import GemmConfig, gemm_w8a8

    # sums of fp32 in parts would depend on who comes last
    config = GemmConfig(32, 32, 64, warps=4, per_sm=100, parts=4)
    problem = random_problem(19, 40, 512, 8, group=64)
    x, scale, weight, *rest = problem.arguments
    y = gemm_w8a8(x, scale, weight.codes, weight, *rest, torch.float32, config)
    assert_grouped_close(y, expected(problem), True)


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_splits_write_only_the_rows_there_are(tokens: int) -> None:
    from duotone.weights.kernels.triton.split import SplitConfig, split_linear

    config = SplitConfig(32, 32, 64, splits=5)
    for _ in range(2):
        problem = random_problem(tokens, 70, 1104, 8, split=True, bias=True)
        y = split_linear(*problem.arguments, torch.float32, config)
        torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)


@needs_kernels
def test_16_bit_activations() -> None:
    weight = random_weight(20, 256, 4, group=64)
    x = torch.randn(3, 256, device=DEVICE).bfloat16()
    wanted = linear_float(x, weight, impl="reference").float()
    y = linear_float(x, weight, impl="split").float()
    assert (y - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run natively")
def test_auto_leaves_the_interpreter_to_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_RUN", {})
    monkeypatch.setattr(door, "_float_split", None)
    problem = random_problem(1, 20, 1104, 4)
    y = linear_int(*problem.arguments, dtype=torch.float32)
    torch.testing.assert_close(y, expected(problem), rtol=0, atol=0)
    weight, x = random_weight(20, 256, 4, group=64), torch.randn(3, 256).bfloat16()
    assert torch.equal(linear_float(x, weight), linear_float(x, weight, impl="reference"))
    if has_kernels(DEVICE):
        with pytest.raises(KeyError):
            linear_int(*problem.arguments, impl="gemv")


def test_clear_refusals() -> None:
    problem = random_problem(2, 9, 64, 4)
    x, scale, weight = problem.arguments[:3]
    with pytest.raises(ValueError, match="int8"):
        linear_int(x.float(), scale, weight)
    with pytest.raises(ValueError, match="row_scale"):
        linear_int(x, scale[:1].expand(5), weight)
    with pytest.raises(ValueError, match="belong together"):
        linear_int(x, scale, weight, x0=torch.zeros(2, device=DEVICE))
    with pytest.raises(ValueError, match="8 bits"):
        linear_int(x, scale, weight, impl="w8a8-split")
    with pytest.raises(ValueError, match="impl must be"):
        linear_int(x, scale, weight, impl="fast")
    for impl in ("w4a8-fused", "w4a8-scratch"):
        assert "4 bits; got 8" in unsupported(impl, 3, random_weight(9, 64, 8), True)


@pytest.mark.parametrize(
    ("impl", "tokens", "bits", "group", "reason"),
    [
        ("gemv", 1, 4, 16, "powers of two from 32 on; got 16"),
        ("w4a8-fused", 3, 4, 48, "powers of two from 32 on; got 48"),
        ("w4a8-scratch", 3, 4, 96, "powers of two from 32 on; got 96"),
        ("w8a8", 3, 8, 96, "powers of two from 32 on; got 96"),
    ],
)
def test_groups_that_a_kernel_cannot_take(
    impl: str, tokens: int, bits: int, group: int, reason: str
) -> None:
    problem = random_problem(tokens, 16, 960, bits, group=group)
    with pytest.raises(ValueError, match=f"{impl}.*{reason}"):
        linear_int(*problem.arguments, impl=impl)


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_the_choice_for_groups(bits: int) -> None:
    weights = {size: random_weight(16, 960, bits, group=size) for size in (32, 64, 48)}
    ways = [
        [choose(tokens, weight, True) for tokens in (1, 17, 1000)] for weight in weights.values()
    ]
    few, many = ("w4a8-fused", "w4a8-scratch") if bits == 4 else ("w8a8-split", "w8a8")
    assert ways == [["gemv", few, many]] * 2 + [["reference"] * 3]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that nothing was said of yet."""
    monkeypatch.setattr(door, "_on_gpu", lambda x: True)
    monkeypatch.setattr(door, "_SLOW", SlowPaths())


@pytest.mark.usefixtures("on_gpu")
def test_a_linear_by_the_reference_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_has_fast", lambda x: False)
    monkeypatch.setattr(door, "has_kernels", lambda device: False)
    problem = random_problem(3, 16, 64, 8)
    with pytest.warns(SlowPathWarning, match="a W8A8 linear runs by PyTorch .* needs triton"):
        linear_int(*problem.arguments)
    linear_int(*problem.arguments)  # a warning is an error
    x, weight = torch.randn(3, 96).bfloat16().to(DEVICE), random_weight(16, 96, 4, group=48)
    with pytest.warns(SlowPathWarning, match="W4A16 .* powers of two from 32 on; got 48"):
        linear_float(x, weight)
    linear_float(x, weight)


@pytest.mark.usefixtures("on_gpu")
@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_many_tokens_by_a_kernel_for_few_say_so_once(bits: int) -> None:
    odd, whole = (random_weight(16, ins, bits) for ins in (72, 64))
    few = choose(513, odd, kernels=True)
    door.say_slow(few, 4, odd)
    door.say_slow(choose(513, whole, kernels=True), 513, whole)
    with pytest.warns(SlowPathWarning, match="kernel for few tokens, .* in sixteens; got 72"):
        door.say_slow(few, 513, odd)
    door.say_slow(few, 700, odd)
