"""POSIX shared memory: the trainer copies a version into a segment, workers map it and load from
views of it."""
