"""Choices of a calibration: each is one change, and samples are asked once per choice of sums."""

from argparse import Namespace
from dataclasses import fields, replace
from functools import partial

from benchmarks.transform import table as script
from duotone.calibrate import Settings
from duotone.loading import Loaded
from duotone.report import tables as report
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model


def test_every_choice_changes_one_setting_or_the_quantizers():
    choices = script.choices_of(script.PRESET_SETTINGS)
    preset = choices.pop("preset")
    for label, settings in choices.items():
        names = [f.name for f in fields(Settings)]
        changed = {n for n in names if getattr(settings, n) != getattr(preset, n)}
        assert len(changed) == 1 or changed == {"key", "value"}, (label, changed)


def test_samples_are_asked_once_for_settings_with_equal_sums(tmp_path, monkeypatch):
    asked, learn = [], script.learn
    monkeypatch.setattr(script, "TASKS", {"tiny": TINY_TASK})
    monkeypatch.setattr(script, "learn", lambda *given: asked.append(given) or learn(*given))
    maker = script.Calibrator(Loaded("tiny", tiny_model(), TinyProcessor()), 1, tmp_path)
    base = Settings()
    specs = [maker.spec(base), maker.spec(replace(base, bits=2.0))]
    assert len(asked) == 1
    specs.append(maker.spec(replace(base, regularization=0.1)))
    assert len(asked) == len(list(tmp_path.iterdir())) == 2
    assert len(set(specs)) == 3


def test_both_tables_are_written_and_rendered(tmp_path, monkeypatch):
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    base = script.PRESET_SETTINGS
    few = {"preset": base, "regularization 1.0": replace(base, regularization=1.0)}
    monkeypatch.setattr(script, "TASKS", {"tiny": TINY_TASK})
    monkeypatch.setattr(script, "choices_of", lambda base: few)
    monkeypatch.setattr(script, "held_out", partial(script.held_out, batch_size=2))
    asked = Namespace(samples=2, calibration=1, batch_size=2, minutes=9.0, workers=0, tasks="tiny")
    asked.impl, asked.window, asked.later_question, asked.out = "reference", 32, True, tmp_path
    for table in (script.widths, script.choices):
        folder = tmp_path / table.__name__
        folder.mkdir()
        table(loaded, asked, folder)
    rendered = report.tables(tmp_path)
    assert "| klt whole 1.0 | 1.00 |" in rendered["transform-widths"]
    assert "| span, KIVI's axes @2 |" in rendered["transform-summary"]
    assert "| regularization 1.0 |" in rendered["transform-choices"]
