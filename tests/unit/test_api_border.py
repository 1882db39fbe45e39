"""What a script does around `bagpipe.prepare` is done exactly, or refused by name: nothing is wrong without a word.

Other ranks of torch.distributed, wrapped models, weights that were kept, frozen layers, and the compiler. Loaders that
overwrite their batches are in test_api_refilled.py.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import bagpipe
from bagpipe.errors import ConfigError, ModelError
from harness.plain import (
    Net,
    assert_close,
    assert_same_bits,
    loss_fn,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_fast,
    train_plain,
)
from harness.scripts import Trainers
from harness.started import assert_untouched, start, step, train
from harness.twice import assert_equal_to_plain

pytestmark = pytest.mark.usefixtures("nothing_left")


def run_script(tmp_path, text, *arguments):
    """A process of its own, started."""
    path = tmp_path / "script.py"
    path.write_text(text, encoding="utf-8")
    environment = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process):
    """What a process that ended well has printed."""
    printed, complained = process.communicate(timeout=240)
    assert process.returncode == 0, complained
    return printed


# Other ranks

RANKS = """
import sys
import torch
import bagpipe

rank, meeting = int(sys.argv[1]), sys.argv[2]
batches = [{"ids": torch.tensor([[rank]])}] * 3

def join(when):
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}-{when}", rank=rank, world_size=2)

for when in ("before", "after", "amid"):
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        if when == "before":
            join(when)
        model, optimizer, loader = bagpipe.prepare(model, optimizer, batches, cache=9)
        if when == "after":
            join(when)
        for number, batch in enumerate(loader):
            print("batch", number, "was given")
            if number == 1 and when == "amid":
                join(when)
    except bagpipe.errors.ConfigError as error:
        print(error)
    print(type(model[0]).__name__)
    print("over")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def test_ranks_of_a_process_group_are_refused_and_told_of_launch(tmp_path):
    processes = [run_script(tmp_path, RANKS, str(rank), str(tmp_path / "meeting")) for rank in range(2)]
    for rank, process in enumerate(processes):
        before, after, amid, _ = output_of(process).split("over\n")
        for printed, given in ((before, 0), (after, 0), (amid, 2)):
            assert f"rank {rank} of a torch.distributed group of 2" in printed
            assert "bagpipe launch --trainers 2 SCRIPT" in printed
            assert printed.count("was given") == given
        assert before.splitlines()[-1] == "EmbeddingBag"


