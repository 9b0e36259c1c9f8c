"""What serving needs besides the core: parts that import torch. Nothing here is imported by the core."""

from contextlib import suppress

from kpolicy.executors.importing import import_torch

# Where torch isn't installed, the module that was asked for says what it needs it for.
with suppress(ModuleNotFoundError):
    import_torch(for_transformers=True)
