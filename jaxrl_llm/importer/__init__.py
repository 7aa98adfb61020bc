"""Configs of veRL, OpenRLHF, TRL, RL2 and ChatLearn: files read, never executed, and keys converted."""
