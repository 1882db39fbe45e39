"""Samples to where their rows are: homes of rows are remembered, rows vote for them, placed samples look again.

Whole numbers only, so that a kernel and its twin agree everywhere (I1). A set of trainers is one 64-bit word, hence 64
trainers at most. `bagpipe.oracle.assign` puts the pieces together. For 16,384 samples of 26 ids and 8 trainers
`find_rows` takes 3 ms of one core, `vote` 2 ms, the others about 1 ms each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bagpipe.arrays import Int32s, Int64s, UInt8s, UInt32s, UInt64s
from bagpipe.kernels import inlined, kernel
from bagpipe.kernels.intrinsics import FAR, index, prefetch

TRAINERS_MAX = 64
HOMELESS = 255
"""The home of a row that has none."""

TRUST_FIRST, TRUST_MAX = 1, 15
"""A row's home moves when it had no leader elsewhere for so many batches less than it had one."""
LEAD_MIN = 2
"""A single sample elsewhere says nothing: it is there for its other rows."""

# An entry of the memory, from the top: 12 bits of the row's hash, 4 for the trust in its home, 16 of the batch that saw
# it last, 24 for the row's place in that batch, 8 for its home. A batch has no more rows than the memory has entries,
# so that 24 are enough.
ENTRIES_MAX = 2**24
_TAG, _TRUST, _STAMP, _PLACE, _HALF = np.uint64(52), np.uint64(48), np.uint64(32), np.uint64(8), np.uint64(32)
_MASK4, _MASK8, _MASK12 = np.uint64(0xF), np.uint64(0xFF), np.uint64(0xFFF)
_MASK16, _MASK24 = np.uint64(0xFFFF), np.uint64(0xFFFFFF)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Rows(NamedTuple):
    """The rows of a batch, by their place in it."""

    entries: Int32s
    """Where each is remembered."""
    homes: UInt8s
    counts: Int32s
    """How often each occurs in the batch."""
    trust: UInt8s
    """How many occurrences elsewhere it takes to move its home."""


@inlined
def _hash(key: np.int64, salt: np.uint64) -> np.uint64:
    bits = (np.uint64(key) ^ salt) * _FACTOR
    bits = (bits ^ (bits >> _HALF)) * _FACTOR
    return bits ^ (bits >> _HALF)


@kernel
def find_rows(
    memory: UInt64s, stamp: int, salt: np.uint64, ids: Int64s, places: Int32s, rows: Rows, num_rows: int
) -> int:
    """Number the rows of one feature's ids within the batch; note where each is remembered, its home, its occurrences.

    `places` gets the number of each id's row. Rows that meet in one entry of the memory are taken for one. Returns how
    many rows the batch has so far.
    """
    num_bits = 0
    while 1 << num_bits < memory.shape[0]:
        num_bits += 1
    shift, mine = np.uint64(64 - num_bits), np.uint64(stamp)
    hashes = np.empty(ids.shape[0], np.uint64)
    for k in range(ids.shape[0]):
        hashes[k] = _hash(ids[k], salt)
    last = ids.shape[0] - 1
    for k in range(ids.shape[0]):
        prefetch(memory, np.int64(hashes[index(min(k + FAR, last))] >> shift))
        entry = hashes[k] >> shift
        word = memory[entry]
        place = (word >> _PLACE) & _MASK24
        if (word >> _STAMP) & _MASK16 == mine:
            rows.counts[place] += 1
        else:
            place = np.uint64(num_rows)
            tag = hashes[k] & _MASK12
            known = word >> _TAG == tag
            home = word & _MASK8 if known else np.uint64(HOMELESS)
            memory[entry] = (tag << _TAG) | (mine << _STAMP) | (place << _PLACE) | home
            rows.trust[place] = (word >> _TRUST) & _MASK4 if known else _ZERO
            rows.entries[place] = entry
            rows.homes[place] = home
            rows.counts[place] = 1
            num_rows += 1
        places[k] = place
    return num_rows


@kernel
def weigh(rows: Rows, num_rows: int, weights: Int32s) -> UInt32s:
    """The vote of each row: its home, its weight by its occurrences, and whether it has any. One word, no branch."""
    votes = np.empty(num_rows, np.uint32)
    for row in range(num_rows):
        kept, at_home = rows.counts[row] < weights.shape[0], rows.homes[row] != HOMELESS
        weight = weights[rows.counts[row]] if kept and at_home else 0
        votes[row] = (int(kept) << 16) | (weight << 8) | (rows.homes[row] if at_home else 0)
    return votes


@kernel
def vote(found: Int32s, ends: Int64s, votes: UInt32s, stops: Int64s, places: Int32s, scores: Int32s) -> None:
    """Add the votes for one feature's ids to the scores of their samples; list the rows that have one.

    Sample i has the ids up to ends[i]; its rows go to `places` from stops[i] on, which moves. `scores` is (samples,
    trainers).
    """
    start = 0
    for i in range(ends.shape[0]):
        stop = stops[i]
        for k in range(start, ends[i]):
            word = votes[index(found[index(k)])]
            places[index(stop)] = found[index(k)]
            stop += word >> 16
            scores[i, index(word & 0xFF)] += (word >> 8) & 0xFF
        stops[i] = stop
        start = ends[i]


