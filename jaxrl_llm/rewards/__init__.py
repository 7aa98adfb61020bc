"""Rewards: built-in functions and the user's, run in worker processes that can be killed.

Nothing here imports jax: a worker starts in a fraction of a second.
"""
