"""What actors take and hand over: prompts and results of ours or of Open Instruct's, and queues of them."""
