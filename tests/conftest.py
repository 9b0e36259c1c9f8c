"""Settings that hold for all tests."""

import os

import hypothesis

# Workers of pytest-xdist share the cores: with more threads than cores, torch's wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Modules load on first use here, so the first example of a property is slow; no test asserts a time.
hypothesis.settings.register_profile("kpolicy", deadline=None)
hypothesis.settings.load_profile("kpolicy")
