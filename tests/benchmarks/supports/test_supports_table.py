"""The support page lists what the code says of each type."""

import json
import re

import pytest
import transformers

from benchmarks.supports.table import AS_PUBLISHED, FILE, model_types, row
from benchmarks.supports.tables import group, supports_summary, supports_table
from duotone.defaults import CONVERSATIONS, TEXT
from duotone.hf.model.facts import TESTED_FAMILIES

from paths import REPOSITORY

RESULT = json.loads((REPOSITORY / FILE).read_text(encoding="utf-8"))
SAME_VERSION = RESULT["versions"]["transformers"] == transformers.__version__
WORKS = {"cache": None, "graphs": None, "weights": None, "takes_video": True, "tested": ["video"]}
ROWS = [
    {"model_type": "none", "cache": None, "not_made": "a rule; got TypeError: no size. Remedy."},
    {**WORKS, "model_type": "no", "cache": "'no' has a latent. Use its own cache."},
    {**WORKS, "model_type": "new", "graphs": "a window. Or not.", "tested": []},
    {**WORKS, "model_type": "known"},
]
MADE_UP = {"versions": {"transformers": "6"}, "rows": [{**row, "scheme": "mixed"} for row in ROWS]}


def test_the_tested_types_of_the_page_are_those_of_the_suite() -> None:
    """Else: python -m benchmarks.supports.table && duotone report."""
    tested = {r["model_type"]: tuple(r["tested"]) for r in RESULT["rows"] if r.get("tested")}
    assert tested == TESTED_FAMILIES


def test_the_page_names_types_whose_fields_are_ours() -> None:
    page = (REPOSITORY / "docs" / "supports.md").read_text(encoding="utf-8")
    (said,) = (part for part in page.split("\n\n") if "`AS_PUBLISHED`" in part)
    assert set(re.findall(r"`([\w-]+)`", said)) - {"AS_PUBLISHED"} == set(AS_PUBLISHED)


def test_rows_come_in_groups_with_their_words() -> None:
    known, new, no, none = supports_table([MADE_UP]).splitlines()[-4:]
    assert known == "| `known` | works | works | works | works | video |"
    assert new == (
        "| `new` | works untested | refused: a window | works untested | works untested |  |"
    )
    assert no.startswith("| `no` | refused: 'no' has a latent |")
    assert none.startswith("| `none` | not checked: TypeError: no size |")
    assert supports_table([MADE_UP]).startswith("1 works, 1 works untested, 1 refused, 1 not che")
    assert supports_summary([MADE_UP]) == (
        "Tested: 1 model types of transformers 6, 1 with pictures. "
        "Untested, and passing all checks: 1 more."
    )


def test_types_of_another_scheme_are_named() -> None:
    rows = [dict(row) for row in MADE_UP["rows"]]
    rows[2]["scheme"] = "stream"
    rows.append({**WORKS, "model_type": "words", "tested": ["text"], "scheme": "stream"})
    said = supports_table([{**MADE_UP, "rows": rows}]).splitlines()[0]
    assert said.endswith("; `mixed`, `stream` for text and `new`, transformers 6.")
    rows[2]["scheme"] = "mixed"
    said = supports_table([{**MADE_UP, "rows": rows}]).splitlines()[0]
    assert said.endswith("; `mixed`, `stream` for text, transformers 6.")


@pytest.mark.parametrize(
    ("model_type", "scheme"), [("internvl", CONVERSATIONS), ("idefics2", TEXT), ("llama", TEXT)]
)
def test_a_row_is_of_the_recommended_scheme(model_type: str, scheme: str) -> None:
    assert (found := row(model_type))["scheme"] == scheme
    assert found["cache"] is None


def test_a_type_that_no_model_is_made_of_is_refused_by_its_config() -> None:
    assert group(row("florence2")) == "refused"


def test_models_that_do_not_write_token_by_token_are_refused() -> None:
    assert "write token by token" in row("diffusion_gemma")["cache"]


@pytest.mark.slow
@pytest.mark.skipif(not SAME_VERSION, reason="the page is of another transformers")
def test_the_page_says_what_the_checks_say() -> None:
    rows = json.loads(json.dumps([row(name) for name in model_types()]))
    assert rows == RESULT["rows"]
