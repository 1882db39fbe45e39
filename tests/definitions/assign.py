"""What the kernels of `bagpipe.kernels.assign` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from bagpipe.arrays import Int32s, Int64s, UInt8s, UInt32s, UInt64s
from bagpipe.kernels.assign import _FACTOR, _HALF, _ONE, HOMELESS, LEAD_MIN, TRAINERS_MAX, TRUST_FIRST, TRUST_MAX, Rows


def define_find_rows(
    memory: UInt64s, stamp: int, salt: np.uint64, ids: Int64s, places: Int32s, rows: Rows, num_rows: int
) -> int:
    """Twin of `find_rows`, id by id."""
    for k, bits in enumerate(define_hash(ids, salt).tolist()):
        entry, tag = bits * len(memory) >> 64, bits & 0xFFF
        word = int(memory[entry])
        place = word >> 8 & 0xFFFFFF
        if word >> 32 & 0xFFFF != stamp:
            place, num_rows = num_rows, num_rows + 1
            home, trust = (word & 0xFF, word >> 48 & 0xF) if word >> 52 == tag else (HOMELESS, 0)
            memory[entry] = tag << 52 | stamp << 32 | place << 8 | home
            rows.entries[place], rows.homes[place], rows.trust[place] = entry, home, trust
            rows.counts[place] = 0
        rows.counts[place] += 1
        places[k] = place
    return num_rows


def define_weigh(rows: Rows, num_rows: int, weights: Int32s) -> UInt32s:
    """Twin of `weigh`."""
    homes, counts = rows.homes[:num_rows].astype(np.uint32), rows.counts[:num_rows]
    kept = counts < len(weights)
    own = np.where(kept, weights[np.minimum(counts, len(weights) - 1)], 0).astype(np.uint32)
    at_home = homes != HOMELESS
    return (kept.astype(np.uint32) << 16) | np.where(at_home, (own << 8) | homes, 0).astype(np.uint32)


def define_vote(found: Int32s, ends: Int64s, votes: UInt32s, stops: Int64s, places: Int32s, scores: Int32s) -> None:
    """Twin of `vote`."""
    for i, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
        for place in found[begin:end].tolist():
            word = int(votes[place])
            scores[i, word & 0xFF] += word >> 8 & 0xFF
            if word >> 16:
                places[stops[i]] = place
                stops[i] += 1


def define_place(scores: Int32s, room: Int64s, part: Int64s) -> None:
    """Twin of `place`."""
    for i, of_sample in enumerate(scores):
        order = np.lexsort((-room, -of_sample))
        part[i] = order[room[order] > 0][0]
        room[part[i]] -= 1


def _listed(starts: Int64s, stops: Int64s, places: Int32s) -> Int32s:
    """The rows of all samples, end to end."""
    return np.concatenate([places[begin:end] for begin, end in zip(starts, stops, strict=True)])


def define_note_users(
    starts: Int64s, stops: Int64s, places: Int32s, homes: UInt8s, part: Int64s, users: UInt64s
) -> None:
    """Twin of `note_users`."""
    at_home = np.arange(TRAINERS_MAX) == homes[:, None]
    counts = np.where(at_home, 2, 0)
    np.add.at(counts, (_listed(starts, stops, places), np.repeat(part, stops - starts)), 1)
    bits = _ONE << np.arange(TRAINERS_MAX, dtype=np.uint64)
    for column in range(2):
        users[: len(homes), column] = ((counts > column) * bits).sum(1, dtype=np.uint64)


def define_look_again(
    starts: Int64s,
    stops: Int64s,
    places: Int32s,
    users: UInt64s,
    part: Int64s,
    loads: Int64s,
    load_max: int,
    scores: Int32s,
) -> int:
    """Twin of `look_again`."""
    trainers = np.arange(len(loads), dtype=np.uint64)
    num_moved = 0
    for i in range(len(part)):
        of_sample = places[starts[i] : stops[i]]
        old = part[i]
        there = users[of_sample, 0] & ~((_ONE << np.uint64(old)) & ~users[of_sample, 1])
        scores[i] = ((there[:, None] >> trainers) & _ONE).sum(0)
        allowed = np.where((loads < load_max) | (trainers == np.uint64(old)), scores[i], -1)
        if allowed.max() == scores[i, old]:
            continue
        part[i] = allowed.argmax()
        loads[old] -= 1
        loads[part[i]] += 1
        num_moved += 1
        for place in of_sample.tolist():
            users[place, 0] &= ~((_ONE << np.uint64(old)) & ~users[place, 1])
            users[place, 1] |= users[place, 0] & (_ONE << np.uint64(part[i]))
            users[place, 0] |= _ONE << np.uint64(part[i])
    return num_moved


def define_settle_homes(
    starts: Int64s,
    stops: Int64s,
    places: Int32s,
    part: Int64s,
    rows: Rows,
    num_rows: int,
    count_max: int,
    memory: UInt64s,
) -> None:
    """Twin of `settle_homes`, row by row."""
    trainers, listed = np.repeat(part, stops - starts), _listed(starts, stops, places)
    for row in np.flatnonzero(rows.counts[:num_rows] <= count_max):
        leader, lead = 0, 0
        for trainer in trainers[listed == row].tolist():
            leader = trainer if lead == 0 else leader
            lead += 1 if leader == trainer else -1
        home, trust = int(rows.homes[row]), int(rows.trust[row])
        if home == leader and lead > 0:
            trust = min(trust + 1, TRUST_MAX)
        elif home == HOMELESS or (lead >= LEAD_MIN and trust == 0):
            home, trust = leader, TRUST_FIRST
        elif lead >= LEAD_MIN:
            trust -= 1
        rows.homes[row], rows.trust[row] = home, trust
        word = int(memory[rows.entries[row]])
        memory[rows.entries[row]] = word >> 52 << 52 | trust << 48 | word & 0xFFFFFFFF00 | home


def define_hash(ids: Int64s, salt: np.uint64) -> UInt64s:
    """Twin of `_hash` over an array."""
    bits = (ids.astype(np.uint64) ^ salt) * _FACTOR
    bits = (bits ^ (bits >> _HALF)) * _FACTOR
    return bits ^ (bits >> _HALF)
