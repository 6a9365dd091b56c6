"""Choices of a calibration: each is one change, and samples are asked once per choice of sums."""

from dataclasses import fields, replace

from benchmarks.transform import table as script
from duotone.calibrate import Settings
from duotone.loading import Loaded
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
