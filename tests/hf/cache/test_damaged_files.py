"""Damaged caches, bases and checkpoints: the same result, or one ValueError that names the file.

Never another result, a NaN, another library's error, or memory for what a file only claims. Where
checksums are waived numbers may be others, even absurd ones, and everything else still holds.
"""

import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import damage
import pytest
import torch
from adapted import stand_in
from saved_caches import SPECS, next_logits, saved
from test_bases import some_bases
from torch import Tensor

from duotone import QuantizedCache
from duotone.hf.weights import checkpoint as checkpoints
from duotone.inference.batch import encode
from duotone.quant.bases import Bases
from tiny_vlm import tiny_example

from families import tiny_model
from mquant_setups import quantized

# Nothing in these files is larger.
MEMORY = 1 << 30
# A cache of a model with LoRA adapters.
ADAPTED = "adapted"


@dataclass(frozen=True)
class Case:
    """A file, what was in it, and what it leads to. use: of waived checks."""

    path: Path
    whole: bytes
    kinds: tuple[Callable[[bytes, Random], bytes], ...]
    use: Callable[[tuple[str, ...]], Tensor]
    expected: Tensor
    # What errors name: the file or its folder.
    name: str


def outcome(case: Case, damaged: bytes, waive: tuple[str, ...]) -> str:
    """Outcome of a damaged file: "same", "refused", or what must not be."""
    case.path.write_bytes(damaged)
    try:
        found = case.use(waive)
    except ValueError as error:
        return "refused" if case.name in str(error) else f"unnamed: {error}"
    except Exception as error:
        return f"foreign: {type(error).__name__}: {error}"
    finally:
        case.path.write_bytes(case.whole)
    if not torch.isfinite(found).all():
        return "not finite"
    return "same" if torch.equal(found, case.expected) else "different"


def outcomes(
    cases: list[Case], count: int, seed: int, waive: tuple[str, ...] = ()
) -> tuple[Counter, list[str]]:
    """(how often each one came, what must not be) of `count` damages, all kinds by turns."""
    rng, found, wrong = Random(seed), Counter(), []
    allowed = {"same", "refused"} | ({"different", "not finite"} if waive else set())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(count):
        case = cases[i % len(cases)]
        kind = case.kinds[i // len(cases) % len(case.kinds)]
        told = outcome(case, kind(case.whole, rng), waive)
        found[told.split(":")[0]] += 1
        if told not in allowed:
            wrong.append(f"{kind.__name__} of {case.path.name}, number {i}: {told}")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown * 1024 > MEMORY:
        wrong.append(f"memory grew by {grown} kB")
    return found, wrong


def cache_cases(folder: Path, names: list[str]) -> list[Case]:
    def case(name: str) -> Case:
        path = folder / f"{name}.safetensors"
        if name == ADAPTED:
            model, expected = saved(path, SPECS["mixed"], stand_in("internvl"))
        else:
            model, expected = saved(path, SPECS[name])

        def use(waive: tuple[str, ...]) -> Tensor:
            return next_logits(model, QuantizedCache.load(path, model, waive=waive))

        return Case(path, path.read_bytes(), damage.TENSORS, use, expected, str(path))

    return [case(name) for name in names]


def basis_cases(folder: Path) -> list[Case]:
    path = Path(some_bases(tiny_model("internvl"), folder))

    def use(waive: tuple[str, ...]) -> Tensor:
        read = Bases.load(path, waive)
        inverses = torch.linalg.inv(torch.cat([read.key, read.value]))
        whose = torch.tensor(list(str(read.header.get("fingerprint")).encode()))
        return torch.cat([read.key.flatten(), inverses.flatten(), whose])

    return [Case(path, path.read_bytes(), damage.TENSORS, use, use(()), str(path))]


def checkpoint_cases(folder: Path) -> list[Case]:
    loaded, _ = quantized("mquant-w4a8")
    folder = checkpoints.save(loaded.model, folder / "checkpoint")
    inputs = encode(loaded.processor, [tiny_example("heldout", 1).messages()])

    def use(waive: tuple[str, ...]) -> Tensor:
        with torch.no_grad():
            return checkpoints.load(folder, waive=waive)(**inputs).logits

    names = {checkpoints.TENSORS: damage.TENSORS}
    names |= dict.fromkeys((checkpoints.HEADER, *checkpoints.CONFIGS), damage.TEXTS)
    expected = use(())
    return [
        Case(folder / n, (folder / n).read_bytes(), kinds, use, expected, str(folder))
        for n, kinds in names.items()
    ]


def every_case(folder: Path, names: list[str]) -> list[Case]:
    """Caches twice as often as a file of bases, and as the four files of a checkpoint."""
    return [*cache_cases(folder, names), *basis_cases(folder), *checkpoint_cases(folder)]


@pytest.mark.parametrize("waive", [(), ("checksum",)], ids=["checked", "waived"])
def test_a_sample_of_damaged_files_is_refused_or_the_same(waive, tmp_path: Path) -> None:
    found, wrong = outcomes(every_case(tmp_path, [ADAPTED, "hybrid"]), 84, 0, waive)
    assert not wrong
    assert found["refused"] > 40


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("waive", [(), ("checksum",)], ids=["checked", "waived"])
def test_a_thousand_damaged_files_are_refused_or_the_same(waive, tmp_path: Path) -> None:
    cases = every_case(tmp_path, [*SPECS, ADAPTED])
    found, wrong = outcomes(cases, 1000, 1, waive)
    print(dict(found))
    assert not wrong
    assert found.total() == 1000
    assert found["refused"] > 500


def test_every_kind_of_damage_changes_a_file(tmp_path: Path) -> None:
    for case in every_case(tmp_path, [ADAPTED]):
        for kind in case.kinds:
            tries = [kind(case.whole, Random(seed)) for seed in range(8)]
            assert sum(tried != case.whole for tried in tries) > 6, (kind, case.path)


def test_what_must_not_be_is_told(tmp_path: Path) -> None:
    def raising(error: Exception) -> Callable:
        def use(waive: tuple[str, ...]) -> Tensor:
            raise error

        return use

    one, path = torch.ones(1), tmp_path / "file"
    for use, told in (
        (lambda waive: one, "same"),
        (lambda waive: one + 1, "different"),
        (lambda waive: one / 0, "not finite"),
        (raising(ValueError(f"{path}: no")), "refused"),
        (raising(ValueError("no")), "unnamed: no"),
        (raising(KeyError("no")), "foreign: KeyError: 'no'"),
    ):
        case = Case(path, b"whole", (damage.truncate,), use, one, str(path))
        assert outcome(case, b"who", ()) == told
        assert path.read_bytes() == b"whole"
        wrong = outcomes([case], 2, 0)[1]
        assert bool(wrong) == (told not in ("same", "refused"))
