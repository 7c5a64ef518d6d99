"""Prompts and results, ours or Open Instruct's, and the queues that carry them."""
