"""Generated pictures with questions: training, calibration and evaluation without downloads."""
