"""Kernels are launched by the names that their sources give them, wherever a file lies."""

import re
from pathlib import Path

import pytest

import duotone.attention.cuda as room
from duotone.attention.cuda.shared.runtime import entry
from duotone.tools.nvrtc import ENTRY

ROOM = Path(room.__file__).parent
SOURCES = sorted(str(path.relative_to(ROOM)) for path in ROOM.rglob("*.cu"))
ENTRIES = {source: ENTRY.findall((ROOM / source).read_text()) for source in SOURCES}


@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_of_a_source_is_found(source: str) -> None:
    declared = (ROOM / source).read_text().count('extern "C" __global__')
    assert len(ENTRIES[source]) == declared > 0


def test_a_source_of_several_kernels_has_no_name() -> None:
    with pytest.raises(ValueError, match=r"must have one kernel .* got \['level_moments'"):
        entry("levels/sums.cu")


def test_names_that_launchers_write_are_in_a_source() -> None:
    text = "".join(path.read_text() for path in ROOM.rglob("*.py"))
    written = set(re.findall(r'"((?:span|class|group|level)_\w+)"', text))
    kernels = {name for names in ENTRIES.values() for name in names}
    launched = {name for name in written if name in kernels}
    assert launched >= {"span_pack", "span_pack_once", "class_pack", "group_pack", "level_search"}
    assert not {name for name in written if name.endswith(("pack", "bounds"))} - kernels
