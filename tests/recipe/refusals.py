"""The message of a refusal."""

from collections.abc import Callable

import pytest

from jaxrl_llm.errors import UserError


def refusal(action: Callable, *args, **kwargs) -> str:
    """Return what the UserError of action(...) says."""
    with pytest.raises(UserError) as caught:
        action(*args, **kwargs)
    return str(caught.value)
