"""Arms x seeds: running them, and what may be said about their differences."""
