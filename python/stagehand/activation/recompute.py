"""Saved tensors that can be computed again at little cost from others that are saved anyway.

An activation function saves its input, and the layer behind it saves its output: the output need not be kept. It costs
the device's memory one read and one write to compute again, as much as copies out and back, and no link.

A `Recipe` says how. It is found by walking from the tensor's node over views and a cast to an operator of `OPERATORS`
whose own saved inputs went through our hooks. It is believed once it has given the same bits as the tensor itself
had, for the same save of the pass: a change that autograd does not see (`y.data`) shows there, one that comes later in
`proof.py`. Before it has been tried a tensor is kept or spilled as any other. Nothing is taken from one pass to the
next but that belief: what a recipe is made of is read again each time, for the same save may be another tensor's.
"""

from __future__ import annotations

import threading

from .. import _core
from .._torch import torch, view
from ..weights.saved import Kept, Saver, hook_of, look

sequence = getattr(torch._C._autograd, "_get_sequence_nr", None)  # of the next node; None: nothing is computed again
# None: it is C's, as in PyTorch 2.15, and no frame tells that a Function saves. The hooks of what was saved do there.
FUNCTION = getattr(torch.autograd.Function.apply, "__code__", None)
SAVER = Saver.pack_other.__code__
NORM = getattr(torch.nn.functional.layer_norm, "__code__", None)
VIEWS = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"))
DEEPEST = 2  # recipes whose inputs are recipes; each more would compute all below it again
TRIES = 4096  # comparisons with what is there, each of which waits for the device
SAVES = 1 << 15  # entries of what a pass saved: where nothing comes to the store, passes do not end

# name of the node: what it saved, of which so many must be there; what else it knows; the operator, of inputs and that.
# A layer norm's node does not know its eps.
LAYER_NORM = "NativeLayerNormBackward0"
OPERATORS = {
    "GeluBackward0": (("self",), 1, lambda node: node._saved_approximate,
                      lambda inputs, how: torch._C._nn.gelu(inputs[0], approximate=how)),
    "SiluBackward0": (("self",), 1, lambda node: None, lambda inputs, _: torch.nn.functional.silu(inputs[0])),
    "MulBackward0": (("self", "other"), 2, lambda node: None, lambda inputs, _: torch.mul(*inputs)),
    LAYER_NORM: (("input", "weight", "bias"), 1, lambda node: tuple(node._saved_normalized_shape),
                 lambda inputs, how: torch.native_layer_norm(inputs[0], how[0], inputs[1], inputs[2], how[1])[0]),
}


class Recipe:
    """How a tensor's storage is computed again. inputs: as autograd's hooks packed them, None where there is none."""

    __slots__ = ("kind", "inputs", "depth")

    def __init__(self, name: str, inputs: list, how, dtype) -> None:
        self.kind = name, how, dtype
        self.inputs = inputs
        below = [packed.storage.recipe for packed in inputs if packed is not None and type(packed) is not Kept]
        self.depth = 1 + max((recipe.depth for recipe in below if recipe is not None), default=0)

    def __str__(self) -> str:
        return f"{self.kind[0].removesuffix('Backward0')} ({self.kind[2]})"

    def run(self, tensors: list):
        """The bytes of the storage, from the inputs' tensors. Nothing waits for the device."""
        kind = tensors[0].device.type
        if not torch.is_autocast_enabled(kind):
            return self._compute(tensors)
        with torch.autocast(kind, enabled=False):
            return self._compute(tensors)

    def gives(self, tensors: list, tensor) -> bool:
        """Whether they are those of `tensor`, bit for bit: NaN is equal to itself, 0.0 is not -0.0. Waits for the
        device."""
        return torch.equal(self.run(tensors), _bytes(tensor))

    def _compute(self, tensors: list):
        name, how, dtype = self.kind
        with torch.no_grad():
            return _bytes(OPERATORS[name][3](tensors, how).to(dtype))


