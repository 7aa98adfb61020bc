"""`--key value`: what a command line may say, each refusal word for word, and flags of other systems."""

import dataclasses
import re
from dataclasses import replace

import pytest
from refusals import refusal

from jaxrl_import.algorithm_names import ALGORITHMS, NO_ALGORITHM
from jaxrl_import.hints import GROUPS, INSIDE, MISSING, SAME, translate
from jaxrl_import.systems import fields_by_name
from jaxrl_llm import algos
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.config import (
    MeshConfig,
    TrainConfig,
)
from jaxrl_llm.ranges import problems
from jaxrl_llm.recipe.keys import has_type, iter_fields, type_words
from jaxrl_llm.recipe.load import with_algo
from jaxrl_llm.recipe.overrides import apply_overrides, resolve_key, split_arguments
from jaxrl_llm.recipe.values import parse_value
from jaxrl_llm.rewards.config import RewardModelConfig


def words(config: TrainConfig, argv: list[str]) -> TrainConfig:
    return apply_overrides(config, split_arguments(argv))[0]


def changed(config: TrainConfig, line: str) -> TrainConfig:
    return words(config, line.split())


def notes(config: TrainConfig, line: str) -> list[str]:
    return apply_overrides(config, split_arguments(line.split()))[1]


def test_a_value_reaches_its_field_in_both_spellings_and_the_last_one_wins(config):
    after = changed(config, "--steps 7 --steps=9 --optim.learning_rate 3e-4 --mesh.fsdp -1 --run_dir /x=y")
    assert (after.steps, after.optim.learning_rate, after.mesh.fsdp, after.run_dir) == (9, 3e-4, -1, "/x=y")
    assert after.optim.b1 == config.optim.b1
    assert after.model is config.model


def test_every_kind_of_field_is_set_from_text(config):
    line = "--data.shuffle false --algo.dual_clip 3 --algo.kl k1 --data.train.1.weight 2 --model.remat full"
    after = changed(config, line)
    assert (after.data.shuffle, after.algo.dual_clip, after.algo.kl) == (False, 3.0, "k1")
    assert [source.weight for source in after.data.train] == [1.0, 2.0]
    assert after.data.train[0] is config.data.train[0]
    assert changed(after, "--algo.dual_clip None").algo.dual_clip is None
    stops = words(config, ["--eval.sampling.stop", "a b", "c", "--eval.sampling.stop_tokens", "-1", "5"])
    assert (stops.eval.sampling.stop, stops.eval.sampling.stop_tokens) == (("a b", "c"), (-1, 5))
    assert words(config, ["--eval.sampling.stop"]).eval.sampling.stop == ()
    assert words(config, ["--data.train.0.options=--x 1"]).data.train[0].options == "--x 1"
    spaced = words(config, ["--servers.flags", "--tp 2 --device cpu", "--steps", "3"])
    assert (spaced.servers.flags, spaced.steps) == ("--tp 2 --device cpu", 3)
    assert changed(config, "--model.architecture.rope.theta 5").model.architecture.rope.theta == 5.0


