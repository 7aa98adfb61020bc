"""Names of the hub's repositories, and spellings of other tools."""

import pytest

from jaxrl_llm.hf.hub import hub_spelling


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("https://huggingface.co/org/m", "org/m"),
        ("huggingface.co/org/m/tree/main", "org/m"),
        ("https://hf.co/org/m/tree/v1.0/", "org/m@v1.0"),
        ("https://huggingface.co/org/m/resolve/main/q/x.gguf?download=true", "org/m/q/x.gguf"),
        ("https://huggingface.co/org/m/blob/v2/x.gguf", "org/m@v2/x.gguf"),
        ("org/m:Q4_K_M", "org/m/FILE.gguf, by the file of Q4_K_M"),
        ("org/m", ""),
        ("https://example.org/org/m", ""),
        ("/home/me/m", ""),
        ("m.gguf", ""),
    ],
)
def test_links_to_the_hub_and_tags_of_llama_cpp_are_spelled(name, spelling):
    assert hub_spelling(name) == spelling
