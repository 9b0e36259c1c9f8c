"""Request traces and continuous batching: what turns arrivals into batches. No device library."""
