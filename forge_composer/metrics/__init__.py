"""What a run reports: numbers made from rollouts, where they go, how they are shown."""
