"""NCCL or Gloo: the trainer sends a version to all workers at once, in buckets."""
