"""CUDA IPC: workers pull a version straight out of the trainer's GPU memory."""
