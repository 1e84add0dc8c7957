"""Sampling from the policy: vLLM behind a small asyncio engine."""
