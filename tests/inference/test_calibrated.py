import duotone
from duotone.inference.calibrated import calibration_data


def test_the_data_of_shipped_bases_are_named():
    words = "64 samples of captions, 64 of documents, 64 of sequences (calibration split)"
    assert calibration_data(duotone.scheme("duotone-klt")) == words


def test_a_spec_without_bases_has_none():
    assert calibration_data(duotone.scheme("duotone")) == ""
