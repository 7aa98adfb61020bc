"""The trainer's end of a torch process group, in a separate process, for the trainer needs no torch.

    python relay.py '{"address": "10.0.0.1", "world_size": 2, "group": "g", "timeout": 60}'

prints the port of its store, then "joined" once the other ranks have joined. From then on it reads 8 bytes, a
count, and that many bytes, broadcasts them as one tensor, and prints "sent"; it ends with its input. Imports
nothing of this project.
"""

import datetime
import inspect
import json
import os
import sys

import torch
from torch.distributed import PrefixStore, TCPStore, broadcast, distributed_c10d


def report(line) -> None:
    print(line, flush=True)


def join_group(store, world_size: int, group: str, timeout: datetime.timedelta, *, rank: int = 0):
    """Join a group beside torch's default one, as SGLang's `init_custom_process_group` does."""
    make = distributed_c10d._new_process_group_helper
    options = {"backend_options", "pg_options"} & inspect.signature(make).parameters.keys()
    group_handle, _ = make(
        *(world_size, rank, [], distributed_c10d.Backend("gloo"), PrefixStore(group, store)),
        **dict.fromkeys(options),
        group_name=group,
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group_handle] = {i: i for i in range(world_size)}
    return group_handle


def main(settings: dict) -> None:
    timeout = datetime.timedelta(seconds=settings["timeout"])
    size = settings["world_size"]
    store = TCPStore(settings["address"], 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    report(store.port)
    group_handle = join_group(store, size, settings["group"], timeout)
    report("joined")
    while header := sys.stdin.buffer.read(8):
        data = sys.stdin.buffer.read(int.from_bytes(header, "little"))
        broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), src=0, group=group_handle)
        report("sent")


if __name__ == "__main__":
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with replies
    main(json.loads(sys.argv[1]))
