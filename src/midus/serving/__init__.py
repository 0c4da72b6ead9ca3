"""Grown models behind an OpenAI-compatible server: vLLM's plugin, and what `midus serve` starts."""
