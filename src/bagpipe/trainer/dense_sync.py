"""Gradients of the dense parameters, averaged over trainers while the backward pass still runs.

g = (sum over ranks of n_i * g_i) / N, in rank order, as reference.py defines it (I1): when `loss.backward()` returns,
every `p.grad` is the mean over the global batch, so a script needs no change. With one trainer nothing is touched.

Parameters lie in buckets, in reverse order of definition, which is about the order in which gradients come. A bucket is
sent from autograd's hook when all of its gradients are there, so that it travels beside the backward pass; what is
missing at the end of that pass contributes nothing. Beside its gradients a bucket holds one number a parameter: how
many ranks have one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bagpipe.errors import ModelError, PipelineError
from bagpipe.failpoints import reach
from bagpipe.trainer.collective import Collective, Pending, RankOrderSum, sum_in_rank_order
from bagpipe.trainer.stages import Driver, Wait

BUCKET_BYTES = 1 << 20
_DIGEST_WORDS = 8


class DenseSync:
    """The dense parameters of one trainer among several. `begin` comes before each batch; backward does the rest.

    Several backward passes of one batch are averaged one by one and add up, as they do for one trainer; all ranks must
    make the same number of them. The first thing that is exchanged is a checksum of all parameters: ranks that begin
    with different values are refused in their first backward pass.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        group: Collective,
        driver: Driver,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group, self._driver = group, driver
        named = {id(parameter): (name, parameter) for name, parameter in parameters}  # a shared one counts once
        self._named = list(named.values())
        self._batch = _MicroBatch(0.0, 0.0, True)
        self._frozen = [(name, parameter) for name, parameter in self._named if not parameter.requires_grad]
        self._begun = self._started = self._in_backward = False
        self._failure: Exception | None = None
        """What has ended a backward pass here, if that was no error of the script."""
        self._passes = 0
        self._halves: list[RankOrderSum] = []
        """Of the buckets of this pass that were sent."""
        self._comparison: _Told | None = None
        self._buckets: list[_Bucket] = []
        self._handles: list[Any] = []
        if group.size > 1:
            self._buckets = _make_buckets(self._named, bucket_bytes)
            for bucket in self._buckets:
                for entry in bucket.entries:
                    self._watch(bucket, entry)

    def begin(self, samples: int, total: int, last: bool = True) -> None:
        """A batch begins: this rank has `samples` of its `total` samples.

        With `last` false it is a micro-batch, and its gradients stay here until the backward pass of the last one,
        weighted by its own numbers.
        """
        if self._group.size == 1:
            return
        if self.interruption is not None:
            raise self.interruption
        self._check_frozen()
        first_total = self._batch.first_total
        if self._batch.last or not first_total:
            first_total = float(total)
        weight = float(samples) if total == first_total or not total else samples * (first_total / total)
        self._batch = _MicroBatch(weight, first_total, last)
        self._begun = True
        if not self._started:
            self._started = True
            self._start_comparing()

    @property
    def interruption(self) -> PipelineError | None:
        """What to say where the last backward pass did not come to its end."""
        if not self._in_backward:
            return None
        which = f"the last backward pass of trainer {self._group.rank}"
        if self._failure is not None:
            return PipelineError(f"{which} has failed: {self._failure}")
        return PipelineError(
            f"{which} was interrupted, and the other trainers wait for its gradients: end the training on all of them"
        )

    def skip(self) -> None:
        """Take part without a backward pass in this batch: only what earlier micro-batches gave is contributed."""
        if self._group.size > 1 and self._batch.last:
            self._open_pass()
            self._finish_pass()

    def close(self, reason: BaseException | str = "training has ended") -> None:
        """Leave the parameters alone from now on; ranks that wait for this one's gradients are told the reason."""
        self._begun = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._in_backward:
            self._group.abort(reason)

    def leave(self) -> None:
        """Close, and let go of the group, so that ranks that go on alone are told that this one does not."""
        self._compare()
        self.close()
        self._group.close()

    def _watch(self, bucket: _Bucket, entry: _Entry) -> None:
        with torch.enable_grad():
            node: Any = entry.parameter.view_as(entry.parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        # The node's own hook runs only when a gradient is about to be added, not for torch.autograd.grad. A node that
        # nobody holds goes with its graph.
        entry.node = node
        self._handles.append(node.register_prehook(lambda _: self._before(entry)))
        parameter: Any = entry.parameter
        self._handles.append(parameter.register_post_accumulate_grad_hook(lambda _: self._after(bucket, entry)))

    def _before(self, entry: _Entry) -> None:
        """A gradient is about to be added to `grad`: put what is there aside, to see the new one alone."""
        if self._begun:
            entry.put_aside()

    def _after(self, bucket: _Bucket, entry: _Entry) -> None:
        """The gradient of this backward pass is in `grad`."""
        if not self._begun:
            return
        grad = entry.parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise ModelError(
                f"the gradient of dense parameter {entry.name!r} is sparse: make its layer with sparse=False"
            )
        if grad.requires_grad:
            raise ModelError("backward(create_graph=True) is not possible with several trainers: leave it out")
        if not self._batch.last:
            entry.accumulate(grad, self._batch.weight)
            return
        if not self._in_backward:
            self._open_pass()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish_pass)
        entry.contribute(grad, self._batch.weight)
        bucket.missing -= 1
        if bucket.missing == 0:
            self._send_complete()

    def _open_pass(self) -> None:
        try:
            self._compare()
        except Exception as error:
            self._group.abort(error)
            raise
        for bucket in self._buckets:
            bucket.missing = len(bucket.entries)
            for entry in bucket.entries:
                entry.arrived = False
        self._halves = []
        self._in_backward = True
        self._passes += 1

    def _finish_pass(self) -> None:
        """The backward pass is over: what did not come is absent; wait for the others and set every `grad`."""
        for bucket in self._buckets:
            for entry in bucket.entries:
                if not entry.arrived:
                    entry.contribute_without_gradient()
            bucket.missing = 0
        try:
            self._send_complete()
            pending: list[Pending] = []
            for half in self._halves:
                self._driver.wait(Wait(f"{half.what} of other trainers", half.ready))
                pending.append(half.add())
            for half, rest in zip(self._halves, pending, strict=True):
                self._driver.wait(Wait(f"{half.what} added up by other trainers", rest.ready))
                rest.wait()
        except Exception as error:
            self._failure = error
            self._group.abort(error)
            raise
        reach("trainer.dense.exchanged")
        for bucket in self._buckets:
            counts = bucket.counts.tolist()
            for entry, count in zip(bucket.entries, counts, strict=True):
                entry.settle(present=count > 0)
        self._in_backward = False

    def _send_complete(self) -> None:
        """Send buckets whose gradients are all there; in order, so that it is the same on all ranks."""
        for number, bucket in enumerate(self._buckets[len(self._halves) :], len(self._halves) + 1):
            if bucket.missing:
                return
            what = f"dense gradients of pass {self._passes}, part {number} of {len(self._buckets)},"
            self._halves.append(sum_in_rank_order(self._group, bucket.buffer, what, self._batch.first_total))

    def _start_comparing(self) -> None:
        """Tell the others checksums of the parameters' names and shapes, and of their values."""
        shapes = repr([(name, str(parameter.dtype), tuple(parameter.shape)) for name, parameter in self._named])
        checksums = [_digest(_bytes_of(parameter), 2) for _, parameter in self._named]
        self._checksums = torch.cat([torch.empty(0, dtype=torch.int32), *checksums])
        values = _digest(self._checksums.numpy(), _DIGEST_WORDS)
        self._comparison = self._tell(torch.cat([_digest(shapes.encode(), _DIGEST_WORDS), values]), "checksums")

    def _compare(self) -> None:
        """Refuse ranks that have other parameters, or other values, than rank 0."""
        if self._comparison is None:
            return
        everyone, self._comparison = self._heard(self._comparison), None
        for rank, words in enumerate(everyone):
            if not torch.equal(words[:_DIGEST_WORDS], everyone[0][:_DIGEST_WORDS]):
                raise ModelError(
                    f"trainer {rank} has other dense parameters than trainer 0: make the same model on all trainers"
                )
        if all(torch.equal(words, everyone[0]) for words in everyone):
            return
        everyone = self._heard(self._tell(self._checksums, "checksums of each"))
        for number, (name, _) in enumerate(self._named):
            for rank, words in enumerate(everyone):
                if not torch.equal(words[2 * number : 2 * number + 2], everyone[0][2 * number : 2 * number + 2]):
                    raise ModelError(
                        f"dense parameter {name!r} begins with other values on trainer {rank} than on trainer 0: give "
                        "all trainers the same weights, for example by torch.manual_seed before the model is made"
                    )

    def _tell(self, words: Tensor, what: str) -> _Told:
        device = self._buckets[0].buffer.device if self._buckets else torch.device("cpu")
        sent = words.view(torch.float32).to(device)
        received = [torch.empty_like(sent) for _ in range(self._group.size)]
        what = f"{what} of dense parameters"
        return _Told(what, received, self._group.exchange([sent] * self._group.size, received, what))

    def _heard(self, told: _Told) -> list[Tensor]:
        self._driver.wait(Wait(told.what, told.pending.ready))
        told.pending.wait()
        return [each.cpu().view(torch.int32) for each in told.received]

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ModelError(
                    f"dense parameter {name!r} was frozen when training began and is trained now: with several "
                    "trainers let it require gradients from the start, and set its gradient to None while it is frozen"
                )