def test_a_level_may_be_left_out_where_it_is_clear_and_hyphens_are_underscores(config):
    after = changed(config, "--rollout.temperature 0.7 --eval.top_p 0.5 --prompts-per-step 3")
    assert after.rollout.sampling.temperature == 0.7
    assert (after.eval.sampling.top_p, after.prompts_per_step) == (0.5, 3)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("stpes", "steps"),
        ("lr", "optim.learning_rate"),
        ("learning_rate", "optim.learning_rate"),
        ("temperature", "rollout.sampling.temperature"),
        ("rollout.temprature", "rollout.sampling.temperature"),
        ("optim.temperature", "rollout.sampling.temperature"),
        ("responses_per_prompts", "responses_per_prompt"),
        ("algo.clip", "algo.clip_low"),
        ("reward.nam", "reward.name"),
        ("dat.path", "data.path"),
        ("data.prompt", "data.train.0.prompt_key"),
        ("rollout.stop_strings", "rollout.sampling.stop"),
        ("eval.sampling.stop_strings", "eval.sampling.stop"),
        ("data.train.1.wieght", "data.train.1.weight"),
        ("model.archtecture.hidden_size", "model.architecture.hidden_size"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(config, typed, nearest):
    message = refusal(apply_overrides, config, [(typed, ["1"])])
    assert message == f"--{typed}: unknown key. Did you mean --{nearest}? --help all lists the keys."


@pytest.mark.parametrize("typed", ["xyzzy", "dropout"])
def test_no_key_is_suggested_that_is_unlike(config, typed):
    message = refusal(apply_overrides, config, [(typed, ["1"])])
    assert message == f"--{typed}: unknown key. --help all lists the keys."


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("reward.models.1.path", "reward.models is empty in this recipe: begin with --reward.models.0.path."),
        ("reward.models.2.pth", "reward.models is empty in this recipe: begin with --reward.models.0.path."),
        ("reward.models.path", "reward.models is empty in this recipe: begin with --reward.models.0.path."),
        (
            "data.train.3.path",
            "data.train has 2 in this recipe: the next one begins with --data.train.2.path.",
        ),
        (
            "data.train.9.pth",
            "data.train has 2 in this recipe: the next one begins with --data.train.2.path.",
        ),
    ],
)
def test_a_later_entry_of_a_list_keeps_its_field(config, typed, answer):
    assert refusal(apply_overrides, config, [(typed, ["x"])]) == f"--{typed}: unknown key. {answer}"


def test_keys_that_are_no_fields(config):
    assert refusal(changed, config, "--mesh 4") == (
        "--mesh: unknown key. mesh is a group; set its fields: "
        "--mesh.data, --mesh.expert, --mesh.fsdp, --mesh.sequence, --mesh.sequence_parallel, "
        "--mesh.slices, --mesh.stage, --mesh.tensor. --help mesh shows them."
    )
    assert refusal(changed, config, "--data.eval.1.path x") == (
        "--data.eval.1.path: unknown key. data.eval is empty in this recipe: begin with --data.eval.0.path."
    )
    assert refusal(changed, config, "--data.eval x") == (
        "--data.eval is a group of fields, such as --data.eval.0.path."
    )
    assert refusal(changed, config, "--critic.mesh x") == (
        "--critic.mesh is a group of fields, such as --critic.mesh.data."
    )
    assert refusal(split_arguments, ["steps", "4"]) == (
        "'steps' has no key before it. Write --key value, such as --steps 100."
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--steps 1.5", "--steps: expected a whole number, got '1.5'."),
        ("--steps ten", "--steps: expected a whole number, got 'ten'."),
        ("--steps 1 2", "--steps: expected a whole number, got '1 2'."),
        ("--steps", "--steps: expected a whole number, got nothing."),
        ("--optim.learning_rate fast", "--optim.learning_rate: expected a number, got 'fast'."),
        ("--data.shuffle maybe", "--data.shuffle: expected True or False, got 'maybe'."),
        ("--algo.kl k4", "--algo.kl: expected one of k1, k2, k3, abs, k1+, k3+, got 'k4'."),
        ("--algo.dual_clip x", "--algo.dual_clip: expected a number or None, got 'x'."),
        (
            "--eval.sampling.stop_tokens 1 x",
            "--eval.sampling.stop_tokens: expected any number of values, each a whole number, got '1 x'.",
        ),
    ],
)
def test_a_value_of_the_wrong_type_names_key_value_and_type(config, line, message):
    assert refusal(changed, config, line) == message


def test_a_key_makes_the_config_that_it_passes_through(config):
    words = "--data.eval.0.path a --data.eval.1.path b --data.eval.1.weight 2 --critic.mesh.tensor 2"
    new = changed(config, words)
    assert [(source.path, source.weight) for source in new.data.eval] == [("a", 1.0), ("b", 2.0)]
    assert new.critic.mesh == MeshConfig(tensor=2)
    assert refusal(changed, config, "--reward.models.0.pth x") == (
        "--reward.models.0.pth: unknown key. Did you mean --reward.models.0.path? --help all lists the keys."
    )


@dataclasses.dataclass(frozen=True)
class Picky(AlgoConfig):
    sharpness: float = 2.0

    def __post_init__(self):
        if self.sharpness > 3:
            raise ValueError("too sharp.")


