"""Versions of transformers that no test runs are refused, and the package asks for none."""

import tomllib
from importlib.metadata import version

import pytest

from duotone.hf import model_facts
from duotone.hf.versions import BROKEN, NEWEST, OLDEST, check_release, check_transformers

from families import HYBRIDS, inputs, random_model
from paths import REPOSITORY


@pytest.mark.parametrize("found", ["5.17.0", "5.20.2", "5.23.0", "5.24.0", "5.24.0.dev0"])
def test_known_versions_are_taken(found: str) -> None:
    check_transformers(found)


@pytest.mark.parametrize("found", ["5.16.1", "5.25.0", "6.0.0", "4.57.3", "5.100", "unknown"])
def test_others_are_refused_with_a_remedy(found: str) -> None:
    with pytest.raises(ImportError, match=f"5.17 to 5.24; got {found}. pip install"):
        check_transformers(found)


def test_the_package_asks_for_them() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (needed,) = [x for x in project["dependencies"] if x.startswith("transformers")]
    assert needed == f"transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


def test_a_type_that_one_release_cannot_run_is_refused_there_alone() -> None:
    check_release("llama4", "5.23.0")
    check_release("llava", "5.24.0")
    with pytest.raises(ValueError, match=r"5\.24\.0 cannot run 'llama4' with any cache"):
        check_release("llama4", "5.24.0")


@pytest.mark.parametrize("name", sorted(BROKEN.get(version("transformers"), ())))
def test_a_broken_type_does_not_run_with_its_own_cache(name: str) -> None:
    """Else its entry goes."""
    model = random_model(HYBRIDS[name])
    with pytest.raises(AttributeError, match="image_outputs"):
        model.generate(**inputs(name, [[3, "image", 4]]), max_new_tokens=2)
    with pytest.raises(ValueError, match=f"cannot run '{name}' with any cache"):
        model_facts(model)
