"""Sandboxes that start ahead of their conversations, with what only notes what becomes of them in a trial's place."""

import asyncio

import pytest

from mt_grpo.integrations.harbor import pool
from mt_grpo.integrations.harbor.pool import Pool


class Begun:
    """A trial that has begun."""

    def __init__(self, task):
        self.task, self.dropped = task, False

    async def drop(self):
        self.dropped = True
        if self.task == "stuck":
            raise OSError("no engine")


@pytest.fixture
def begin(monkeypatch):
    """Begins trials and keeps them; those of the task `bad` fail."""
    monkeypatch.setattr(pool, "_JITTER", 0.0)

    async def one(task):
        await asyncio.sleep(0)
        if task == "bad":
            raise OSError("no disk")
        one.made.append(Begun(task))
        return one.made[-1]

    one.made = []
    return one


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_so_many_begin_ahead_and_each_is_taken_once(begin):
    async def batch():
        ahead = Pool(2, begin)
        async with ahead.ahead(["a", "b", "a", "c"]):
            await settle()
            assert [each.task for each in begin.made] == ["a", "b"]
            taken = [await ahead.take("a")]
            await settle()
            taken += [await ahead.take("b"), await ahead.take("a"), await ahead.take("c")]
            await settle()
        assert [each.task for each in taken] == ["a", "b", "a", "c"] and len(set(map(id, taken))) == 4
        assert len(begin.made) == 4 and not any(each.dropped for each in begin.made)

    asyncio.run(batch())


def test_a_conversation_that_comes_first_begins_its_own(begin):
    async def batch():
        ahead = Pool(1, begin)
        async with ahead.ahead(["a", "b", "c"]):
            await settle()
            assert (await ahead.take("c")).task == "c"  # which is not begun again
            assert (await ahead.take("unannounced")).task == "unannounced"
            await ahead.take("a")
            await settle()
            await ahead.take("b")
            await settle()
        assert [each.task for each in begin.made] == ["a", "c", "unannounced", "b"]

    asyncio.run(batch())


def test_what_nobody_takes_is_dropped_however_the_batch_ends(begin, caplog):
    async def batch():
        async with Pool(2, begin).ahead(["stuck", "b", "c"]):
            await settle()
            raise KeyError("ended")

    with pytest.raises(KeyError):
        asyncio.run(batch())
    assert [(each.task, each.dropped) for each in begin.made] == [("stuck", True), ("b", True)]
    assert "A container that nobody took is left: OSError: no engine" in caplog.text


def test_a_start_that_fails_ahead_is_told_to_its_conversation(begin):
    async def batch():
        ahead = Pool(1, begin)
        async with ahead.ahead(["bad", "a"]):
            await settle()
            with pytest.raises(OSError, match="no disk"):
                await ahead.take("bad")
            assert (await ahead.take("a")).task == "a"

    asyncio.run(batch())


def test_a_pool_of_none_begins_nothing_ahead(begin):
    async def batch():
        async with Pool(0, begin).ahead(["a"]):
            await settle()
            assert not begin.made

    asyncio.run(batch())
