"""The message of a refusal."""

from collections.abc import Callable

import pytest

from jaxrl_llm.errors import ConfigError


def refusal(action: Callable, *args, **kwargs) -> str:
    """Return what the ConfigError of action(...) says."""
    with pytest.raises(ConfigError) as caught:
        action(*args, **kwargs)
    return str(caught.value)
