"""Values are right at any moment of training: whatever a program does between or inside steps gives, bit for
bit, what it gives on the unwrapped model. A slow link, so that a missing wait shows."""

import copy
import io
import pickle
import warnings

import pytest
import torch

import card
from support import (
    AttentionNet, ConvNet, RecurrentNet, Stack, TinyLM, aligned_copy, made, nbytes, runtime, same, tight_budget, wrap)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

SLOW = 1e8  # bytes/s
STEPS = 5


class Checkpointed(Stack):
    """Its blocks are recomputed in backward."""

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.out(x)


def room(model) -> int:
    """A budget at which at least half of the blocks of a Stack stream, and a part of models with several large
    layers."""
    if isinstance(model, Stack):
        return tight_budget(model)
    share = {AttentionNet: 0.75, TinyLM: 0.75, RecurrentNet: 0.875}.get(type(model), 2)
    return int(nbytes(model) * share)


def build(kind=Checkpointed, *args, frozen=False):
    return made(kind, *(args or ((6, 40) if kind is Checkpointed else ())), frozen=frozen).train()


def compare(script, model, budget=room):
    """Runs script(net, manage) on the model and on an aligned copy of it; both must give the same tensors and be
    left with the same state. manage(net) is to be called once: there the model comes under stagehand."""
    ref = aligned_copy(model)
    managed = []

    def manage(net):
        managed.append(wrap(net, budget(net), SLOW))
        return net

    torch.manual_seed(7)
    wanted = script(ref, lambda net: net)
    torch.manual_seed(7)
    got = script(model, manage)
    assert managed and wanted
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert equal(mine, theirs), f"value {i} differs"
    assert equal(model.state_dict(), ref.state_dict())
    assert runtime(managed[0]).stats["h2d_bytes"] > 0
    return managed[0]


def equal(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return same(a, b) if isinstance(a, torch.Tensor) else a == b


def batch(net, n=4):
    return net.example(n)


def step(net, optimizer, log):
    """One step of training towards the input, or towards nothing where that is of another shape."""
    x = batch(net)
    out = net(*x)
    loss = F.mse_loss(out, x[0].to(out)) if out.shape == x[0].shape else out.square().mean()
    loss.backward()
    log.append(loss.detach().clone())
    del out, loss
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def sgd(net, **options):
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05, momentum=0.9, **options)


def values(net) -> dict:
    return {name: value.clone() for name, value in net.state_dict().items()}


# ---------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("before", [True, False], ids=["made before wrapping", "made after"])
@pytest.mark.parametrize("kind, foreach", [
    (torch.optim.SGD, True), (torch.optim.AdamW, False), (torch.optim.Adagrad, True), (torch.optim.RMSprop, False)])
def test_optimizers(kind, foreach, before):
    # A denominator near zero magnifies a card's rounding.
    options = {"lr": 0.01, "foreach": foreach}
    if card.ON_CARD and kind is not torch.optim.SGD:
        options["eps"] = 1e-2

    def script(net, manage):
        log = []
        if before:
            optimizer = kind(net.parameters(), **options)
        manage(net)
        if not before:
            optimizer = kind(net.parameters(), **options)
        for _ in range(STEPS):
            step(net, optimizer, log)
        log += [state[key] for state in optimizer.state.values() for key in sorted(state)]
        return log

    compare(script, build())


@card.on_the_host
def test_an_optimizer_that_calls_the_model_again():
    def script(net, manage):
        manage(net)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)
        x, log = batch(net)[0], []

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), card.there(x))
            loss.backward()
            log.append(loss.detach().clone())
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return log

    compare(script, build(Checkpointed, 4, 24))


def test_schedulers_clipping_and_accumulation():
    def script(net, manage):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
        manage(net)
        log = []
        for _ in range(STEPS):
            for _ in range(3):
                step(net, None, log)
            log.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
            nn.utils.clip_grad_value_(net.parameters(), 0.01)
            log += [p.grad.clone() for p in net.parameters()]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=len(log) % 2 == 0)
        return log

    compare(script, build())


def test_the_state_of_an_optimizer_goes_to_another_and_comes_back():
    def script(net, manage):
        manage(net)
        optimizer, log = torch.optim.AdamW(net.parameters(), lr=0.01), []
        for _ in range(2):
            step(net, optimizer, log)
        file = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        for _ in range(2):
            step(net, optimizer, log)
        file.seek(0)
        saved = torch.load(file)
        net.load_state_dict(saved["model"])
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
        optimizer.load_state_dict(saved["optimizer"])
        for _ in range(2):
            step(net, optimizer, log)
        return log

    compare(script, build())


def test_optimizers_that_step_inside_backward():
    def script(net, manage):
        manage(net)
        log, optimizers = [], {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in net.parameters()}

        def hook(param):
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in net.parameters():
            param.register_post_accumulate_grad_hook(hook)
        for _ in range(STEPS):
            step(net, None, log)
        return log

    compare(script, build(Stack, 6, 40))


