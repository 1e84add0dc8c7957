"""Rollouts on disk: append-only JSONL whose lines are ATIF trajectories."""
