"""In which order ranks run passes: in none do they wait for each other for ever;
interleaved they wait less.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import pytest

from distcore_mesh.pipeline_schedules import pass_order

CHUNKS = {"1f1b": (1,), "gpipe": (1,), "interleaved": (2, 3, 4)}
RANKS, MICROS = (2, 3, 4, 6), (*range(1, 15), 24, 29)


@dataclass
class Message:
    stage: int
    micro: int
    time: float
    """When it was sent."""
    is_asked_for: bool = False


@dataclass
class Pipeline:
    """Ranks that exchange messages as ``Stages`` does: between two ranks they arrive in
    the order of sending.
    """

    schedule: str
    micros: int
    ranks: int
    chunks: int = 1

    def __post_init__(self):
        self.links: defaultdict[Any, deque[Message]] = defaultdict(deque)
        self.ends, self.idle, self.most = ([0.0] * self.ranks for _ in range(3))
        running = {self.passes_of(rank): True for rank in range(self.ranks)}
        while running:
            moved = {each: next(each, None) for each in running}
            running = {each: True for each, has in moved.items() if has is not None}
            assert not running or any(moved.values()), "ranks wait for each other"
        assert not any(self.links.values())
        self.waited = sum(
            idle + max(self.ends) - end for idle, end in zip(self.idle, self.ends, strict=True)
        )

    def passes_of(self, rank):
        """Run a rank's passes; yield whether it came further.

        A forward pass takes 1 / chunks, a backward pass twice that. With more than ``ranks``
        messages on their way the rank waits for the oldest before it sends another.
        """
        now, kept, leaving, done = 0.0, 0, deque[Message](), Counter[tuple[str, int]]()
        for kind, chunk in pass_order(self.schedule, self.micros, rank, self.ranks, self.chunks):
            step = 1 if kind == "forward" else -1
            stage, micro = chunk * self.ranks + rank, done[kind, chunk]
            assert micro < (self.micros if step == 1 else done["forward", chunk])
            done[kind, chunk] += 1
            if self.has(stage - step):
                arriving = self.links[self.link(kind, stage - step, stage)]
                while not arriving:
                    yield False
                message = arriving.popleft()
                message.is_asked_for = True
                # not what is meant for another pass
                assert (message.stage, message.micro) == (stage - step, micro)
                self.idle[rank] += max(0.0, message.time - now)
                now = max(now, message.time)
            now += (1 if step == 1 else 2) / self.chunks
            kept += step
            self.most[rank] = max(self.most[rank], kept)
            if self.has(stage + step):
                while len(leaving) > self.ranks and not leaving[0].is_asked_for:
                    yield False
                if len(leaving) > self.ranks:
                    leaving.popleft()
                leaving.append(Message(stage, micro, now))
                self.links[self.link(kind, stage, stage + step)].append(leaving[-1])
            yield True
        assert set(done.values()) == {self.micros}
        self.ends[rank] = now

    def has(self, stage):
        return 0 <= stage < self.ranks * self.chunks

    def link(self, kind, source, to):
        """The link between the ranks of two stages: another one around the end."""
        return kind, source % self.ranks, to % self.ranks, source // self.ranks == to // self.ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("schedule", CHUNKS)
def test_ranks_never_wait_for_each_other_for_ever(schedule, ranks):
    for chunks in CHUNKS[schedule]:
        for micros in MICROS:
            Pipeline(schedule, micros, ranks, chunks)


@pytest.mark.parametrize("ranks", RANKS)
def test_interleaved_ranks_wait_less(ranks):
    for micros in MICROS:
        waited = [Pipeline("1f1b", micros, ranks).waited]
        waited += [
            Pipeline("interleaved", micros, ranks, chunks).waited
            for chunks in CHUNKS["interleaved"]
        ]
        if micros == 1:
            assert waited == pytest.approx([waited[0]] * 4)
        else:
            assert max(waited[1:]) < waited[0]
        if micros % ranks == 0:
            each = 3 * (ranks - 1)  # forward and backward of the ranks before, and behind
            assert waited == pytest.approx([ranks * each / chunks for chunks in (1, 2, 3, 4)])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("micros", MICROS)
def test_activations_of_so_many_passes_are_kept(micros, ranks):
    assert Pipeline("gpipe", micros, ranks).most == [micros] * ranks
    assert Pipeline("1f1b", micros, ranks).most == [
        min(micros, ranks - rank) for rank in range(ranks)
    ]
    for chunks in CHUNKS["interleaved"]:
        group = -(-micros // max(1, micros // ranks))
        limits = [2 * (ranks - rank - 1) + (chunks - 1) * group + 1 for rank in range(ranks)]
        assert Pipeline("interleaved", micros, ranks, chunks).most == [
            min(each, micros * chunks) for each in limits
        ]