# ---------------------------------------------------------------------- reading and writing between steps


def test_state_dicts_while_training():
    def script(net, manage):
        manage(net)
        optimizer, log = sgd(net), []
        for _ in range(STEPS):
            step(net, optimizer, log)
            log += [values(net), values(net.blocks[1])]
            log.append([p.detach().clone() for p in net.parameters()])
        return log

    compare(script, build())


def test_a_state_dict_in_a_hook_of_a_block():
    def script(net, manage):
        manage(net)
        optimizer, log = sgd(net), []
        net.blocks[3].register_forward_hook(lambda *args: log.append(values(net)))
        net.blocks[3].register_full_backward_hook(lambda *args: log.append(values(net)))
        for _ in range(3):
            step(net, optimizer, log)
        return log

    compare(script, build(Stack, 5, 40))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_load_state_dict_while_training(assign, strict):
    def script(net, manage):
        manage(net)
        optimizer, log, first = sgd(net), [], values(net)
        for i in range(STEPS):
            step(net, optimizer, log)
            if i == 2:
                state = {name: value.clone() for name, value in first.items()}
                if not strict:
                    del state["blocks.1.up.weight"]
                    state["unknown"] = torch.zeros(3)
                log.append(str(net.load_state_dict(state, strict=strict, assign=assign)))
                optimizer = sgd(net)  # assign gives the model other Parameters
                log.append(values(net))
        return log

    compare(script, build())


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_with_a_gradient_pending(assign):
    """Between backward and the optimizer's step."""
    def script(net, manage):
        manage(net)
        optimizer, log, first = sgd(net), [], values(net)
        for i in range(STEPS):
            step(net, None, log)
            if i == 2:
                net.load_state_dict({name: value.clone() for name, value in first.items()}, assign=assign)
                log.append([p.grad is None for p in net.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            log.append(values(net))
        return log

    compare(script, build())


def test_weights_written_in_every_way_between_steps():
    def script(net, manage):
        manage(net)
        optimizer, log = sgd(net), []
        writes = [lambda p: p.data.mul_(0.5), lambda p: p.data.copy_(p.data * 2), lambda p: p.detach().add_(0.01),
                  lambda p: nn.init.constant_(p, 0.02), lambda p: p.requires_grad_(False).mul_(2).requires_grad_(True),
                  lambda p: setattr(p, "data", p.data * 1.5)]
        for i, write in enumerate(writes):
            step(net, optimizer, log)
            with torch.no_grad():
                write(net.blocks[i % 4].up.weight)
        step(net, optimizer, log)
        return log

    compare(script, build())


@card.on_the_host
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_while_training(way):
    def copied(net):
        if way == "deepcopy":
            return copy.deepcopy(net)
        if way == "pickle":
            return pickle.loads(pickle.dumps(net))
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def script(net, manage):
        manage(net)
        optimizer, log, twins = sgd(net), [], []
        for _ in range(3):
            step(net, optimizer, log)
            twins.append(copied(net))
            log.append(values(twins[-1]))
        for twin in twins:  # a copy trains on its own
            step(twin, sgd(twin), log)
            log.append(values(twin))
        return log

    compare(script, build())


def test_copies_with_gradients():
    def script(net, manage):
        manage(net)
        log = []
        step(net, None, log)
        twin = copy.deepcopy(net)
        log += [p.grad for p in twin.parameters()]
        step(net, None, log)
        return log + [p.grad for p in net.parameters()] + [p.grad for p in twin.parameters()]

    compare(script, build())


# ---------------------------------------------------------------------- requires_grad


def test_requires_grad_switched_on_and_off_between_steps():
    def script(net, manage):
        manage(net)
        log = []
        for i in range(8):
            for j, block in enumerate(net.blocks):
                block.requires_grad_((i + j) % 3 == 0)
            net.inp.weight.requires_grad_(i % 2 == 0)
            optimizer = sgd(net)
            step(net, None, log)
            log.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
            optimizer.step()
            net.zero_grad()
        return log

    compare(script, build())


def test_frozen_at_first_and_trained_later():
    def script(net, manage):
        manage(net)
        log = []
        with torch.no_grad():
            log.append(net(*batch(net)))
        net.out.requires_grad_(True)
        for _ in range(2):
            step(net, sgd(net), log)
        net.requires_grad_(True)
        optimizer = sgd(net)
        for _ in range(3):
            step(net, optimizer, log)
        net.requires_grad_(False)
        log.append(net(*batch(net)))
        return log

    compare(script, build(frozen=True))


def test_evaluation_between_steps():
    def script(net, manage):
        manage(net)
        optimizer, log = sgd(net), []
        for _ in range(STEPS):
            step(net, optimizer, log)
            net.eval()
            with torch.inference_mode():
                log.append(net(*batch(net)).clone())
            with torch.no_grad():
                log.append(net(*batch(net)))
            net.train()
        return log

    compare(script, build())


# ---------------------------------------------------------------------- adapters


class LoRA(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)

    @torch.no_grad()
    def merge(self):
        self.base.weight += self.up @ self.down
        return self.base


@card.on_the_host
def test_adapters_added_trained_merged_and_trained_again():
    def script(net, manage):
        manage(net)
        log = []
        with torch.no_grad():
            log.append(net(*batch(net)))
        for block in net.blocks[::2]:
            block.up = LoRA(block.up)
        optimizer = sgd(net)
        for _ in range(3):
            step(net, optimizer, log)
        log.append(values(net))
        for block in net.blocks[::2]:
            block.up = block.up.merge()
        log.append(values(net))
        with torch.no_grad():
            log.append(net(*batch(net)))
        for block in net.blocks[1::2]:
            block.down = LoRA(block.down)
        optimizer = sgd(net)
        for _ in range(3):
            step(net, optimizer, log)
        for block in net.blocks[1::2]:
            block.down = block.down.base
        net.requires_grad_(True)
        for _ in range(2):
            step(net, sgd(net), log)
        return log

    compare(script, build(frozen=True))


def test_adapters_there_before_wrapping():
    def script(net, manage):
        for block in net.blocks:
            block.up = LoRA(block.up)
        optimizer = sgd(net)
        manage(net)
        log = []
        for _ in range(STEPS):
            step(net, optimizer, log)
        return log + [values(net)]

    compare(script, build(frozen=True))


# ---------------------------------------------------------------------- averages


@card.on_the_host
def test_averaged_models_of_torch():
    def script(net, manage):
        manage(net)
        average = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        plain = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
        optimizer, log = sgd(net), []
        for _ in range(STEPS):
            step(net, optimizer, log)
            average.update_parameters(net)
            plain.update_parameters(net)
            log += [values(average), values(plain)]
        average.train(net.training)
        plain.train(net.training)
        x = batch(net)
        return log + [average(*x).detach(), plain(*x).detach()]

    compare(script, build())


def test_an_average_by_hand():
    def script(net, manage):
        manage(net)
        shadow = {name: p.data.clone() for name, p in net.named_parameters()}
        optimizer, log = sgd(net), []
        for i in range(STEPS):
            step(net, optimizer, log)
            for name, param in net.named_parameters():
                shadow[name].mul_(0.9).add_(param.data, alpha=0.1)
            log.append({name: value.clone() for name, value in shadow.items()})
            if i % 2:  # evaluated with the averages in place of the weights
                kept = [param.data.clone() for param in net.parameters()]
                for name, param in net.named_parameters():
                    param.data.copy_(shadow[name])
                with torch.no_grad():
                    log.append(net(*batch(net)))
                for param, data in zip(net.parameters(), kept):
                    param.data.copy_(data)
        return log

    compare(script, build())


def test_an_average_that_swaps_data():
    def script(net, manage):
        manage(net)
        shadow = [p.data.clone() for p in net.parameters()]
        optimizer, log = sgd(net), []
        for _ in range(3):
            step(net, optimizer, log)
            for mine, param in zip(shadow, net.parameters()):
                mine.lerp_(param.data, 0.5)
            kept = [param.data for param in net.parameters()]
            for param, data in zip(net.parameters(), shadow):
                param.data = data.clone()
            with torch.no_grad():
                log.append(net(*batch(net)))
            for param, data in zip(net.parameters(), kept):
                param.data = data
        return log + [values(net)]

    compare(script, build())


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("way", ["data", "parameter"])
def test_old_data_that_is_still_held_stays_what_it_was(way, trained):
    """Restoring the best weights by references to them, as some trainers do."""
    model = made(Stack, 4, 40, frozen=not trained)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model) + (1 << 14), 1e9)
    held = []
    for round in range(4):
        x = model.example()[0]
        assert same(model(x), ref(x))
        for net in (model, ref):
            layer = net.blocks[round].up
            held.append((layer.weight.data, layer.weight.data.clone()))
            if way == "data":
                layer.weight.data = layer.weight.data * 2
            else:
                layer.weight = nn.Parameter(layer.weight.data * 2, requires_grad=trained)
        assert same(model(x), ref(x))
        assert all(same(data, copy) for data, copy in held)
    for net, (data, _) in zip((model, ref), held):
        net.blocks[0].up.weight.data = data
    x = model.example()[0]
    for _ in range(2):
        assert same(model(x), ref(x))


