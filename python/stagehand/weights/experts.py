"""Modules that hold all experts of a layer in tensors [experts, ...]: calls that bring only the experts that the router
asks for (docs/experts.md).

transformers has three functions for such modules, by the name in the model's config: "eager", "grouped_mm" and
"batched_mm". Each gets the ids before it reads a weight, and reads the rows of those ids alone. A call by rows leases
these rows from a pool, and runs the module's own forward, which picks the function, on a stand-in of the module: the
same attributes, with the pool for weights. The module itself stays as it is.

Sums over experts keep their order. grouped_mm and batched_mm add in the order of top-k, whatever the ids are, so they
get the numbers of slots for ids. The eager loop adds in the order of ids, so it keeps them, and its weights find the
slot of an id themselves.
"""

from __future__ import annotations

import dis
import functools

from .._torch import aside, observed, torch, transforming, undisturbed
from .hooks import ManagedForward, ModulePlan
from .units import Entry, Unit

BY_SLOT = {"grouped_mm", "batched_mm"}  # functions that get slots for ids
_MARKS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")  # of transformers' decorator, 5.17 and later
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")  # names in configs
_INTEGERS = (torch.int64, torch.int32)


class Table:
    """The experts of one module. keys: names of its weights, in the order of the parts of a row; numbers: of these
    among what may stream; rows: experts; per_token: experts that a token uses, as far as the config tells; plan, unit:
    of the module, from when units are made; index: of the table, from when the pool has it."""

    def __init__(self, module, weights: dict[str, tuple]) -> None:
        """weights: key -> (number, choosing.Weight)."""
        self.module = module
        self.kind = type(module)
        self.keys = tuple(weights)
        self.numbers = [number for number, _ in weights.values()]
        self.nbytes = sum(weight.bytes for _, weight in weights.values())
        self.rows = module.num_experts
        self.per_token = _per_token(module, self.rows)
        self.plan: ModulePlan | None = None
        self.unit: Unit | None = None
        self.index = -1
        self._parts = [(weight.entry.shape[1:], weight.entry.dtype) for _, weight in weights.values()]

    def settle(self, plan: ModulePlan) -> None:
        """Its unit has been made."""
        self.plan = plan
        self.unit = plan.managed[self.keys[0]][0]

    @property
    def entries(self) -> list[Entry]:
        return [self.plan.managed[key][1] for key in self.keys]

    def layout(self) -> tuple:
        """Tables share a pool whose layouts are equal."""
        return self.keys, tuple(self._parts)

    def part_bytes(self) -> list[int]:
        """Of one row, for each key."""
        return [shape.numel() * dtype.itemsize for shape, dtype in self._parts]

    def offsets(self) -> list[int]:
        """Of the parts in the unit's place."""
        return [entry.offset for entry in self.entries]

    def addresses(self) -> list[int]:
        """Of the parts in host memory, where no file has them."""
        return [self.unit.arena.image(self.unit.base + entry.offset) for entry in self.entries]


def table_of(module, weights: dict[str, tuple]) -> Table | None:
    """The table that the weights of a module are which may stream, None: they are not one. weights: key -> (number,
    choosing.Weight), of weights that no other module has."""
    if not all(hasattr(module, name) for name in _MARKS) or module._buffers:
        return None
    rows = getattr(module, "num_experts", None)
    own = {key for key, param in module._parameters.items() if param is not None}
    if not isinstance(rows, int) or rows < 2 or not weights or own != set(weights) or len(own) > 8:
        return None
    if not all(_is_part(weight, rows) for _, weight in weights.values()):
        return None
    if len({weight.kind for _, weight in weights.values()}) > 1:  # some in files, some in RAM
        return None
    return Table(module, weights)


def _is_part(weight, rows: int) -> bool:
    param = weight.param
    return (weight.kind in ("", "file") and type(weight.entry) is Entry and param.dim() > 1
            and param.shape[0] == rows and param.is_contiguous())


def _per_token(module, rows: int) -> int:
    config = getattr(module, "config", None)
    told = [value for name in _PER_TOKEN if isinstance(value := getattr(config, name, None), int) and value > 0]
    return min(told[0] if told else 8, rows)


# ---------------------------------------------------------------------- calls


