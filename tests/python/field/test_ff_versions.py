"""Field cases, section FF: every PyTorch that is accepted. `make test-torch` runs all tests with another one."""

import subprocess
import sys
import threading

import support as s
import torch
from pairs import agree, pair, same_grads
from torch import nn

from stagehand import _core
from stagehand._torch import pop_hooks, push_hooks, top_hooks


def test_244_eight_layers_train_in_a_third_of_their_size():
    """As long as what autograd saves is recognised: leases would end behind backward otherwise."""
    torch.manual_seed(0)
    model, ref = pair(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), budget=lambda m: s.nbytes(m) // 3)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, ref)]
    for _ in range(3):
        x = torch.randn(4, 64)
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()
        same_grads(model, ref)
    agree(model, ref, 1, inputs=(torch.randn(4, 64),))
    stats = s.runtime(model).stats
    assert stats["device_peak"] + stats["reserved_bytes"] <= s.nbytes(model) // 3


def test_244_hooks_of_the_users_get_what_is_no_weight():
    """The pair below that of a managed call is asked, and saved tensors come back through it."""
    model, ref = pair(s.Stack, 3, 40)
    (x,) = model.example()
    counts = []
    for net in (model, ref):
        packed, opened = [], []

        def pack(tensor):
            packed.append(tensor.numel())
            return tensor.detach().clone(), tensor.requires_grad

        def unpack(saved):
            opened.append(saved[0].numel())
            return saved[0]

        net.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            net(x).pow(2).sum().backward()
        weights = {param.numel() for param in net.parameters()}
        counts.append(([n for n in packed if n not in weights], [n for n in opened if n not in weights]))
    assert counts[0] == counts[1] and counts[0][1]
    same_grads(model, ref)


def test_244_the_pair_in_force_is_the_last_that_this_thread_pushed():
    """As PyTorch tells it, and as it is read where PyTorch does not."""
    own = _core.find_top_hooks(push_hooks, pop_hooks)
    assert own is not None or hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    pairs, elsewhere = [None], []
    for top in {top_hooks, own or top_hooks}:
        for _ in range(40):  # more than a block of the stack holds
            pairs.append((lambda tensor: tensor, lambda tensor: tensor))
            push_hooks(*pairs[-1])
            assert top(True) == pairs[-1]
        thread = threading.Thread(target=lambda: elsewhere.append(top(True)))
        thread.start()
        thread.join()
        before = sys.getrefcount(pairs[-1][0])
        for _ in range(20):
            top(True)
        assert before - 10 < sys.getrefcount(pairs[-1][0]) < before + 10
        while len(pairs) > 1:
            assert top(True) == pairs.pop()
            pop_hooks()
        assert top(True) is None
    assert set(elsewhere) == {None}


def test_244_an_older_pytorch_is_refused_with_what_is_needed(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.3.1+cu118'\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import stagehand; stagehand.layer"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "ImportError: stagehand needs PyTorch 2.4 or newer; this is 2.3.1+cu118" in done.stderr
