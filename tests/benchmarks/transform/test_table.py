"""Widths of a calibration: samples are asked for once per kind of spans; tables are rendered."""

import re
from argparse import Namespace

from benchmarks.transform import table as script
from duotone.loading import Loaded
from duotone.report import tables as report
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model


def test_the_table_asks_samples_twice_and_is_rendered(tmp_path, monkeypatch):
    asked, learn = [], script.learn
    monkeypatch.setattr(script, "TASKS", {"tiny": TINY_TASK})
    monkeypatch.setattr(script, "learn", lambda *given: asked.append(given) or learn(*given))
    given = Namespace(samples=2, calibration=1, batch_size=2, minutes=9.0, workers=0, tasks="tiny")
    given.impl, given.window, given.later_question, given.out = "reference", 32, True, tmp_path
    given.stress = "none"
    script.widths(Loaded("tiny", tiny_model(), TinyProcessor()), given, tmp_path)
    assert len(asked) == len(list(tmp_path.glob("*.safetensors"))) == 2
    rendered = report.tables(tmp_path)
    for name, bits in (("klt 0.4", 0.4), ("klt whole 1.0", 1.0)):
        cells = rf"\| {name} \| (\S+) \| (\S+) \|"
        codes, true = map(float, re.search(cells, rendered["transform-widths"]).groups())
        # At spans of 16 tokens, parameters of 8 bits leave codes more than twice the bits.
        assert bits + 0.5 < codes < true
    assert "| span, KIVI's axes @2 |" in rendered["transform-summary"]
