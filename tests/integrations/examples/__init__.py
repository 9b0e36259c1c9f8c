"""The adapters for small engines."""
