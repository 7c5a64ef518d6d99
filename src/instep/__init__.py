"""Keep LLM inference engines in step with a trainer."""
