"""Measured costs of one device and model, from the graphs that were captured: `calibrate`."""

from kpolicy.executors.calibrate.bench import Measurable
from kpolicy.executors.calibrate.table import Calibration, calibrate, can_measure, measure

__all__ = ["Calibration", "Measurable", "calibrate", "can_measure", "measure"]
