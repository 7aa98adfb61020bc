"""Places for requests: their number, and who gets a free one."""

import asyncio

from jaxrl_llm.rollout.servers.request_slots import RequestSlots


def test_requests_in_flight_are_as_many_as_the_present_servers_take():
    async def run():
        limit, inside, order = [2], 0, []
        slots = RequestSlots(lambda: limit[0])

        async def work(name, seconds):
            nonlocal inside
            async with slots.take(0):
                inside += 1
                order.append((name, inside))
                await asyncio.sleep(seconds)
                inside -= 1

        tasks = [asyncio.create_task(work(i, 0.02)) for i in range(6)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [(0, 1), (1, 2)]
        tasks[2].cancel()
        limit[0] = 3  # a server joins
        slots.wake()
        await asyncio.sleep(0.001)
        assert order[2:] == [(3, 3)]
        limit[0] = 1  # two leave
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order[3:] == [(4, 1), (5, 1)]

    asyncio.run(run())


def test_a_further_turn_of_an_earlier_step_comes_before_the_first_turns_of_later_ones():
    async def run():
        slots, order = RequestSlots(lambda: 1), []

        async def converse(step, name):
            for turn in range(2):
                async with slots.take(step):
                    order.append((name, turn))
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0)  # the environment

        await asyncio.gather(converse(0, "a"), converse(1, "b"), converse(1, "c"), converse(0, "d"))
        assert slots.waiting == 0
        assert order == [("a", 0), ("d", 0), ("a", 1), ("d", 1), ("b", 0), ("c", 0), ("b", 1), ("c", 1)]

    asyncio.run(run())