@card.on_the_host
def test_where_weights_share_a_place_old_data_that_is_held_keeps_its_values():
    model = made(RecurrentNet)
    ref = aligned_copy(model)
    wrap(model, 2 * nbytes(model))
    for name in ("weight_ih_l0", "weight_hh_l0"):
        held = getattr(model.lstm, name).data
        before = held.clone()
        for net in (model, ref):
            weight = getattr(net.lstm, name)
            weight.data = weight.data * 2
        x = model.example()[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.no_grad():
                assert same(model(x), ref(x))
        assert same(held, before)
        assert same(getattr(model.lstm, name).data, before * 2)


# ---------------------------------------------------------------------- parametrizations


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Scaled(nn.Module):
    """With a weight of its own."""

    def __init__(self, d=40):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(d, 1) + 0.5)

    def forward(self, x):
        return x * self.scale


NORMS = {
    "weight_norm": lambda module: parametrizations.weight_norm(module),
    "spectral_norm": lambda module: parametrizations.spectral_norm(module),
    "an own one": lambda module: parametrize.register_parametrization(module, "weight", Symmetric()),
    "one with weights": lambda module: parametrize.register_parametrization(module, "weight", Scaled()),
    "old weight_norm": lambda module: nn.utils.weight_norm(module),
    "old spectral_norm": lambda module: nn.utils.spectral_norm(module),
}


