"""Looking at hints: the targeted turns of a run, and where the hint changes what the policy would say."""
