"""Reward models and critics in Hugging Face's terms: sequence classifiers with one label."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError

LANGUAGE, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def has_value_head(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of a sequence (or token) classifier with one label.

    Raises:
        ValueError: it has several labels: a score is one number.
    """
    named = (raw.get("architectures") or [""])[0]
    if not named.endswith((CLASSIFIER, "ForTokenClassification")):
        return False
    labels = raw.get("num_labels", len(raw.get("id2label") or {0: "", 1: ""}))
    if labels != 1:
        raise UserError(f"config.json: {named} with {labels} labels; a reward model or critic has 1")
    return True


def as_classifier(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a language model, as that of a classifier of the same family with one label."""
    named = raw["architectures"][0].replace(LANGUAGE, CLASSIFIER)
    labels = {"id2label": {"0": "SCORE"}, "label2id": {"SCORE": 0}, "num_labels": 1}
    return {**raw, "architectures": [named], **labels}
