"""A config that passes every check."""

import pytest

from jaxrl_llm.config import DataConfig, ModelConfig, SourceConfig, TrainConfig, TransformerConfig


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return TrainConfig(
        run_dir=str(tmp_path / "run"),
        max_prompt_tokens=16,
        max_response_tokens=16,
        model=ModelConfig(architecture=TransformerConfig(max_position=64), tokenizer="tiny"),
        data=DataConfig(train=(SourceConfig(path="task:arithmetic"), SourceConfig(path="b.jsonl"))),
    )
