"""Targeted textual feedback: which turns went wrong, what to say about them, and what the teacher reads."""
