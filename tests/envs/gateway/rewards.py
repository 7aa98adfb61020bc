"""Reward functions of the gateway's tests."""

import time


def number_of_turns(row, messages, exit_code):
    assert row["answer"] == "?" and exit_code == 0
    return sum(message["role"] == "assistant" for message in messages)


def fails(row, messages, exit_code):
    raise ValueError("no reward")


def hangs(row, messages, exit_code):
    time.sleep(1000)
