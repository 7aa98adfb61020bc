"""Reward functions of the gateway's tests."""


def number_of_turns(row, messages, exit_code):
    assert row["answer"] == "?" and exit_code == 0
    return sum(message["role"] == "assistant" for message in messages)


def fails(row, messages, exit_code):
    raise ValueError("no reward")