class _Told(NamedTuple):
    """What is being told to all, and room for what they tell."""

    what: str
    received: list[Tensor]
    pending: Pending


class _MicroBatch(NamedTuple):
    """What `begin` said."""

    weight: float
    first_total: float
    """Samples of the iteration's first micro-batch on all ranks: what sums are divided by."""
    last: bool


class _Entry:
    """One parameter and its place in a bucket."""

    def __init__(self, name: str, parameter: nn.Parameter, place: Tensor, count: Tensor) -> None:
        self.name, self.parameter, self.arrived = name, parameter, False
        self._place, self._count = place, count
        self.node: Any = None
        self._base: Tensor | None = None
        """The gradient from before this iteration, which the mean is added to, as backward does."""
        self._local: Tensor | None = None
        """The weighted sum of this iteration's earlier micro-batches; while there is one, it is `grad`."""

    def put_aside(self) -> None:
        """Take what is in `grad` out of it; a script that has cleared it meant all of it."""
        grad = self.parameter.grad
        if grad is None:
            self._base = self._local = None
        elif grad is not self._local:
            self._base, self._local = grad, None
        self.parameter.grad = None

    def accumulate(self, grad: Tensor, weight: float) -> None:
        """Add a micro-batch's gradient; one without samples counts as none."""
        if weight:
            grad.mul_(weight)
            self._local = grad if self._local is None else self._local.add_(grad)
        self.parameter.grad = self._local if self._local is not None else self._base

    def contribute(self, grad: Tensor, weight: float) -> None:
        """Put the weighted gradient into the bucket."""
        self.arrived = True
        if not weight:
            self._contribute_local()
            return
        torch.mul(grad, weight, out=self._place)
        if self._local is not None:
            self._place.add_(self._local)
        self._count.fill_(1.0)

    def contribute_without_gradient(self) -> None:
        """This backward pass had none for this parameter."""
        self.put_aside()
        self._contribute_local()

    def settle(self, present: bool) -> None:
        """Let `grad` be the mean over ranks, if one of them had a gradient."""
        if not present:
            self.parameter.grad = self._base
        elif self._base is not None:
            self.parameter.grad = self._base.add_(self._place)
        elif self.parameter.grad is not None:
            self.parameter.grad.copy_(self._place)
        else:
            self.parameter.grad = torch.empty_like(self.parameter).copy_(self._place)
        self._base = self._local = None

    def _contribute_local(self) -> None:
        if self._local is None:
            self._place.zero_()  # which adds nothing: a sum that starts at +0.0 is never -0.0
            self._count.zero_()
        else:
            self._place.copy_(self._local)
            self._count.fill_(1.0)