@card.on_the_host
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("norm", NORMS)
def test_parametrizations(norm, when):
    def script(net, manage):
        def register():
            torch.manual_seed(3)
            for block in net.blocks[::2]:
                home = block.up.weight.device
            NORMS[norm](block.up.cpu()).to(home)  # its first vectors are the CPU generator's

        if when == "before":
            register()
        manage(net)
        log = []
        if when == "after":
            with torch.no_grad():
                log.append(net(*batch(net)))
            register()
        optimizer = sgd(net)
        for _ in range(STEPS):
            step(net, optimizer, log)
            log.append(values(net))
        net.eval()
        with torch.no_grad():
            log.append(net(*batch(net)))
        return log

    # The old ones compute the weight in a hook in front of the forward, which holds what it reads until backward.
    compare(script, build(Stack, 5, 40, 1), (lambda net: 2 * nbytes(net)) if norm.startswith("old") else room)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "an own one"])
def test_parametrizations_removed_again(norm):
    def script(net, manage):
        for block in net.blocks:
            home = block.up.weight.device
            NORMS[norm](block.up.cpu()).to(home)  # its first vectors are the CPU generator's
        manage(net)
        optimizer, log = sgd(net), []
        for _ in range(2):
            step(net, optimizer, log)
        with parametrize.cached():
            log.append(net(*batch(net)).detach())
        for block in net.blocks:
            parametrize.remove_parametrizations(block.up, "weight")
        optimizer = sgd(net)
        for _ in range(2):
            step(net, optimizer, log)
        return log

    compare(script, build(Stack, 4, 40, 1))


# ---------------------------------------------------------------------- kinds of modules


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [RecurrentNet, AttentionNet, TinyLM, ConvNet])
def test_kinds_of_modules(kind, frozen):
    def script(net, manage):
        manage(net)
        log = []
        net.requires_grad_(not frozen)
        if frozen:
            for param in [p for p in net.parameters() if p.dim() < 2]:
                param.requires_grad_(True)
        optimizer = sgd(net)
        for _ in range(STEPS):
            step(net, None, log)
            log.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                log.append(net(*batch(net)))
        return log

    compare(script, build(kind))


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("trained", ["all", "none but the input", "hidden weights"])
def test_recurrent_layers(cell, trained):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell(48, 272, num_layers=2, bidirectional=True, batch_first=True)
            self.out = nn.Linear(544, 48)

        def forward(self, x):
            return self.out(self.cell(x)[0])

        def example(self, n):
            return (torch.randn(n, 6, 48),)

    def script(net, manage):
        manage(net)
        log = []
        if trained != "all":
            net.cell.requires_grad_(False)
        if trained == "hidden weights":
            net.cell.weight_hh_l0.requires_grad_(True)
            net.cell.weight_hh_l1_reverse.requires_grad_(True)
        optimizer = sgd(net)
        for _ in range(3):
            x = net.example(4)[0].requires_grad_()
            loss = F.mse_loss(net(x), card.there(x.detach()))
            loss.backward()
            log += [loss.detach().clone(), x.grad]
            del loss
            optimizer.step()
            optimizer.zero_grad()
        return log + [values(net)]

    compare(script, build(Net))


def test_out_proj_of_attention_gets_its_gradient():
    def script(net, manage):
        manage(net)
        log = []
        for _ in range(3):
            step(net, None, log)
            log += [layer.out_proj.weight.grad.clone() for layer in net.layers]
            log += [layer.in_proj_weight.grad.clone() for layer in net.layers]
        return log

    compare(script, build(AttentionNet))
