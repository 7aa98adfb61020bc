"""Pairs of a model's own responses, a right and a wrong one to a prompt, for DPO, KTO and reward models.

Command:   python examples/sample_pairs.py --config grpo_smollm2.py --prompts 640 \\
               --out runs/smollm2_pairs.jsonl
           python examples/sample_pairs.py --config grpo_smollm2.py --split test \\
               --prompts 512 --out runs/smollm2_pairs_test.jsonl
Time:      minutes on a CPU with 2 cores

Prompts, model, sampling and verifier come from a recipe of online RL. A row has messages, answer, chosen
and rejected; at most `--pairs` rows have the same prompt, and no two the same chosen or rejected response.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jaxrl_llm
from jaxrl_llm.data.sources import open_source
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.recipe.load import find_recipe, load_recipe
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardSample


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="recipe")
    parser.add_argument("--model", help="in place of the recipe's")
    parser.add_argument("--out", type=Path, required=True, help="JSONL to write")
    parser.add_argument("--split", default="train", help="test: problems that training never draws")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of a prompt at most")
    options = parser.parse_args()
    recipe = load_recipe(find_recipe(options.config))
    source = open_source(dataclasses.replace(recipe.data.train[0], split=options.split), recipe.seed)
    examples = [source[i] for i in range(min(options.prompts, len(source)))]
    responses = jaxrl_llm.generate(
        options.model or recipe.model.path,
        [list(example.messages) for example in examples],
        n=options.n,
        max_tokens=recipe.max_response_tokens,
        chat=recipe.data.chat,
        **dataclasses.asdict(recipe.rollout.sampling),
    )
    rows = []
    with RewardPool(recipe.reward) as verifier:
        for example, group in zip(examples, responses, strict=True):
            texts = list(dict.fromkeys(response.text for response in group))
            rows += pair_rows(example, texts, verifier)[: options.pairs]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} pairs of {len(examples)} prompts in {options.out}")


def pair_rows(example, texts: list[str], verifier: RewardPool) -> list[dict]:
    """Return the right responses with a wrong one each, as long as both are left."""
    samples = [
        RewardSample(text, example.answer, messages=example.messages, columns=example.columns)
        for text in texts
    ]
    outcomes = [result.outcome for result in verifier.score(samples)]
    right = [text for text, outcome in zip(texts, outcomes, strict=True) if outcome == Outcome.CORRECT]
    wrong = [text for text, outcome in zip(texts, outcomes, strict=True) if outcome != Outcome.CORRECT]
    return [
        {"messages": list(example.messages), "answer": example.answer, "chosen": chosen, "rejected": rejected}
        for chosen, rejected in zip(right, wrong, strict=False)
    ]


if __name__ == "__main__":
    main()