class _Bucket:
    """Gradients that are exchanged together."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        sizes = [parameter.numel() for _, parameter in named]
        self.buffer = torch.zeros(sum(sizes) + len(named), device=named[0][1].device)
        *places, self.counts = torch.split(self.buffer, [*sizes, len(named)])
        self.missing = len(named)
        self.entries = [
            _Entry(name, parameter, place.view(parameter.shape), self.counts[number])
            for number, ((name, parameter), place) in enumerate(zip(named, places, strict=True))
        ]


def _make_buckets(named: list[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[_Bucket]:
    """Trained parameters from the last to the first, in buckets of at most so many bytes, but at least one each."""
    groups: list[list[tuple[str, nn.Parameter]]] = []
    used = 0
    for name, parameter in reversed(named):
        if not parameter.requires_grad:
            continue
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"dense parameter {name!r} is {parameter.dtype}: several trainers add gradients in float32, convert "
                "the model with model.float()"
            )
        size = parameter.numel() * parameter.element_size()
        if not groups or used + size > bucket_bytes:
            groups.append([])
            used = 0
        groups[-1].append((name, parameter))
        used += size
    return [_Bucket(group) for group in groups]


def _bytes_of(parameter: nn.Parameter) -> Any:
    return parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _digest(data: Any, words: int) -> Tensor:
    digest = hashlib.blake2b(data, digest_size=4 * words).digest()
    return torch.from_numpy(np.frombuffer(digest, np.int32).copy())
