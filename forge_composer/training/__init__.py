"""Training the policy with torchtitan's parts; one `PolicyTrainer` a rank. Knows nothing of Monarch."""
