"""Multi-turn rollouts against an OpenEnv session, groups and advantages."""
