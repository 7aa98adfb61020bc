"""The user's files are imported as they stand."""

import os

from jaxrl_llm.user_file import import_user_file


def test_a_file_that_is_rewritten_within_a_second_is_read_anew(tmp_path):
    """Sweeps write such recipes; Python's bytecode cache compares sizes and whole seconds."""
    file = tmp_path / "recipe.py"
    for value in (1, 2):
        file.write_text(f"value = {value}\n")
        os.utime(file, (10**9, 10**9))
        assert import_user_file(file, "config").value == value
