"""Generated tasks: endless, verifiable, learnable by a tiny character-level model in minutes."""
