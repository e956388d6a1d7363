"""The line of an epoch and who reads what of it, for any shards, ranks, workers and batch sizes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fourmin.data.order import Line, Place, Stretch, Stretches, cut, joined, permutation
from lightning_fourmin.data.partition import Deal, Remainder, Share

SHARD_SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)
DEALS = st.builds(Deal, world=st.integers(1, 5), batch_size=st.integers(1, 4), num_workers=st.integers(1, 3))


def positions(stretches: Stretches) -> list[int]:
    return [position for start, stop in stretches for position in range(start, stop)]


def batches(share: Share) -> list[list[int]]:
    """The line's positions in each batch of a rank."""
    return [positions(ticket.lane)[ticket.first : ticket.first + ticket.count] for ticket in share.tickets(0)]


def flat(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def whole(line: Line) -> list[Place]:
    places: list[Place] = []
    for stretch in line.by_window((Stretch(0, line.num_samples),)):
        places += line.places(stretch)
    return places


@given(SHARD_SIZES, st.integers(0, 2**40), st.integers(0, 1000), st.integers(0, 40))
def test_a_line_has_every_sample_once(sizes: list[int], seed: int, epoch: int, window: int) -> None:
    places = whole(Line(tuple(sizes), seed, epoch, window))
    expected = [(shard, position) for shard, size in enumerate(sizes) for position in range(size)]
    assert sorted((place.shard, place.position) for place in places) == expected
    for place in places:
        assert expected[place.number] == (place.shard, place.position)
    if window == 0:
        assert [place.number for place in places] == list(range(sum(sizes)))


@given(SHARD_SIZES, st.integers(1, 40))
def test_windows_shuffle_a_walk_from_shard_to_shard(sizes: list[int], window: int) -> None:
    places = whole(Line(tuple(sizes), seed=3, epoch=1, window=window))
    for start in range(0, len(places), window):
        turns = [place.turn for place in places[start : start + window]]
        assert sorted(turns) == list(range(start, min(start + window, len(places))))
    walk = sorted(places, key=lambda place: place.turn)
    shards = [place.shard for place in walk]
    assert [shard for shard, previous in zip(shards, [None, *shards], strict=False) if shard != previous] == list(
        dict.fromkeys(shards)
    )
    for shard in set(shards):
        assert [place.position for place in walk if place.shard == shard] == list(range(sizes[shard]))


def test_lines_differ_between_epochs_and_seeds_and_repeat() -> None:
    def numbers(seed: int, epoch: int) -> list[int]:
        return [place.number for place in whole(Line((50, 50), seed, epoch, window=32))]

    assert numbers(1, 1) == numbers(1, 1)
    assert len({tuple(numbers(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_permutations_are_fair() -> None:
    counts = Counter(tuple(permutation(3, 7, epoch).tolist()) for epoch in range(6000))
    assert len(counts) == 6
    assert all(800 < count < 1200 for count in counts.values())


def test_permutations_stay_what_they_are() -> None:
    """An epoch that is under way survives an upgrade."""
    assert permutation(8, 1, 2, 3).tolist() == [1, 3, 7, 5, 2, 0, 4, 6]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8), st.data())
def test_cut_and_joined_keep_the_order(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    stretches = tuple(Stretch(start, start + length) for start, length in pairs)
    assert positions(joined(stretches)) == positions(stretches)
    sizes, left = [], len(positions(stretches))
    while left and data.draw(st.booleans()):
        sizes.append(data.draw(st.integers(0, left)))
        left -= sizes[-1]
    parts = cut(stretches, sizes)
    assert [len(positions(part)) for part in parts] == sizes
    assert flat([positions(part) for part in parts]) == positions(stretches)[: sum(sizes)]


@given(st.integers(1, 70), DEALS, st.sampled_from(["drop", "wrap"]))
def test_training_is_even_and_exactly_once(num_samples: int, deal: Deal, remainder: Remainder) -> None:
    epoch = deal.epoch(num_samples, remainder)
    shares = [batches(deal.train(epoch, rank)) for rank in range(deal.world)]
    (num_batches,) = {len(share) for share in shares}
    assert all(len(batch) == deal.batch_size for share in shares for batch in share)
    seen = Counter(flat([flat(share) for share in shares]))
    if remainder == "drop":
        assert num_batches == num_samples // deal.global_batch
        assert seen == Counter(range(num_batches * deal.global_batch))
    else:
        assert num_batches == -(-num_samples // deal.global_batch)
        assert seen == Counter(n % num_samples for n in range(num_batches * deal.global_batch))


@given(st.integers(0, 70), DEALS, st.sampled_from(["drop", "wrap"]), st.integers(1, 5))
def test_an_epoch_has_whole_steps(num_samples: int, deal: Deal, remainder: Remainder, num_accumulated: int) -> None:
    epoch = deal.epoch(num_samples, remainder, num_accumulated)
    step = deal.global_batch * num_accumulated
    seen = Counter(positions(epoch))
    num_steps = num_samples // step if remainder == "drop" else -(-num_samples // step)
    assert seen == Counter(n % num_samples for n in range(num_steps * step))


@given(st.integers(1, 70), DEALS)
def test_each_worker_reads_one_piece_of_a_whole_line(num_samples: int, deal: Deal) -> None:
    epoch = deal.epoch(num_samples, "drop")
    lanes = [lane for rank in range(deal.world) for lane in deal.train(epoch, rank).lanes]
    assert all(len(lane) <= 1 for lane in lanes)
    assert joined(stretch for lane in lanes for stretch in lane) == epoch


@given(DEALS, st.integers(0, 70))
def test_evaluation_is_exactly_once_and_as_even_as_can_be(deal: Deal, num_more: int) -> None:
    num_samples = deal.world + num_more
    shares = [batches(deal.evaluation(num_samples, rank)) for rank in range(deal.world)]
    assert sorted(flat([flat(share) for share in shares])) == list(range(num_samples))
    assert all(0 < len(batch) <= deal.batch_size for share in shares for batch in share)
    lengths = {len(share) for share in shares}
    assert max(lengths) == -(-num_samples // deal.global_batch)
    assert len(lengths) == 1 or (deal.batch_size == 1 and max(lengths) - min(lengths) == 1)


@given(st.integers(1, 90), DEALS, st.sampled_from(["drop", "wrap"]), st.data())
def test_what_is_left_continues_with_the_very_batches(
    num_samples: int, deal: Deal, remainder: Remainder, data: st.DataObject
) -> None:
    epoch = deal.epoch(num_samples, remainder)
    expected = [batches(deal.train(epoch, rank)) for rank in range(deal.world)]
    left = epoch
    done = 0
    while done < len(expected[0]):
        num_batches = data.draw(st.integers(1, len(expected[0]) - done))
        left = deal.left(left, num_batches)
        done += num_batches
        assert [batches(deal.train(left, rank)) for rank in range(deal.world)] == [share[done:] for share in expected]
    assert left == ()


@given(st.integers(1, 120), st.sampled_from(["drop", "wrap"]), st.data())
def test_any_chain_of_worlds_reads_every_sample_once(
    num_samples: int, remainder: Remainder, data: st.DataObject
) -> None:
    def a_deal() -> Deal:
        world = data.draw(st.sampled_from([1, 2, 3, 6]))
        return Deal(world, 6 // world, data.draw(st.integers(1, 3)))

    deal = a_deal()
    left = deal.epoch(num_samples, remainder)
    expected = Counter(positions(left))
    seen: list[int] = []
    num_lanes = 0
    while left:
        num_batches = data.draw(st.integers(1, deal.num_batches(left)))
        for rank in range(deal.world):
            seen += flat(batches(deal.train(left, rank))[:num_batches])
        num_lanes += deal.world * deal.num_workers
        left = deal.left(left, num_batches)
        assert len(left) <= num_lanes + 1
        deal = a_deal()
    assert Counter(seen) == expected


@given(st.integers(1, 120), st.sampled_from(["drop", "wrap"]), st.data())
def test_any_chain_of_global_batches_reads_no_sample_twice(
    num_samples: int, remainder: Remainder, data: st.DataObject
) -> None:
    deal = data.draw(DEALS)
    left = deal.epoch(num_samples, remainder)
    seen: list[int] = []
    while left:
        num_batches = data.draw(st.integers(1, deal.num_batches(left)))
        for rank in range(deal.world):
            seen += flat(batches(deal.train(left, rank))[:num_batches])
        left = deal.left(left, num_batches)
        deal = data.draw(DEALS)
        whole = deal.epoch(num_samples, remainder)
        rest = deal.rest(left, whole, remainder, num_samples)
        assert deal.num_batches(rest) <= deal.num_batches(whole)
        if remainder == "drop":
            assert 0 <= len(positions(left)) - len(positions(rest)) < deal.global_batch
            assert positions(rest) == positions(left)[: len(positions(rest))]
        else:
            assert positions(rest)[: len(positions(left))] == positions(left)
        left = rest
    if remainder == "drop":
        assert len(seen) == len(set(seen))
    else:
        assert set(seen) == set(range(num_samples))


@pytest.mark.parametrize("num_batches", [0, 7])
def test_what_is_left_of_many_ranks_is_short(num_batches: int) -> None:
    deal = Deal(world=512, batch_size=2, num_workers=4)
    left = deal.left(deal.epoch(100 * 1024, "drop"), num_batches)
    assert len(left) == (1 if num_batches == 0 else 512 * 4)
