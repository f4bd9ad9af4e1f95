"""BlockRegistry: the blocks of a model in their order, by name."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .._torch import torch
from ..errors import StagehandOOMError
from ..modes.block import find_blocks

nn = torch.nn


@dataclass(frozen=True)
class BlockEntry:
    """A block. module_ref(): the module, None once it has ended. size_bytes: of its parameters, as they are. dtype: of
    the first of them. exec_order: its place."""

    block_id: str
    module_ref: weakref.ref
    size_bytes: int
    dtype: torch.dtype
    group: str
    exec_order: int


class BlockRegistry:
    """Blocks that a pattern or a list names. It takes no more once it was validated."""

    def __init__(self) -> None:
        self._entries: dict[str, BlockEntry] = {}
        self._model: weakref.ref | None = None
        self._frozen = False

    def build_from_model(self, model: nn.Module, block_pattern: str, group: str = "transformer",
                         dtype: torch.dtype | None = None) -> None:
        """Adds the modules whose names the pattern matches by regex search. dtype: that the caller will cast to, for
        `BlockEntry.dtype`; None: the block's own. Raises what StagehandRuntime raises for a pattern."""
        self._add(find_blocks(model, block_pattern), group, dtype)
        self._model = weakref.ref(model)

    def build_from_module_list(self, modules: Iterable[tuple[str, nn.Module]], group: str = "transformer",
                               dtype: torch.dtype | None = None) -> None:
        """Adds (name, module) pairs in their order; a module that is there already is passed by."""
        self._add(modules, group, dtype)

    def _add(self, modules, group: str, dtype) -> None:
        if self._frozen:
            raise RuntimeError("the registry is frozen, because it was validated: make a new one")
        known = {id(entry.module_ref()) for entry in self._entries.values()}
        for name, module in modules:
            if id(module) in known:
                continue
            known.add(id(module))
            params = list(module.parameters())
            own = params[0].dtype if params else torch.get_default_dtype()
            nbytes = sum(p.numel() * p.element_size() for p in params)
            self._entries[name] = BlockEntry(name, weakref.ref(module), nbytes, dtype or own, group, len(self._entries))

    def validate(self, pool_capacity_bytes: int) -> None:
        """Freezes it. StagehandOOMError for a block that is larger than the pool."""
        for entry in self._entries.values():
            if entry.size_bytes > pool_capacity_bytes:
                raise StagehandOOMError(f"block {entry.block_id} of {entry.size_bytes} bytes exceeds pool capacity "
                                        f"({pool_capacity_bytes} bytes): make the pool larger", object=entry.block_id)
        self._frozen = True

    @property
    def model(self) -> nn.Module | None:
        """The model that it was built from; None where it was a list, or the model has ended."""
        return self._model() if self._model is not None else None

    def get(self, block_id: str) -> BlockEntry:
        """KeyError where there is none."""
        return self._entries[block_id]

    def blocks_in_order(self) -> list[BlockEntry]:
        return list(self._entries.values())

    def groups(self) -> list[str]:
        return list(dict.fromkeys(entry.group for entry in self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id) -> bool:
        return block_id in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __repr__(self) -> str:
        return f"BlockRegistry({len(self)} blocks, {'frozen' if self._frozen else 'open'})"