def test_a_value_that_the_users_config_refuses(config):
    picky = replace(config, algo=Picky())
    assert refusal(changed, picky, "--algo.sharpness 4") == "--algo.sharpness: too sharp."


def test_iter_fields_lists_every_field_once(config):
    keys = [key for key, _ in iter_fields(config)]
    assert len(keys) == len(set(keys))
    assert {"run_dir", "steps", "seed", "mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.sequence"} <= set(keys)
    assert {"checkpoint.every", "model.path", "data.train.1.path", "model.architecture.rope.theta"} <= set(
        keys
    )


def test_a_key_given_twice_is_noted(config):
    assert notes(config, "--steps 3 --seed 1 --steps 4") == [
        "--steps is given more than once; the last counts: 4"
    ]
    assert notes(config, "--steps 3 --seed 1") == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--steps=", "--steps: expected a whole number, got ''."),
        (
            "--servers.flags --tp 2",
            "--servers.flags: expected text, got nothing. Text that begins with --: "
            "--servers.flags='--TEXT'.",
        ),
        ("--no-shuffle", "--no-shuffle: unknown key. Write --data.shuffle False."),
        ("--data.no_shuffle", "--data.no_shuffle: unknown key. Write --data.shuffle False."),
        ("--no-data.shuffle", "--no-data.shuffle: unknown key. Write --data.shuffle False."),
        (
            "trainer.total_epochs=15",
            "'trainer.total_epochs=15' has no key before it. Write --trainer.total_epochs 15.",
        ),
        (
            "--seed 5 optim.learning_rate=1e-5",
            "'optim.learning_rate=1e-5': a setting is written --KEY VALUE. Write --optim.learning_rate 1e-5.",
        ),
        ("--run_dir a ++steps=3", "'++steps=3': a setting is written --KEY VALUE. Write --steps 3."),
        (
            "--rollout.stop a steps=3",
            "'steps=3': a setting is written --KEY VALUE. Write --steps 3.",
        ),
        (
            "--run_dir a trainer.total_epochs=5",
            "'trainer.total_epochs=5': a setting is written --KEY VALUE. Here it is --epochs. --help all "
            "lists the keys.",
        ),
        ("-steps=3", "'-steps=3' has no key before it. Write --steps 3."),
        ("my.py --steps 3", "'my.py' has no key before it. Write --config my.py."),
        (
            "--data.shuffle",
            "--data.shuffle: expected True or False, got nothing. Write --data.shuffle True.",
        ),
        (
            "--algo.beta 0.1",
            "--algo.beta: unknown key. grpo has no setting beta; a_star_po, cpo, distill, dpo, dro, gkd, "
            "kto, orpo, simpo have. --algo NAME changes it.",
        ),
    ],
)
def test_words_that_look_like_values_or_flags(config, line, message):
    assert refusal(changed, config, line) == message


def test_none_of_a_number_that_is_off_at_zero_is_zero(config):
    config = replace(config, epochs=2.0, eval=replace(config.eval, every=5))
    after = changed(config, "--epochs None --eval.every none")
    assert (after.epochs, after.eval.every) == (0.0, 0)
    assert apply_overrides(config, [("epochs", None)])[0].epochs == 0.0
    assert refusal(changed, config, "--steps None") == "--steps: expected a whole number, got 'None'."
    assert changed(config, "--rollout.stop a= b=c").rollout.sampling.stop == ("a=", "b=c")  # no keys


def test_an_empty_value_is_no_text_and_no_entries(config):
    after = changed(config, "--model.tokenizer= --rollout.sampling.stop=")
    assert (after.model.tokenizer, after.rollout.sampling.stop) == ("", ())


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int, "-3", -3),
        (int, "1e3", 1000),
        (int, "2.5E+2", 250),
        (float, "1e-3", 1e-3),
        (bool, "TRUE", True),
        (str, "None", "None"),
        (float | None, "none", None),
        (str | None, "None", None),
        (tuple[int, ...], "", ()),
        (tuple[tuple[str, float], ...], "a 1 b 2", (("a", 1.0), ("b", 2.0))),
        (tuple[float, float] | None, "0 1", (0.0, 1.0)),
    ],
)
def test_words_become_values(hint, text, value):
    parsed = parse_value(hint, text.split())
    assert (parsed, type(parsed)) == (value, type(value))
    assert has_type(parsed, hint)


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (int, "1.0"),
        (int, "1.25e1"),
        (int, "1e999"),
        (int, "inf"),
        (int, "9" * 5000),
        (bool, "1"),
        (float, ""),
        (tuple[float, float], "1"),
        (dict, "{}"),
    ],
)
def test_words_that_are_no_such_value(hint, text):
    with pytest.raises(ValueError):
        parse_value(hint, text.split())


