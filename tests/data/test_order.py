"""The order of an epoch and who reads which part of it, for any shards, ranks, workers and batch sizes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fourmin.data.order import EpochOrder, Place, Span, Spans, cut, joined, permutation
from lightning_fourmin.data.partition import Partition, RankShare, Remainder

SHARD_SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)
PARTITIONS = st.builds(Partition, world=st.integers(1, 5), batch_size=st.integers(1, 4), num_workers=st.integers(1, 3))


def positions(spans: Spans) -> list[int]:
    return [position for start, stop in spans for position in range(start, stop)]


def batches(share: RankShare) -> list[list[int]]:
    """The positions in each batch of a rank."""
    return [
        positions(request.worker_range)[request.first : request.first + request.count] for request in share.requests(0)
    ]


def flat(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def whole(order: EpochOrder) -> list[Place]:
    places: list[Place] = []
    for span in order.by_window((Span(0, order.num_samples),)):
        places += order.places(span)
    return places


@given(SHARD_SIZES, st.integers(0, 2**40), st.integers(0, 1000), st.integers(0, 40))
def test_an_order_has_every_sample_once(sizes: list[int], seed: int, epoch: int, window: int) -> None:
    places = whole(EpochOrder(tuple(sizes), seed, epoch, window))
    expected = [(shard, position) for shard, size in enumerate(sizes) for position in range(size)]
    assert sorted((place.shard, place.in_shard) for place in places) == expected
    for place in places:
        assert expected[place.number] == (place.shard, place.in_shard)
    if window == 0:
        assert [place.number for place in places] == list(range(sum(sizes)))


@given(SHARD_SIZES, st.integers(1, 40))
def test_windows_shuffle_a_walk_from_shard_to_shard(sizes: list[int], window: int) -> None:
    places = whole(EpochOrder(tuple(sizes), seed=3, epoch=1, window=window))
    for start in range(0, len(places), window):
        read = [place.read_order for place in places[start : start + window]]
        assert sorted(read) == list(range(start, min(start + window, len(places))))
    walk = sorted(places, key=lambda place: place.read_order)
    shards = [place.shard for place in walk]
    assert [shard for shard, previous in zip(shards, [None, *shards], strict=False) if shard != previous] == list(
        dict.fromkeys(shards)
    )
    for shard in set(shards):
        assert [place.in_shard for place in walk if place.shard == shard] == list(range(sizes[shard]))


def test_orders_differ_between_epochs_and_seeds_and_repeat() -> None:
    def numbers(seed: int, epoch: int) -> list[int]:
        return [place.number for place in whole(EpochOrder((50, 50), seed, epoch, window=32))]

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
    spans = tuple(Span(start, start + length) for start, length in pairs)
    assert positions(joined(spans)) == positions(spans)
    sizes, left = [], len(positions(spans))
    while left and data.draw(st.booleans()):
        sizes.append(data.draw(st.integers(0, left)))
        left -= sizes[-1]
    parts = cut(spans, sizes)
    assert [len(positions(part)) for part in parts] == sizes
    assert flat([positions(part) for part in parts]) == positions(spans)[: sum(sizes)]


@given(st.integers(1, 70), PARTITIONS, st.sampled_from(["drop", "wrap"]))
def test_training_is_even_and_exactly_once(num_samples: int, partition: Partition, remainder: Remainder) -> None:
    epoch = partition.epoch(num_samples, remainder)
    shares = [batches(partition.train(epoch, rank)) for rank in range(partition.world)]
    (num_batches,) = {len(share) for share in shares}
    assert all(len(batch) == partition.batch_size for share in shares for batch in share)
    seen = Counter(flat([flat(share) for share in shares]))
    if remainder == "drop":
        assert num_batches == num_samples // partition.global_batch
        assert seen == Counter(range(num_batches * partition.global_batch))
    else:
        assert num_batches == -(-num_samples // partition.global_batch)
        assert seen == Counter(n % num_samples for n in range(num_batches * partition.global_batch))


@given(st.integers(0, 70), PARTITIONS, st.sampled_from(["drop", "wrap"]), st.integers(1, 5))
def test_an_epoch_has_whole_steps(
    num_samples: int, partition: Partition, remainder: Remainder, num_accumulated: int
) -> None:
    epoch = partition.epoch(num_samples, remainder, num_accumulated)
    step = partition.global_batch * num_accumulated
    seen = Counter(positions(epoch))
    num_steps = num_samples // step if remainder == "drop" else -(-num_samples // step)
    assert seen == Counter(n % num_samples for n in range(num_steps * step))


@given(st.integers(1, 70), PARTITIONS)
def test_each_worker_reads_one_span_of_a_whole_epoch(num_samples: int, partition: Partition) -> None:
    epoch = partition.epoch(num_samples, "drop")
    ranges = [spans for rank in range(partition.world) for spans in partition.train(epoch, rank).worker_ranges]
    assert all(len(spans) <= 1 for spans in ranges)
    assert joined(span for spans in ranges for span in spans) == epoch


@given(PARTITIONS, st.integers(0, 70))
def test_evaluation_is_exactly_once_and_as_even_as_can_be(partition: Partition, num_more: int) -> None:
    num_samples = partition.world + num_more
    shares = [batches(partition.evaluation(num_samples, rank)) for rank in range(partition.world)]
    assert sorted(flat([flat(share) for share in shares])) == list(range(num_samples))
    assert all(0 < len(batch) <= partition.batch_size for share in shares for batch in share)
    lengths = {len(share) for share in shares}
    assert max(lengths) == -(-num_samples // partition.global_batch)
    # Batches of one sample cannot be evened out.
    assert max(lengths) - min(lengths) <= (1 if partition.batch_size == 1 else 0)


@given(st.integers(1, 90), PARTITIONS, st.sampled_from(["drop", "wrap"]), st.data())
def test_what_is_left_continues_with_the_very_batches(
    num_samples: int, partition: Partition, remainder: Remainder, data: st.DataObject
) -> None:
    epoch = partition.epoch(num_samples, remainder)
    expected = [batches(partition.train(epoch, rank)) for rank in range(partition.world)]
    left = epoch
    done = 0
    while done < len(expected[0]):
        num_batches = data.draw(st.integers(1, len(expected[0]) - done))
        left = partition.left(left, num_batches)
        done += num_batches
        assert [batches(partition.train(left, rank)) for rank in range(partition.world)] == [
            share[done:] for share in expected
        ]
    assert left == ()


@given(st.integers(1, 120), st.sampled_from(["drop", "wrap"]), st.data())
def test_any_chain_of_worlds_reads_every_sample_once(
    num_samples: int, remainder: Remainder, data: st.DataObject
) -> None:
    def a_partition() -> Partition:
        world = data.draw(st.sampled_from([1, 2, 3, 6]))
        return Partition(world, 6 // world, data.draw(st.integers(1, 3)))

    partition = a_partition()
    left = partition.epoch(num_samples, remainder)
    expected = Counter(positions(left))
    seen: list[int] = []
    num_ranges = 0
    while left:
        num_batches = data.draw(st.integers(1, partition.num_batches(left)))
        for rank in range(partition.world):
            seen += flat(batches(partition.train(left, rank))[:num_batches])
        num_ranges += partition.world * partition.num_workers
        left = partition.left(left, num_batches)
        assert len(left) <= num_ranges + 1
        partition = a_partition()
    assert Counter(seen) == expected


@given(st.integers(1, 120), st.sampled_from(["drop", "wrap"]), st.data())
def test_any_chain_of_global_batches_reads_no_sample_twice(
    num_samples: int, remainder: Remainder, data: st.DataObject
) -> None:
    partition = data.draw(PARTITIONS)
    left = partition.epoch(num_samples, remainder)
    seen: list[int] = []
    while left:
        num_batches = data.draw(st.integers(1, partition.num_batches(left)))
        for rank in range(partition.world):
            seen += flat(batches(partition.train(left, rank))[:num_batches])
        left = partition.left(left, num_batches)
        partition = data.draw(PARTITIONS)
        whole = partition.epoch(num_samples, remainder)
        rest = partition.rest(left, whole, remainder, num_samples)
        assert partition.num_batches(rest) <= partition.num_batches(whole)
        if remainder == "drop":
            assert 0 <= len(positions(left)) - len(positions(rest)) < partition.global_batch
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
    partition = Partition(world=512, batch_size=2, num_workers=4)
    left = partition.left(partition.epoch(100 * 1024, "drop"), num_batches)
    assert len(left) == (1 if num_batches == 0 else 512 * 4)
