"""The command import-config on a text: its recipe loaded, checked, and flattened to keys."""

from typing import NamedTuple

import pytest

from jaxrl_import.import_config import ImportArguments, import_recipe
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.recipe.checks import check_config
from jaxrl_llm.recipe.keys import iter_fields
from jaxrl_llm.recipe.load import from_command_line, load_recipe

ABSENT = ("no such folder", "no such file", "there is no file", "is empty: set a f")


class Imported(NamedTuple):
    """A recipe that import-config writes."""

    config: TrainConfig
    text: str
    report: str
    lost: dict[str, str]
    unused: dict[str, str]

    def values(self, *keys):
        """Return the values of these keys; a key that is not there is an error."""
        known = {key: field.value for key, field in iter_fields(self.config)}
        return tuple(known[key] for key in keys)


@pytest.fixture
def imported(tmp_path, capsys):
    """Write a text as a file, import it, and check that the recipe is one that `train` takes."""

    def run(text, name="run.sh", **options) -> Imported:
        file, out = tmp_path / name, tmp_path / "recipe.py"
        file.write_text(text)
        recipe = import_recipe(ImportArguments(file=file, out=out, **options))
        for path, text in {out: recipe.source, **recipe.files}.items():
            path.write_text(text)
        config = load_recipe(out)
        try:
            check_config(config, writes=False)
        except ConfigError as error:  # of paths that are not on this machine alone
            lines = [line for line in str(error).splitlines() if "several problems" not in line]
            assert all(any(word in line for word in ABSENT) for line in lines), error
        with pytest.raises(SystemExit) as end:
            from_command_line(["--config", str(out), "--help"])
        assert end.value.code == 0 and "usage" in capsys.readouterr().out
        return Imported(config, recipe.source, recipe.report, recipe.lost, unused=recipe.unused)

    return run


@pytest.fixture
def refusal_of(tmp_path):
    """Return the message of the UserError that a text is refused with."""

    def run(text, name="run.sh", **options) -> str:
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(ValueError) as error:
            import_recipe(ImportArguments(file=file, **options))
        return str(error.value).replace(str(tmp_path), "")

    return run
