"""Trainers of other projects that push with instep after a line or two, with no change of their
code.

`trl`: trainers of TRL that generate with vLLM. Each sync is a push, with the trainer's digests.

`verl`, `openrlhf`, `skyrl`: worker extensions for vLLM. The project's own sender stays, and what
arrives is staged and committed as a whole.
"""

EXTENSIONS = {
    "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap": "instep.integrations.openrlhf.WorkerWrap",
    "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap": (
        "instep.integrations.skyrl.WorkerExtension"
    ),
    "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension": "instep.integrations.verl.WorkerExtension",
}
"""Worker extensions that projects name to vLLM, and what takes their place under
`INSTEP_ATTACH=1`."""
