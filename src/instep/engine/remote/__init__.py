"""Engines of other processes: the calls (`rpc.py`), and the ways that they go: TCP, pipes, Ray,
HTTP."""
