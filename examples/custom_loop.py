"""Your loop from the parts: best-of-4 self-imitation on generated sums, in one screen.

Command:   python examples/custom_loop.py
Time:      a minute on a CPU with 2 cores
"""

import contextlib
import dataclasses

import jax

from jaxrl_llm.algos import sft
from jaxrl_llm.builders.models import load_model_config, make_learner
from jaxrl_llm.config import RewardConfig, SamplingConfig, SourceConfig
from jaxrl_llm.configs import grpo_tiny
from jaxrl_llm.data.config import DataConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.packing import PackItem, from_trajectory
from jaxrl_llm.experience.rewards import verify
from jaxrl_llm.experience.rollouts import start_responses
from jaxrl_llm.models import init
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import make_mesh

WARM, STEPS, PROMPTS, TRIES = 500, 40, 64, 4


def main() -> None:
    recipe = grpo_tiny.get_config()
    mesh = make_mesh(recipe.mesh)
    model, tokenizer, _ = load_model_config(recipe.model)
    flawed = SourceConfig(path="task:arithmetic", options='{"digits": 1, "terms": 3, "noise": 0.5}')
    loader = Loader(DataConfig(train=(flawed,)), tokenizer, seed=0, max_prompt_tokens=16)
    optim = dataclasses.replace(recipe.optim, learning_rate=2e-3, schedule="constant")
    learner = make_learner(recipe, sft.Config(), optim, WARM + STEPS, model=model, mesh=mesh)
    engine = NativeEngine(recipe.rollout, model, mesh, tokenizer)
    with contextlib.ExitStack() as closing:
        closing.enter_context(jax.set_mesh(mesh))
        rewards = closing.enter_context(RewardPool(RewardConfig()))
        state = learner.init_state(init(model, jax.random.key(0)))
        for step in range(WARM):  # imitate demonstrations, half of which are one too large
            items = [PackItem(ids, mask) for ids, mask in loader.supervised_batch(step, PROMPTS)]
            state, _ = learner.update(state, [items])
        for step in range(STEPS):  # imitate its own correct answers
            engine.publish(state.params, step)
            prompts = loader.batch(step, PROMPTS)
            tries = start_responses(
                engine, prompts, TRIES, 8, sampling=SamplingConfig(), key=jax.random.key(step)
            ).result()
            verify(rewards, prompts, tries)
            correct = [from_trajectory(t) for t in tries if t.reward == 1.0]
            state, metrics = learner.update(state, [correct])
            share = len(correct) / len(tries)
            print(f"step {step + 1}/{STEPS}  correct {share:.2f}  loss {float(metrics['loss']):.3f}")


if __name__ == "__main__":
    main()
