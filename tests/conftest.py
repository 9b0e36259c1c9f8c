"""Settings that hold for all tests."""

import hypothesis

# Modules load on first use here, so the first example of a property is slow; no test asserts a time.
hypothesis.settings.register_profile("kpolicy", deadline=None)
hypothesis.settings.load_profile("kpolicy")
