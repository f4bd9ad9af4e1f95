"""`FileWeight`: a frozen Parameter whose values are in a file and nowhere else: a packed one, or one that is not
mapped (`map=False`).

No memory of the host holds its values, so it cannot be a tensor over bytes. Whatever reads it (an operator,
state_dict, a copy, a pickle, a forward after shutdown) has its values read again, right and slow; whatever writes it,
or a view of it, is refused. Streaming reads the file's own bytes and never comes here.

States: of the file; after `param.data = x` an alias of x, which the session refuses to stream. Threads: any.
"""

from __future__ import annotations

from torch.utils import _pytree

from .._torch import aside, observed, torch, view
from ..errors import StagehandError
from .leased import Copied

nn = torch.nn
UNPACK = ("is a weight of a packed file and cannot be written: unpack the file (`stagehand unpack`) and load that "
          "to change its weights")
UNMAPPED = "was loaded with map=False, reads its file and cannot be written: load with map=True to change its weights"


class Unheld(Copied, torch.Tensor):
    """A Parameter whose values no memory of the host holds as they are."""

    __slots__ = ()
    _is_param = True  # what makes isinstance(weight, nn.Parameter) hold

    def now(self) -> torch.Tensor:
        """The values as a plain tensor."""
        raise NotImplementedError

    def plain_copy(self) -> nn.Parameter:
        """A Parameter with the values, in memory of its own."""
        if observed():
            with aside():
                return self.plain_copy()
        values = self.now().clone() if torch.Tensor.data_ptr(self) else self.now()
        param = nn.Parameter(values, requires_grad=self.requires_grad)
        param.__dict__.update(self.__dict__)
        return param

    def __reduce_ex__(self, protocol):
        return self.plain_copy().__reduce_ex__(protocol)


class ReadOnly(torch.Tensor):
    """A tensor that has its values from a function when an operator asks for them, and that cannot be written."""

    __slots__ = ("_name", "_read", "_unlock")
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def over(cls, name: str, shape, dtype: torch.dtype, read, strides=None, unlock=UNPACK):
        """read() -> the values, of this shape and dtype. strides: None for those of a contiguous tensor. unlock: why it
        cannot be written, and what to do about it."""
        self = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device="cpu",
                                                   requires_grad=False)
        self._name, self._read, self._unlock = name, read, unlock
        return self

    def now(self) -> torch.Tensor:
        """The values as a plain tensor: those that it reads, or those that it was given by `data =`."""
        if observed():
            with aside():
                return self.now()
        if self.data_ptr():
            whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.untyped_storage())
            return view(whole, self.storage_offset() * self.element_size(), self.dtype, self.shape, self.stride())
        return self._read()

    @property
    def data(self):
        """Without a gradient; read-only as well."""
        if observed():
            with aside():
                return self.data
        if self.data_ptr():
            return self.now()
        return ReadOnly.over(self._name, self.shape, self.dtype, self._read, self.stride(), self._unlock)

    @data.setter
    def data(self, value) -> None:
        torch.Tensor.data.__set__(self, value)

    def detach(self) -> torch.Tensor:
        """A plain tensor with the values, in memory of its own: what state_dict has."""
        return self.now()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, func._schema
        for written in writes_to(schema, args, kwargs):
            if isinstance(written, ReadOnly) and not written.data_ptr():
                raise StagehandError(f"{written._name} {written._unlock}", object=written._name)
        sources = [value for value in _pytree.tree_leaves((args, kwargs)) if isinstance(value, ReadOnly)]
        args, kwargs = _pytree.tree_map_only(ReadOnly, ReadOnly.now, (args, kwargs))
        out = func(*args, **kwargs)
        views = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
        if sources[0].data_ptr() or not views:
            return out
        return _pytree.tree_map_only(torch.Tensor, lambda part: _seen(sources[0], part), out)


class FileWeight(ReadOnly, Unheld):
    """shape, dtype: of the values. Its strides are those of a contiguous tensor."""

    __slots__ = ()


def _seen(source: ReadOnly, values: torch.Tensor) -> ReadOnly:
    """A view of values that were read: a write to it would be lost."""
    return ReadOnly.over(source._name, values.shape, values.dtype, lambda: values, values.stride(), source._unlock)


def writes_to(schema, args, kwargs):
    """The tensors that an operator would write."""
    for index, argument in enumerate(schema.arguments if schema.is_mutable else ()):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from value if isinstance(value, (list, tuple)) else (value,)


def make_plain(model: nn.Module, chosen) -> list[tuple]:
    """Gives the model plain Parameters for those FileWeights for which chosen(weight) holds; tied ones stay tied.
    Returns [(module, key, weight)] of what was replaced."""
    new: dict[int, nn.Parameter] = {}
    replaced = []
    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            for key, param in list(module._parameters.items()):
                if not isinstance(param, FileWeight) or not chosen(param):
                    continue
                if id(param) not in new:
                    new[id(param)] = param.plain_copy()
                replaced.append((module, key, param))
                put(module, key, new[id(param)])
    return replaced


def put(module: nn.Module, key: str, param) -> None:
    """Sets a parameter of a module, in an RNN's own list of them too."""
    module._parameters[key] = param
    list_flat(module, module._parameters)


def list_flat(module: torch.nn.Module, params: dict) -> None:
    """An RNN's own list of its weights has these, and those that are no parameters stay. Other modules have none."""
    listed = module.__dict__.get("_flat_weights")
    if listed is not None:
        module.__dict__["_flat_weights"] = flat(module._flat_weights_names, listed, params)


def flat(names: list, listed: list, params: dict) -> list:
    """What an RNN lists under these names, with these parameters in place of those that have a name among them."""
    return [params[name] if name in params else weight for name, weight in zip(names, listed)]
