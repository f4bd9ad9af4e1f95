"""`FileWeight`: a frozen Parameter whose values are in a quantised file and nowhere else.

No memory of the host holds it in full precision, so it cannot be a tensor over bytes. Whatever reads it (an operator,
state_dict, a copy, a pickle, a forward after shutdown) has its values decoded anew, right and slow; whatever writes it is
refused. Streaming reads the file's own bytes and never comes here.

States: of the file; after `param.data = x` an alias of x, which the session refuses to stream. Threads: any.
"""

from __future__ import annotations

from torch.utils import _pytree

from ._torch import torch, view
from .errors import StagehandError

nn = torch.nn


class FileWeight(torch.Tensor):
    """shape, dtype: of the values. Its strides are those of a contiguous tensor."""

    __slots__ = ("_name", "_read")
    _is_param = True  # what makes isinstance(weight, nn.Parameter) hold
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def over(name: str, shape, dtype: torch.dtype, read) -> FileWeight:
        """read() -> a fresh tensor with the values."""
        weight = torch.Tensor._make_wrapper_subclass(FileWeight, shape, dtype=dtype, device="cpu", requires_grad=False)
        weight._name, weight._read = name, read
        return weight

    def now(self) -> torch.Tensor:
        """The values as a plain tensor: fresh ones of the file, or those that it was given."""
        if self.data_ptr():
            whole = torch.empty(0, dtype=torch.uint8).set_(self.untyped_storage())
            return view(whole, self.storage_offset() * self.element_size(), self.dtype, self.shape, self.stride())
        return self._read()

    def plain(self) -> nn.Parameter:
        """A Parameter with the values, in memory of its own."""
        param = nn.Parameter(self.now(), requires_grad=self.requires_grad)
        param.__dict__.update(self.__dict__)
        return param

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            _refuse_writes(func._schema, args, kwargs)
        args, kwargs = _pytree.tree_map_only(FileWeight, FileWeight.now, (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = self.plain()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.plain().__reduce_ex__(protocol)


def _refuse_writes(schema, args, kwargs) -> None:
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, FileWeight) and not tensor.data_ptr():
                raise StagehandError(
                    f"{tensor._name} is a weight of a quantised file and cannot be written: unpack the file "
                    f"(`stagehand unpack`) and load that to change its weights", object=tensor._name)


def make_plain(model: nn.Module, chosen) -> list[tuple]:
    """Gives the model plain Parameters for those FileWeights for which chosen(weight) holds; tied ones stay tied. Returns
    [(module, key, weight)] of what was replaced."""
    new: dict[int, nn.Parameter] = {}
    replaced = []
    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            for key, param in list(module._parameters.items()):
                if not isinstance(param, FileWeight) or not chosen(param):
                    continue
                if id(param) not in new:
                    new[id(param)] = param.plain()
                replaced.append((module, key, param))
                put(module, key, new[id(param)])
    return replaced


def put(module: nn.Module, key: str, param) -> None:
    """Sets a parameter of a module, in an RNN's own list of them too."""
    module._parameters[key] = param
    if "_flat_weights" in module.__dict__:
        module._flat_weights = [module._parameters.get(n) for n in module._flat_weights_names]
