from pathlib import Path

import pytest

from tiers import ONE_OF


@pytest.mark.parametrize("rule", ONE_OF)
def test_rules_that_are_thinned_are_there(rule: str) -> None:
    file, name = rule.split("::")
    found = (Path(__file__).parent / file).with_suffix(".py")
    assert f"\ndef {name}(" in found.read_text()