class _RowsById:
    """A weight of the eager loop: its item [id] is the row in the id's slot."""

    __slots__ = ("_part", "_slots")

    def __init__(self, part: torch.Tensor, slots: dict[int, int]) -> None:
        self._part = part
        self._slots = slots

    def __getitem__(self, index) -> torch.Tensor:
        return self._part[self._slots[int(index)]]


@functools.lru_cache(maxsize=256)
def _reads_items_alone(function, keys: tuple) -> bool:
    """Whether all that a function does with `self.<key>` is to take one item of it, named by a variable."""
    steps = [step for step in dis.get_instructions(function) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    reads = 0
    for i, step in enumerate(steps):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in keys:
            follow = [(after.opname, after.argrepr) for after in steps[i + 1:i + 3]]
            if len(follow) < 2 or not follow[0][0].startswith("LOAD_FAST"):
                return False
            if follow[1][0] != "BINARY_SUBSCR" and follow[1] != ("BINARY_OP", "[]"):
                return False
            reads += 1
    return reads > 0


def _own_loop(module):
    """The eager function of the module's class, below transformers' decorator."""
    return getattr(type(module).forward, "__wrapped__", None)


class ExpertsForward(ManagedForward):
    """Stands as `forward` of a module whose weights are a table."""

    def __init__(self, session, module, plan: ModulePlan, table: Table, root: bool) -> None:
        super().__init__(session, module, plan, root)
        self.table = table

    def _call(self, args, kwargs):
        tables = self.session.tables
        if not tables.by_rows:
            return super()._call(args, kwargs)
        gradients = torch.is_grad_enabled() and self._takes_gradients(args, kwargs)
        if not gradients and self._may_go_by_rows(args, kwargs):
            return self._call_by_rows(args, kwargs)
        tables.to_layers(for_good=not gradients)
        return super()._call(args, kwargs)

    def _takes_gradients(self, args, kwargs) -> bool:
        values = (*args, *kwargs.values(), *(entry.param for entry in self.table.entries))
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)

    def _may_go_by_rows(self, args, kwargs) -> bool:
        module, table, plan = self.module, self.table, self.plan
        if type(module) is not table.kind or self.own or plan.replaced or len(plan.managed) != len(table.keys):
            return False
        if self.session.captures.capturing or transforming() or getattr(module, "_is_expert_parallel", False):
            return False
        if kwargs or len(args) != 3 or not isinstance(args[1], torch.Tensor) or args[1].dtype not in _INTEGERS:
            return False
        if args[1].dim() != 2 or args[1].numel() == 0 or any(entry.is_cast for entry in table.entries):
            return False
        name = module.config._experts_implementation
        return name in BY_SLOT or name in (None, "eager") and self._loop_takes_items()

    def _loop_takes_items(self) -> bool:
        loop = _own_loop(self.module)
        return loop is not None and _reads_items_alone(loop, self.table.keys)

    def _call_by_rows(self, args, kwargs):
        session = self.session
        hidden, ids, weights = args if session.simulated else session.arguments_on_device(args, kwargs)[0]
        by_slot = self.module.config._experts_implementation in BY_SLOT
        lease, asked, slots = self._lease(ids, by_slot)
        try:
            module = self._stand_in(lease, asked, slots)
            return type(self.module).forward(module, hidden, slots if by_slot else ids, weights)
        finally:
            session.tables.release(lease)

    def _lease(self, ids: torch.Tensor, by_slot: bool) -> tuple:
        """(lease, ids on the host, slots of the ids, where the function wants them)."""
        if observed():
            with aside():
                return self._lease(ids, by_slot)
        with undisturbed():
            asked = ids.cpu().contiguous()
            slots = torch.empty_like(asked)
            lease = self.session.tables.acquire(self.table, asked, slots)
            return lease, asked, slots.to(ids.device, non_blocking=True) if by_slot else slots

    def _stand_in(self, lease: tuple, asked: torch.Tensor, slots: torch.Tensor):
        module = self.module
        stand = module.__class__.__new__(module.__class__)
        known = stand.__dict__
        known.update(module.__dict__)
        known.pop(self.slot, None)
        parts = dict(zip(self.table.keys, self.session.tables.parts(lease)))
        if module.config._experts_implementation in BY_SLOT:
            known["num_experts"] = lease[4]
        else:
            where = dict(zip(asked.reshape(-1).tolist(), slots.reshape(-1).tolist()))
            parts = {key: _RowsById(part, where) for key, part in parts.items()}
        known["_parameters"] = {}
        known.update(parts)
        return stand
