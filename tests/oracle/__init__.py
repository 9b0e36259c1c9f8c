"""Tests that run the real code of a serving engine beside the replica of it."""