def test_a_type_in_words():
    assert type_words(tuple[tuple[str, float], ...]) == "any number of values, each 2 values: text, a number"
    assert type_words(float | None) == "a number or None"


@pytest.mark.parametrize(
    ("value", "hint"),
    [(True, int), (1, bool), (1.0, int), (None, int), ([], tuple[int, ...]), ((1, "a"), tuple[int, ...])],
)
def test_a_value_of_another_type(value, hint):
    assert not has_type(value, hint)


# -- flags of other systems


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("num_generations", "Here it is --responses_per_prompt."),
        ("num-generations", "Here it is --responses_per_prompt."),
        ("actor_rollout_ref.rollout.n", "Here it is --responses_per_prompt."),
        ("actor_rollout_ref.actor.kl_loss_coef", "Here it is --algo.kl_coef."),
        (
            "actor_rollout_ref.actor.strategy",
            "Here these are the groups model, algo, optim, rollout and mesh: --help GROUP.",
        ),
        ("algorithm.adv_estimator", "Here it is --algo NAME (grpo, rloo, ppo, ...), or --algo.advantage."),
        ("lora_r", "Here it is --lora.rank."),
        (
            "lora_anything",
            "Here this is the group lora: --lora.rank, --lora.alpha, --lora.targets, --lora.rank_stabilized, "
            "--lora.quantize.",
        ),
        (
            "actor_rollout_ref.actor.ppo_epochs",
            "Here it is --ppo_epochs.",
        ),
        (
            "vllm_anything",
            "Servers of vLLM are --rollout.engine vllm: docs/servers.md.",
        ),
        ("expert_model_parallel_size", "Here it is --mesh.expert."),
        ("router_aux_loss_coef", "Here it is --routing.balance_coef."),
        ("router_replay.mode", "Here it is --routing.replay."),
        ("model_name_or_path", "Here it is --model.path."),
        ("ref.model_name_or_path", "Here it is --reference.path."),
        ("run_name", "Here it is --log.name, its name in a logger, or --run_dir, the run's folder."),
        ("experiment_name", "Here it is --log.name, its name in a logger, or --run_dir, the run's folder."),
        ("wandb_run_name", "Here it is --log.name, its name in a logger, or --run_dir, the run's folder."),
        ("wandb_group", "Here it is --log.group."),
        ("gguf_file", "Here it is --model.path FILE.gguf, or ORG/NAME/FILE.gguf of the hub."),
        ("early_stopping", "There is no early stopping: --checkpoint.best_metric keeps the best checkpoint."),
        ("stpes", ""),
        ("model.pth", ""),
    ],
)
def test_flags_of_other_systems_are_translated(typed, answer):
    assert translate(typed) == answer


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("rollout.max_tokens", "Here it is --max_response_tokens."),
        ("rollout.sampling.max_tokens", "Here it is --max_response_tokens."),
        ("rollout.max_new_tokens", "Here it is --max_response_tokens."),
        ("max_new_tokens", "Here it is --max_response_tokens."),
        ("max_tokens", "Here it is --max_prompt_tokens and --max_response_tokens."),
        ("rollout.batch_size", "Here it is --prompts_per_step."),
        ("batch_size", "Here it is --prompts_per_step."),
        ("group_size", "Here it is --responses_per_prompt."),
        ("lr", "Did you mean --optim.learning_rate?"),
        ("optim.lr", "Did you mean --optim.learning_rate?"),
        ("kl_coef", "Did you mean --algo.kl_coef?"),
        ("beta", "Here it is --algo.kl_coef; of DPO and its like --algo.beta."),
        ("clip_eps", "Here it is --algo.clip_low and --algo.clip_high."),
        ("temperature", "Did you mean --rollout.sampling.temperature?"),
        # Misspellings inside a group.
        ("rollout.draft_token", "Did you mean --rollout.draft_tokens?"),
        ("rollout.slot", "Did you mean --rollout.slots?"),
        ("optim.learnin_rate", "Did you mean --optim.learning_rate?"),
    ],
)
def test_common_names_are_answered_with_the_key_that_is_meant(config, typed, answer):
    message = refusal(apply_overrides, config, [(typed, ["1"])])
    assert message == f"--{typed}: unknown key. {answer} --help all lists the keys."