def test_variables_of_torchrun_are_refused_before_a_batch_is_read(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    net, read = make_net(), []
    loader = (read.append(batch) or batch for batch in make_batches())
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=4.*bagpipe launch --trainers 4 SCRIPT"):
        bagpipe.prepare(net, sgd(net.parameters()), loader)
    assert not read
    assert_untouched(net)


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_variables_of_one_process_change_nothing(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    train(*start())


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_process_group_of_one_rank_trains_as_without_one():
    found = train_fast(make_net(), make_batches())
    distributed.destroy_process_group()
    expected = train_fast(make_net(), make_batches())
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert_same_bits(expected, found)


def test_trainers_of_a_launch_do_not_look_at_the_variables_of_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainers, nets = Trainers(2), [make_net() for _ in range(2)]

    def script(rank):
        net, optimizer, loader = start(net=nets[rank], **trainers.options(rank))
        train(net, optimizer, loader)
        return loader.trainers

    assert trainers.run(script) == [2, 2]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("part", ["", "top", "towers.0"])
def test_a_model_in_distributed_data_parallel_is_refused_and_told_what_to_do(part):
    net = make_net()
    net.towers = nn.ModuleList([nn.Linear(2, 2)])
    if not part:
        net = DistributedDataParallel(net)
    elif part == "top":
        net.top = DistributedDataParallel(net.top)
    else:
        net.towers[0] = DistributedDataParallel(net.towers[0])
    with pytest.raises(ModelError, match=rf"{part}.*DistributedDataParallel.*bagpipe launch --trainers N SCRIPT"):
        bagpipe.prepare(net, sgd(net.parameters()), make_batches())
    assert_untouched(net)


# Weights that were kept


class Regularised(Net):
    """Keeps the weights of its tables in a list and adds a penalty over them to its loss, as deepctr-torch does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.penalised = [self.user.weight, self.item.weight]

    def penalty(self):
        return sum(0.01 * weight.square().sum() for weight in self.penalised)


def test_a_gradient_for_a_weight_that_was_kept_is_refused_by_the_name_of_its_layer():
    net = Regularised()
    net, optimizer, loader = start(net=net)
    before = [weight.clone() for weight in net.penalised]
    with loader:
        batches = iter(loader)
        step(net, next(batches), optimizer)
        loss = loss_of(net, next(batches)) + net.penalty()
        with pytest.raises(ModelError, match=r"layer '(user|item)'.*AdamW\(weight_decay.*looks up"):
            loss.backward()
        with pytest.raises(ModelError, match="layer 'item'"):
            net.penalised[1].sum().backward()
    assert all(weight.grad is None for weight in net.penalised)
    assert all(torch.equal(*pair) for pair in zip(before, net.penalised, strict=True))


def test_weights_are_free_again_after_the_loop_and_taken_again_by_the_next():
    net, optimizer, loader = start(net=Regularised())
    train(net, optimizer, loader)
    net.penalty().backward()
    assert all(weight.grad is not None for weight in net.penalised)
    with loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(ModelError, match="layer"):
            net.penalty().backward()
    net.penalty().backward()


def test_a_weight_on_the_meta_device_refuses_its_gradients_too():
    net, *_ = start(net=Regularised(device="meta"))
    with pytest.raises(ModelError, match="layer 'user'"):
        net.penalised[0].sum().backward()


def test_a_weight_goes_with_its_model():
    net = make_net()
    weight = weakref.ref(net.user.weight)
    train(*start(net=net))
    del net
    gc.collect()
    assert weight() is None


def test_a_penalty_of_what_is_looked_up_is_that_of_plain_pytorch():
    def penalised(model, batch):
        vectors = [model.user(batch["user"]), model.item(batch["item"])]
        logits = model.top(torch.cat([*vectors, batch["dense"]], 1)).squeeze(1)
        dense = sum(parameter.square().sum() for parameter in model.top.parameters())
        return loss_fn(logits, batch["label"]) + 0.01 * (sum(v.square().sum() for v in vectors) + dense)

    expected = train_plain(make_net(), make_batches(), loss=penalised)
    assert_close(expected, train_fast(make_net(), make_batches(), loss=penalised))
    without = train_fast(make_net(), make_batches())
    assert not torch.allclose(expected["user.weight"], without["user.weight"])


def test_weight_decay_of_rows_is_that_of_plain_pytorch_where_every_batch_names_them():
    batches = make_batches()
    for batch in batches:
        batch["user"], batch["item"] = torch.arange(30).reshape(6, 5), torch.arange(20).repeat(6, 1)
    settings = {"lr": 0.01, "weight_decay": 0.3}
    plain = (lambda weights: torch.optim.AdamW(weights, **settings), sgd)
    expected = train_plain(make_net(), batches, plain)
    assert_close(expected, train_fast(make_net(), batches, bagpipe.optim.AdamW(**settings)))


# Hooks


@pytest.mark.parametrize(
    "add",
    [
        lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda _: None),
        lambda layer: layer.weight.register_hook(lambda _: None),
        lambda layer: layer.register_state_dict_post_hook(lambda *_: None),
        lambda layer: layer.register_load_state_dict_pre_hook(lambda *_: None),
    ],
)
def test_hooks_that_would_be_lost_are_refused_by_name(add):
    net = make_net()
    hook = add(net.item)
    with pytest.raises(ModelError, match="layer 'item' has hooks"):
        bagpipe.prepare(net, sgd(net.parameters()), make_batches())
    assert_untouched(net)
    hook.remove()
    train(*start(net=net))


# Freezing amid training


def freezing(when, whole):
    """A part of the model is frozen in the third batch, from a place of it on, and free in all others."""

    def script(model, optimizer, loader, log):
        for number, batch in enumerate(loader):
            part = model if whole else model.item
            part.requires_grad_(number != 2 or when != "before the forward pass")
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            part.requires_grad_(number != 2 or when not in ("before the forward pass", "before the backward pass"))
            if loss.requires_grad:
                loss.backward()
            part.requires_grad_(number != 2)
            optimizer.step()
            log.append(loss.item())

    return script


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("when", ["before the forward pass", "before the backward pass", "before the step"])
def test_a_layer_that_is_frozen_amid_training_stays_as_in_plain_pytorch(when, whole):
    assert_equal_to_plain(freezing(when, whole))


def with_its_own_way_to_freeze():
    net = make_net()

    class Own(type(net)):
        def requires_grad_(self, requires_grad=True):
            next(part for part in self.modules() if isinstance(part, nn.Linear)).requires_grad_(requires_grad)
            return self

    net.__class__ = Own
    return net


def test_a_model_with_its_own_way_to_freeze_is_followed():
    assert_equal_to_plain(freezing("before the forward pass", True), model=with_its_own_way_to_freeze)


def test_a_part_of_a_model_freezes_its_own_tables_only():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = (nn.Sequential(nn.EmbeddingBag(9, 2), nn.Linear(2, 1)) for _ in range(2))

    towers = Towers()
    batches = [{"left": torch.tensor([[1]]), "right": torch.tensor([[2]])}] * 3
    features = {"left": "left.0", "right": "right.0"}
    towers, _, loader = bagpipe.prepare(towers, sgd(towers.parameters()), batches, cache=9, features=features)
    with loader:
        held = iter(loader)
        batch = next(held)
        towers.right.requires_grad_(False)
        assert towers.left(batch["left"]).requires_grad
        assert not any(parameter.requires_grad for parameter in towers.right.parameters())
        assert not towers.right(batch["right"]).requires_grad


def user_frozen():
    net = make_net()
    net.user.weight.requires_grad_(False)
    return net


def test_a_frozen_table_that_is_unfrozen_amid_training_is_trained_from_there_on():
    def script(model, optimizer, loader, log):
        for number, batch in enumerate(loader):
            model.user.requires_grad_(number >= 3)
            step(model, batch, optimizer)

    assert_equal_to_plain(script, model=user_frozen)


def test_a_model_may_be_frozen_while_it_is_evaluated_and_after_training():
    def script(model, optimizer, loader, log):
        for batch in loader:
            model.requires_grad_(False).eval()
            with torch.no_grad():
                log += [loss_of(model, other).item() for other in (*make_batches(2, seed=1), batch)]
            assert not model(batch).requires_grad
            model.requires_grad_(True).train()
            step(model, batch, optimizer)
        model.requires_grad_(False)
        assert not model(make_batches()[0]).requires_grad

    assert_equal_to_plain(script)


# The compiler

COMPILED = """
import sys
import torch
import bagpipe
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item, self.top = nn.EmbeddingBag(9, 2), nn.EmbeddingBag(9, 2), nn.Linear(4, 1)

    def forward(self, batch):
        return self.top(torch.cat([self.user(batch["user"]), self.item(batch["item"])], 1)).square().mean()

def loaded():
    print("torch._dynamo" in sys.modules)

batches = [{name: torch.randint(0, 9, (5, 2)) for name in ("user", "item")} for _ in range(6)]
net, plain, graphs = Net(), Net(), []
prepare = bagpipe.prepare
loaded()  # by torch, with the first optimizer

def keep(graph, _):
    graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
    return graph.forward

optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer, loader = prepare(net, optimizer, batches, cache=60)
for number, batch in enumerate(loader):
    if number == 2:
        model = torch.compile(net, backend=keep)
    optimizer.zero_grad()
    (model if number >= 2 else net)(batch).backward()
    optimizer.step()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for batch in batches:
    optimizer.zero_grad()
    plain(batch).backward()
    optimizer.step()
for name, value in plain.state_dict().items():
    torch.testing.assert_close(net.state_dict()[name], value)
torch.testing.assert_close(model(batches[0]), plain(batches[0]))
print(sorted({name for names in graphs for name in names}))
"""


def test_the_compiler_is_not_loaded_by_bagpipe_and_finds_no_look_up_in_its_graphs(tmp_path):
    assert output_of(run_script(tmp_path, COMPILED)).splitlines() == ["False", "['cat', 'linear']"]
