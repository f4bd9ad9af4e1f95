"""ResidencyMap: the state of each block. Of blocks that a StagehandScheduler runs it shows what the core says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidStateTransitionError
from ..report import BlockState

if TYPE_CHECKING:
    from .registry import BlockRegistry
    from .scheduler import StagehandScheduler

VALID_TRANSITIONS = {
    BlockState.UNLOADED: {BlockState.HOST_STAGED},
    BlockState.HOST_STAGED: {BlockState.PREFETCHING},
    BlockState.PREFETCHING: {BlockState.GPU_READY},
    BlockState.GPU_READY: {BlockState.EVICTING, BlockState.GPU_FREEING},
    BlockState.EVICTING: {BlockState.HOST_STAGED, BlockState.UNLOADED},
    BlockState.GPU_FREEING: {BlockState.UNLOADED},
}


@dataclass
class ResidencyEntry:
    """The entry of one block. refcount: uses that have begun and not ended. last_used_step: -1: not yet."""

    state: BlockState = BlockState.UNLOADED
    refcount: int = 0
    last_used_step: int = -1


class ResidencyMap:
    """States of a BlockRegistry's blocks. Until a StagehandScheduler takes it the caller moves them."""

    def __init__(self, registry: BlockRegistry) -> None:
        self._entries = {entry.block_id: ResidencyEntry() for entry in registry.blocks_in_order()}
        self._protected: dict[str, int] = {}  # block -> how often
        self._mover = None

    def follow(self, mover: StagehandScheduler) -> None:
        """A mover's blocks from now on: `mover.state(block_id)`, and `hold` and `let_go` of what is protected. None:
        states are as they were last, and the caller's to move."""
        for block_id in self._entries:
            self.get_entry(block_id)
        self._mover = mover
        for block_id in self._protected if mover is not None else ():
            mover.hold(block_id)

    def get_entry(self, block_id: str) -> ResidencyEntry:
        """KeyError where there is none."""
        entry = self._entries[block_id]
        if self._mover is not None:
            entry.state = self._mover.state(block_id)
        return entry

    def get_state(self, block_id: str) -> BlockState:
        return self.get_entry(block_id).state

    def transition(self, block_id: str, to: BlockState) -> None:
        """InvalidStateTransitionError for a move that there is not, and for a block that a runtime moves."""
        entry, to = self.get_entry(block_id), BlockState(to)
        if self._mover is not None:
            raise InvalidStateTransitionError(f"the runtime moves block {block_id}: its scheduler's before_block and "
                                              "after_block say what is used", object=block_id)
        if to not in VALID_TRANSITIONS[entry.state]:
            raise InvalidStateTransitionError(f"block {block_id} cannot go from {entry.state.name} to {to.name}",
                                              object=block_id)
        entry.state = to

    def increment_ref(self, block_id: str) -> None:
        self._entries[block_id].refcount += 1

    def decrement_ref(self, block_id: str) -> None:
        """ValueError below zero."""
        entry = self._entries[block_id]
        if entry.refcount <= 0:
            raise ValueError(f"block {block_id} is not in use: release each use once; no count falls below zero")
        entry.refcount -= 1

    # ------------------------------------------------------------------ who may leave

    def can_evict(self, block_id: str) -> bool:
        entry = self.get_entry(block_id)
        return entry.state is BlockState.GPU_READY and not entry.refcount and not self.is_protected(block_id)

    def gpu_resident_blocks(self) -> list[str]:
        return [block_id for block_id in self._entries if self.get_state(block_id) is BlockState.GPU_READY]

    def eviction_candidates(self, current_step: int, cooldown_steps: int) -> list[tuple[str, ResidencyEntry]]:
        """Blocks that may leave and were last used `cooldown_steps` steps ago or earlier."""
        return [(block_id, entry) for block_id, entry in self._entries.items()
                if self.can_evict(block_id) and entry.last_used_step <= current_step - cooldown_steps]

    def protect_blocks(self, block_ids: Iterable[str]) -> None:
        """They do not leave until as many unprotect_blocks. KeyError for one that there is not."""
        for block_id in [block_id for block_id in block_ids if self._entries[block_id]]:
            if block_id not in self._protected and self._mover is not None:
                self._mover.hold(block_id)
            self._protected[block_id] = self._protected.get(block_id, 0) + 1

    def unprotect_blocks(self, block_ids: Iterable[str]) -> None:
        for block_id in block_ids:
            left = self._protected.pop(block_id, 0) - 1
            if left > 0:
                self._protected[block_id] = left
            elif left == 0 and self._mover is not None:
                self._mover.let_go(block_id)

    def is_protected(self, block_id: str) -> bool:
        return block_id in self._protected

    def protected_eviction_candidates(self) -> list[tuple[str, ResidencyEntry]]:
        """Protected blocks on the device that are not in use, the oldest use first."""
        found = [(block_id, self.get_entry(block_id)) for block_id in self._protected]
        return sorted(((block_id, entry) for block_id, entry in found
                       if entry.state is BlockState.GPU_READY and not entry.refcount),
                      key=lambda item: item[1].last_used_step)

    def reset_all_to_unloaded(self) -> None:
        """Forgets what is there and who uses it. InvalidStateTransitionError where a runtime moves the blocks."""
        if self._mover is not None:
            raise InvalidStateTransitionError("the runtime moves these blocks: close its scheduler first")
        for entry in self._entries.values():
            entry.state, entry.refcount = BlockState.UNLOADED, 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id) -> bool:
        return block_id in self._entries

    def __repr__(self) -> str:
        return f"ResidencyMap({len(self)} blocks, {len(self.gpu_resident_blocks())} on the device)"
