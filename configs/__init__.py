"""Recipes: each file is a docstring and `get_config()`."""
