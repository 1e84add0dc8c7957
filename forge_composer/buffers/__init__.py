"""Bounded queues between rollout workers and trainer: pure asyncio, no Monarch."""
