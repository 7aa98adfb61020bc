"""Configs of other systems: read, converted to recipes; jaxrl_llm finds the parts here by entry points."""

COMMANDS = {
    "import-config": (
        "jaxrl_import.import_config",
        "Write a recipe from a config of veRL, OpenRLHF, TRL, RL2 or ChatLearn.",
    ),
}
"""Commands of `python -m jaxrl_llm`, as in `jaxrl_llm.__main__`."""
