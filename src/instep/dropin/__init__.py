"""Drop-ins: other projects' names and signatures, thin over the core. `docs/dropins.md` lists each difference from the originals.

    vllm_rlhf.py      vLLM's RLHF examples: a group, a worker extension, and the colocated form (colocate.py)
    open_instruct.py  Open Instruct's `WorkerWrap` and `broadcast_weights_to_vllm`; ray_group.py is its `use_ray=True`

What they share: tensors come one at a time (communicator.py), wait in the worker (rounds.py), and are committed as a whole by all
workers of the engine together (peers.py), through the same receiver as a push.
"""