def test_a_flag_of_several_trainers_is_that_of_the_recipes_algorithm(config):
    answers = [
        refusal(changed, replace(config, algo=algo.Config()), "--loss_type x").partition("unknown key. ")[2]
        for algo in (algos.dpo, algos.grpo, algos.sft)
    ]
    of_policies = (
        "Here it is --algo.aggregation, or another algorithm (--algo cispo, sapo, vespo, luspo); of pairs "
        "--algo.loss. --help all lists the keys."
    )
    assert answers == ["Here it is --algo.loss. --help all lists the keys.", of_policies, of_policies]


def test_a_translation_is_part_of_the_refusal(config):
    assert refusal(changed, config, "--max_completion_length 9") == (
        "--max_completion_length: unknown key. Here it is --max_response_tokens. --help all lists the keys."
    )


def test_every_flag_of_the_table_is_unknown_here_and_every_key_it_names_exists(config):
    other_algos = [replace(config, algo=algorithm.config) for algorithm in algos.ALGOS.values()]
    reward = replace(config.reward, models=(RewardModelConfig(path="m"),))  # lists that recipes leave empty
    data = replace(config.data, eval=config.data.train)
    other_algos.append(replace(config, reward=reward, data=data))
    known = {key for one in other_algos for key, _ in iter_fields(one)}
    groups = {key.rpartition(".")[0] for key in known}
    fields = {field.hint or f"--{field.ours}" for of_name in fields_by_name().values() for field in of_name}
    assert len(fields_by_name()) >= 400
    assert not {*SAME, *MISSING} & known
    for answer in (*SAME.values(), *MISSING.values(), *GROUPS.values(), *INSIDE.values(), *fields):
        named = set(
            re.findall(r"--([a-z_0-9.]*[a-z_0-9])", answer.replace("'--tp 2 --mem-fraction-static 0.6'", ""))
        )
        assert named - {"algo", "help"} <= known | groups, answer


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_of_another_name_is_accepted_as_the_refusal_says(config, name):
    line = ALGORITHMS[name].partition(",")[0]
    answer = f"Here it is {ALGORITHMS[name]}."
    assert refusal(with_algo, config, name) == f"--algo {name}: unknown algorithm. {answer}"
    of, *option = line.removeprefix("--algo ").split(" ", 1)
    plain = with_algo(config, of)[0]
    after = changed(plain, *option) if option else plain
    assert (after.algo != plain.algo) == bool(option) and not list(problems(after.algo))


def test_no_algorithm_that_there_is_is_translated():
    assert not {*ALGORITHMS, *NO_ALGORITHM} & {*algos.ALGOS}
    assert not {*ALGORITHMS} & {*NO_ALGORITHM}


def test_a_property_is_no_key(config):
    for name in ("max_tokens", "placements"):
        assert refusal(changed, config, f"--{name} 300").startswith(f"--{name}: unknown key.")


def test_a_misspelling_of_a_key_is_answered_with_the_key(config):
    """All but the keys that are a letter from each other: rollout.pagse is rollout.page, or rollout.pages."""
    known = dict(iter_fields(config))
    answered, wrong = 0, []
    for key in sorted(known)[::7]:
        group, _, name = key.rpartition(".")
        typed = f"{group}.".lstrip(".") + name[:-2] + name[:-3:-1]  # the last two letters in the other order
        if len(name) >= 4 and not resolve_key(typed, known):
            answered += 1
            if f"Did you mean --{key}?" not in refusal(apply_overrides, config, [(typed, ["1"])]):
                wrong.append(typed)
    assert answered > 20 and len(wrong) <= answered // 10, wrong
