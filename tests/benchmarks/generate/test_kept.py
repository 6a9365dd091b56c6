"""Rows of other schemes stay where one has become another."""

import json
from pathlib import Path

from benchmarks.generate.kept import SCHEMA, copy_kept


def test_rows_of_a_scheme_and_files_of_other_devices_are_left_out(tmp_path: Path) -> None:
    names = ["plain", "duotone@1", "duotone@1, rtn-w8a8", "duotone-mixed@2", "calibrated@1"]
    for device, file in (("GPU", "a.json"), ("another", "b.json")):
        data = {"schema": SCHEMA, "device": device, "rows": [{"row": name} for name in names]}
        (tmp_path / file).write_text(json.dumps(data))
    (tmp_path / "c.json").write_text(json.dumps({"schema": "other/1", "device": "GPU"}))
    (path,) = copy_kept(tmp_path, tmp_path / "new", ["duotone"], "GPU")
    kept = [row["row"] for row in json.loads(path.read_text())["rows"]]
    assert (path.name, kept) == ("a.json", ["plain", "duotone-mixed@2", "calibrated@1"])