class Recipes:
    """The recipes of one runtime. unpack: the function of its hooks. Threads: one at a time."""

    def __init__(self, unpack) -> None:
        self._unpack = unpack
        # Saves of this pass that came through our hooks: thread, number of the node that saves, edge of what it saves.
        self._saves: set[tuple] = set()
        self._eps: dict[tuple, float] = {}  # of layer norms of this pass: thread, number of the node
        self._believed: dict[int, tuple] = {}  # number of the save in its pass -> kind of its recipe
        self._tries = TRIES

    def begin(self) -> None:
        """A pass begins."""
        self._saves.clear()
        self._eps.clear()

    def end(self) -> None:
        """Nothing is believed or tried any more."""
        self._believed.clear()
        self._tries = 0

    def saves(self, tensor, frame) -> None:
        """Our hook was called for a tensor. frame: the caller's, which knows a layer norm's eps; None in a thread of
        autograd. An operator's node has the last number given out; a Function saves when it is over, and others may
        have come since its own."""
        if frame is not None and frame.f_code is SAVER:
            frame = frame.f_back
        if tensor.grad_fn is None or frame is not None and FUNCTION is not None and frame.f_code is FUNCTION:
            return
        if len(self._saves) >= SAVES:
            self.begin()
        node = threading.get_ident(), sequence() - 1
        self._saves.add((*node, tensor.grad_fn._sequence_nr(), tensor.output_nr))
        if frame is not None and frame.f_code is NORM:
            self._eps[node] = frame.f_locals.get("eps")

    def _is_ours(self, node, saved: tuple) -> bool:
        """Whether what a node has saved is with our hooks. Others are not to be touched: a checkpoint's would compute
        its region."""
        me = threading.get_ident(), node._sequence_nr()
        if not any((*me, before._sequence_nr(), number) in self._saves
                   for before, number in node.next_functions if before is not None):
            return False
        if FUNCTION is not None:
            return True
        hooks = [hook_of(node, attribute) for attribute in saved]
        return all(hook is None or hook is _core.unpack_saved or getattr(hook, "__func__", None) is self._unpack
                   for hook in hooks)

    def find(self, ordinal: int, tensor, storage, open_now) -> Recipe | None:
        """A recipe that is believed for the `ordinal`-th save of the pass, or has just been tried. open_now(packed): an
        input's tensor if it is on the device, else None."""
        try:
            recipe = self._of(tensor, storage)
            if recipe is None:
                return None
            if self._believed.get(ordinal) == recipe.kind:
                return recipe
            return self._tried(recipe, ordinal, tensor, open_now)
        except LookupError:
            return None

    def _of(self, tensor, storage) -> Recipe | None:
        if tensor._version or tensor.storage_offset() or storage.nbytes() != tensor.numel() * tensor.element_size():
            return None
        node, cast = tensor.grad_fn, False
        while node is not None and (name := node.name()) not in OPERATORS:
            if name == "ToCopyBackward0" and not cast:
                cast = True
            elif name not in VIEWS:
                return None
            node = node.next_functions[0][0]
        if node is None:
            return None
        saved, least, how, _ = OPERATORS[name]
        if not self._is_ours(node, saved):
            return None
        inputs = [look(node, attribute) for attribute in saved]
        if None in inputs[:least]:
            return None
        if not all(packed is None or _fits(packed, tensor, cast) for packed in inputs):
            return None
        if cast and not tensor.is_contiguous():
            return None
        how = how(node)
        if name == LAYER_NORM:
            how = how, self._eps.get((threading.get_ident(), node._sequence_nr()))
            if not isinstance(how[1], (int, float)):
                return None  # it was not torch.nn.functional that was called
        recipe = Recipe(name, inputs, how, tensor.dtype)
        return recipe if recipe.depth <= DEEPEST else None

    def _tried(self, recipe: Recipe, ordinal: int, tensor, open_now) -> Recipe | None:
        if not self._tries:
            return None
        tensors = [None if packed is None else open_now(packed) for packed in recipe.inputs]
        if any(t is None and packed is not None for t, packed in zip(tensors, recipe.inputs)):
            return None
        self._tries -= 1
        try:
            if not recipe.gives(tensors, tensor):
                return None
        except torch.cuda.OutOfMemoryError:
            return None
        self._believed[ordinal] = recipe.kind
        return recipe


def _fits(packed, tensor, cast: bool) -> bool:
    """Whether an input is one to compute `tensor` from: not a weight that is streamed, on the same device, not changed
    since it was saved, and where there is a cast, which may have been one to another order of elements too, in the
    usual order."""
    if type(packed) is Kept:
        seen, contiguous = packed.tensor, packed.tensor.is_contiguous()
    elif hasattr(packed, "storage"):
        seen, contiguous = packed.witness, packed.contiguous
    else:
        return False
    return seen.device == tensor.device and seen._version == packed.version and (contiguous or not cast)


def _bytes(tensor):
    storage = tensor.untyped_storage()
    return view(tensor, 0, torch.uint8, (storage.nbytes(),), (1,))
