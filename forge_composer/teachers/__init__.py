"""Strong models that are asked what they would have done: clients, agreement, preference pairs."""
