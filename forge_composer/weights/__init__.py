"""How a policy version travels from the trainer to the generators."""
