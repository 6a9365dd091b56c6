"""Versions of transformers that no test runs are refused, and the package asks for none."""

import tomllib

import pytest

from duotone.hf.versions import NEWEST, OLDEST, check_transformers

from paths import REPOSITORY


@pytest.mark.parametrize("found", ["5.17.0", "5.20.2", "5.23.0", "5.23.0.dev0"])
def test_known_versions_are_taken(found: str) -> None:
    check_transformers(found)


@pytest.mark.parametrize("found", ["5.16.1", "5.24.0", "6.0.0", "4.57.3", "5.100", "unknown"])
def test_others_are_refused_with_a_remedy(found: str) -> None:
    with pytest.raises(ImportError, match=f"5.17 to 5.23; got {found}. pip install"):
        check_transformers(found)


def test_the_package_asks_for_them() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (needed,) = [x for x in project["dependencies"] if x.startswith("transformers")]
    assert needed == f"transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
