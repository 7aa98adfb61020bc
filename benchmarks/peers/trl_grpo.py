"""TRL's GRPOTrainer on the work of a recipe: spec.json of a run directory, which learn.py writes there.

    python benchmarks/learn.py --suite real --only grpo/trl --trl_python trl/bin/python

in the environment of cpu_peers.py. Writes what our runs write, as far as learn.py reads it: metrics.jsonl,
config.json and the folder hf.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the rewards, which import no jax

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.builtin import number_reward
from jaxrl_llm.rewards.sample import RewardSample

PACKAGES = ("torch", "transformers", "trl", "accelerate")


def main(run_dir: Path) -> None:
    spec = json.loads((run_dir / "spec.json").read_text())
    log = RunLog(run_dir)
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scores = [score(text, right) for text, right in zip(completions, answer, strict=True)]
        log.rewards += scores
        return scores

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=grpo_config(spec, run_dir),
        train_dataset=Dataset.from_list(spec["train"]),
        processing_class=tokenizer,
        callbacks=[Evaluation(spec, tokenizer, log)],
    )
    write_config(spec, run_dir)
    trainer.train()
    trainer.save_model(str(run_dir / "hf"))


def grpo_config(spec: dict[str, Any], run_dir: Path) -> GRPOConfig:
    """Return the recipe's settings under TRL's names; dapo is TRL's name of the mean over all tokens."""
    optim = spec["optim"]
    return GRPOConfig(
        output_dir=str(run_dir / "trl"),
        seed=spec["seed"],
        max_steps=spec["steps"],
        per_device_train_batch_size=spec["micro_batch"],
        gradient_accumulation_steps=spec["sequences"] // spec["micro_batch"],
        num_generations=spec["group"],
        shuffle_dataset=False,
        max_completion_length=spec["max_tokens"],
        temperature=spec["temperature"],
        top_k=0,
        top_p=1.0,
        beta=spec["kl_coef"],
        epsilon=spec["clip"][0],
        epsilon_high=spec["clip"][1],
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=optim["learning_rate"],
        adam_beta1=optim["b1"],
        adam_beta2=optim["b2"],
        adam_epsilon=optim["eps"],
        weight_decay=spec["weight_decay"],
        max_grad_norm=spec["max_grad_norm"],
        lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        use_cache=True,  # of keys and values: transformers 5 turns it off by default, in generation too
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


class RunLog:
    """Rows of metrics.jsonl, a step each."""

    def __init__(self, run_dir: Path):
        self.path, self.rewards, self.started = run_dir / "metrics.jsonl", [], time.perf_counter()
        self.path.write_text("")

    def step(self, step: int, **metrics: float) -> None:
        """Write the row of a step; its time counts from the row before."""
        row = {"step": step, "kind": "train" if step else "start", **metrics}
        if self.rewards:
            row["reward/mean"] = sum(self.rewards) / len(self.rewards)
        row["time/step"] = time.perf_counter() - self.started
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
        self.rewards, self.started = [], time.perf_counter()


class Evaluation(TrainerCallback):
    """Greedy accuracy on the held-out problems before the first step, every few steps and at the end."""

    def __init__(self, spec: dict[str, Any], tokenizer: Any, log: RunLog):
        self.spec, self.tokenizer, self.log = spec, tokenizer, log

    def on_train_begin(self, args, state, control, model=None, **_):
        self.log.step(0, **self.evaluate(model))

    def on_step_end(self, args, state, control, model=None, **_):
        due = state.global_step % self.spec["eval_every"] == 0 or state.global_step == self.spec["steps"]
        self.log.step(state.global_step, **(self.evaluate(model) if due else {}))

    @torch.no_grad()
    def evaluate(self, model: Any) -> dict[str, float]:
        started, rows = time.perf_counter(), self.spec["eval"]
        prompts = [row["prompt"] for row in rows]
        inputs = self.tokenizer(prompts, padding=True, return_tensors="pt").to(model.device)
        model.eval()
        out = model.generate(**inputs, do_sample=False, max_new_tokens=self.spec["max_tokens"])
        model.train()
        texts = self.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right = [score(text, row["answer"]) for text, row in zip(texts, rows, strict=True)]
        return {"eval/pass@1": sum(right) / len(right), "time/evaluate": time.perf_counter() - started}


def score(response: str, answer: str) -> float:
    """Return the recipe's reward: 1 if the last number of the response is the answer."""
    return float(number_reward(RewardSample(response, answer))[1] == Outcome.CORRECT)


def write_config(spec: dict[str, Any], run_dir: Path) -> None:
    """Write config.json with the keys of ours that learn.py reads."""
    config = {
        "eval": {"prompts": len(spec["eval"]), "samples": 1},
        "prompts_per_step": spec["sequences"] // spec["group"],
        "responses_per_prompt": spec["group"],
    }
    versions = {"python": sys.version.split()[0], **{name: version(name) for name in PACKAGES}}
    (run_dir / "config.json").write_text(json.dumps({"versions": versions, "config": config}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[sys.argv.index("--run_dir") + 1]))
