"""One data processor: a process that reads its share of the batches and fills slots with them.

It keeps nothing but its place, so it can be killed at any moment and another one goes on. It ends when its consumer
does: the stream of messages ends, and it looks there before and after each read.
"""

from __future__ import annotations

import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Sequence

from bagpipe.data.described import open_described
from bagpipe.data.order import BatchOrder
from bagpipe.data.processors.channel import Channel, Message
from bagpipe.data.processors.slot import Slot
from bagpipe.errors import BagpipeError


def work(channel: Channel) -> None:
    """Do what the consumer at the other end asks for, and tell it what went wrong."""
    job = channel.receive()
    if job is None:
        return
    try:
        serve(channel, job, [Slot(slot) for slot in job["slots"]])
    except BagpipeError as error:
        channel.send({"error": type(error).__name__, "message": str(error), "fields": error.fields})
    except Exception as error:
        channel.send({"failure": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})


def serve(channel: Channel, job: Message, slots: Sequence[Slot]) -> None:
    """Read groups `first`, `first + every`, ... of the batches; wait for a free slot where there is none (I5)."""
    dataset = open_described(job["dataset"])
    order = BatchOrder(dataset.num_samples, job["batch_size"], job["seed"])
    numbers, step = range(job["start"], job["stop"]), job["step"]
    free = deque(range(len(slots)))
    for group in range(job["first"], -(-len(numbers) // step), job["every"]):
        samples = dataset.read_group(order, numbers[group * step : (group + 1) * step])
        while not free:
            message = channel.receive()
            if message is None:
                return
            free.append(message["free"])
        place = free.popleft()
        num_bytes, parts = slots[place].put(samples)
        if not channel.send({"group": group, "slot": place, "bytes": num_bytes, "parts": parts}):
            return
    while channel.receive() is not None:
        pass  # the consumer ends us; were we to go first, it would take us for dead


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the consumer's, who then ends us
    work(Channel(socket.socket(fileno=int(sys.argv[1]))))
