"""safetensors' tests of reading with PyTorch, on stagehand.open_checkpoint. Files are written by safetensors."""

import safetensors.torch
from support import sort_out

import stagehand
from stagehand.errors import CheckpointError, NotFoundError

# What fails, with the reason.
KNOWN = {
    "*test_odd_dtype_fp4": "dtype F4, two numbers to a byte, is refused by name",
}


def load_file(filename, device="cpu", **backend):
    with stagehand.open_checkpoint(filename) as checkpoint:
        return {name: tensor.to(device) for name, tensor in checkpoint.items()}


class safe_open:
    """Names and whole tensors; a slice is a slice of the whole."""

    def __init__(self, filename, framework, device="cpu", **options):
        self._own = _safe_open(filename, framework, device, **options)
        self._device = device
        self._checkpoint = stagehand.open_checkpoint(filename) if framework in ("pt", "torch") else None

    def __enter__(self):
        self._own.__enter__()
        return self

    def __exit__(self, *error):
        if self._checkpoint is not None:
            self._checkpoint.close()
        return self._own.__exit__(*error)

    def get_tensor(self, name):
        if self._checkpoint is None:
            return self._own.get_tensor(name)
        return self._checkpoint[name].to(self._device)

    def __getattr__(self, name):
        return getattr(self._own, name)


_safe_open = safetensors.safe_open
safetensors.safe_open = safetensors.torch.safe_open = safe_open
safetensors.torch.load_file = load_file


def pytest_collection_modifyitems(items):
    sort_out(items, {}, KNOWN)