@kernel
def place(scores: Int32s, room: Int64s, part: Int64s) -> None:
    """Each sample to the trainer with its best score that has room left; among equals to the one with the most.

    To move samples on to the best placement of all saves next to nothing: the look at where others went does.
    """
    for i in range(part.shape[0]):
        best, most = 0, np.int64(-1)
        for j in range(room.shape[0]):
            worth = (np.int64(scores[i, j]) << 32) + room[j] if room[j] > 0 else np.int64(-1)
            best, most = (j, worth) if worth > most else (best, most)
        part[i] = best
        room[best] -= 1


@inlined
def _use(users: UInt64s, place: int, trainer: int) -> None:
    bit = _ONE << np.uint64(trainer)
    users[place, 1] |= users[place, 0] & bit
    users[place, 0] |= bit


@kernel
def note_users(starts: Int64s, stops: Int64s, places: Int32s, homes: UInt8s, part: Int64s, users: UInt64s) -> None:
    """Write who has each row: its home, and the trainers of its samples."""
    for row in range(homes.shape[0]):
        bit = _ZERO if homes[row] == HOMELESS else _ONE << np.uint64(homes[row])
        users[row, 0] = bit
        users[row, 1] = bit
    for i in range(part.shape[0]):
        for p in range(starts[i], stops[i]):
            _use(users, places[p], part[i])


@kernel
def look_again(
    starts: Int64s,
    stops: Int64s,
    places: Int32s,
    users: UInt64s,
    part: Int64s,
    loads: Int64s,
    load_max: int,
    scores: Int32s,
) -> int:
    """One sample after the other to the trainer that has most of its rows, as all others are placed; how many moved.

    `users` is (rows, 2): the trainers that have a row, as its home or for a sample; those that have it even without
    any one of their samples. Which it is after a move is a guess where several samples of one trainer left. Scores are
    the numbers of rows by which samples were judged.
    """
    num_moved = 0
    for i in range(part.shape[0]):
        old = part[i]
        alone = _ONE << np.uint64(old)
        scores[i, :] = 0
        for p in range(starts[i], stops[i]):
            row = index(places[index(p)])
            there = users[row, 0] & ~(alone & ~users[row, 1])
            for j in range(loads.shape[0]):
                scores[i, j] += np.int32((there >> np.uint64(j)) & _ONE)
        new = old
        for j in range(loads.shape[0]):
            if scores[i, j] > scores[i, new] and loads[j] < load_max:
                new = j
        if new != old:
            part[i] = new
            loads[old] -= 1
            loads[new] += 1
            num_moved += 1
            for p in range(starts[i], stops[i]):
                users[places[p], 0] &= ~(alone & ~users[places[p], 1])
                _use(users, places[p], new)
    return num_moved


@kernel
def settle_homes(
    starts: Int64s,
    stops: Int64s,
    places: Int32s,
    part: Int64s,
    rows: Rows,
    num_rows: int,
    count_max: int,
    memory: UInt64s,
) -> None:
    """Give rows a home, or another one if most of their samples are elsewhere again and again, and remember it.

    A row's leader is the trainer that a majority of its occurrences in the batch has, if any has it (the vote of Boyer
    and Moore). Rows that occur more often than `count_max` are as they were.
    """
    leading = np.zeros(num_rows, np.uint32)  # the leader, and by how much it leads
    for i in range(part.shape[0]):
        mine = np.uint32(part[i])
        for p in range(starts[i], stops[i]):
            word = leading[index(places[index(p)])]
            leader = word & np.uint32(0xFF) if word >> 8 else mine
            lead = (word >> 8) + 1 if leader == mine else (word >> 8) - 1
            leading[index(places[index(p)])] = (lead << 8) | leader
    for place in range(num_rows):
        prefetch(memory, rows.entries[min(place + FAR, num_rows - 1)])
        if rows.counts[place] <= count_max:
            trust, leader, lead = rows.trust[place], leading[place] & 0xFF, leading[place] >> 8
            if rows.homes[place] == leader and lead > 0:
                trust = min(trust + 1, TRUST_MAX)
            elif rows.homes[place] == HOMELESS or (lead >= LEAD_MIN and trust == 0):
                rows.homes[place] = leader
                trust = TRUST_FIRST
            elif lead >= LEAD_MIN:
                trust -= 1
            rows.trust[place] = trust
            word = memory[rows.entries[place]] & ~((_MASK4 << _TRUST) | _MASK8)
            memory[rows.entries[place]] = word | (np.uint64(trust) << _TRUST) | np.uint64(rows.homes[place])
