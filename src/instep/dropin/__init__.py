"""Drop-ins: other projects' names and signatures over instep's core. Change an import, keep the
code. `docs/dropins.md` lists each difference from the originals.

    vllm_rlhf.py      vLLM's RLHF examples: a group, a worker extension, and the colocated form (colocate.py)
    open_instruct.py  Open Instruct's worker extension and its trainer's half (answers.py, zero.py; ray_group.py is its `use_ray=True`)
    torchrl/          TorchRL's weight-sync schemes, over any RPC

What those share in which tensors come one at a time (communicator.py): they wait in the worker
(rounds.py), and are committed as a whole by all workers of the engine together (peers.py), through
the same receiver as a push.
"""
