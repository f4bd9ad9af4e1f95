"""What a session needs on the device, known before anything is touched: the model is described here, and the core says
what a budget is used for and which is the smallest that works (include/stagehand/budget.h)."""

from __future__ import annotations

from .. import _core
from ..errors import StagehandOOMError
from ..weights import relocate
from ..weights.units import round_up
from ..weights.wrapping import wraps
from .choosing import is_list, will_cast

KINDS = ("", "file", "packed")  # of weights, by number


class Needs:
    """What a session cannot do without on the device."""

    # Of its session.
    USES = """budget choice.looks_up choice.owners choice.settle choice.streamed choice.weights dtype inference_mode
        options quantised stay.reserved tables.beside tables.layer_bytes tables.least_bytes tables.nbytes
        tables.take_share tables.weights takeover.unmanaged trained.could_take units"""

    def __init__(self, session) -> None:
        self._session = session
        self._choice = session.choice
        self._tables = session.tables
        self._model: dict = {}  # as the core has it described
        self._advice: dict = {}
        self.keeps: frozenset = frozenset()  # ids of units that are kept on the device

    # ------------------------------------------------------------------ the core's answers

    def comfortable(self) -> int:
        """A budget that lets it work: with room for three of the largest unit at once, and for the rows of a layer."""
        return self._ask()["comfortable"] - self._tables.least_bytes + self._tables.layer_bytes()

    def smallest(self) -> int:
        """A smaller budget does not work."""
        return self._ask()["smallest"]

    def settle(self) -> None:
        """Units are made, as the budget has room for them."""
        self._advice = self._ask()
        if self._tables.weights:
            self._make_pool()
        numbers, keep = self._units()
        self._choice.settle(numbers)
        self.keeps = frozenset(id(unit) for unit, keep in zip(self._session.units, keep) if keep)

    def _make_pool(self) -> None:
        """It gets its share of the budget, and the advice is for what that leaves."""
        advice, least = self._advice, self._tables.least_bytes
        self._tables.take_share(advice["units_bytes"], advice["units_least"],
                                advice["stays_bytes"] - least + advice["stage_bytes"])
        if advice["works"]:
            self._model["fixed"] += self._tables.nbytes - least
            self._advice = self._ask()

    def _units(self) -> tuple[list, list]:
        """For each weight the number of its unit, None where it stays, and for each unit whether it is kept. The core
        numbered units without the tables, which are one each."""
        tables, advised = self._tables.weights, iter(self._advice["unit"])
        number_of: dict = {}  # table, or the core's number -> number
        numbers: list = []
        keep: list[bool] = []
        for i in range(len(self._choice.weights)):
            unit = tables[i] if i in tables else next(advised)
            if unit is not None and unit not in number_of:
                number_of[unit] = len(number_of)
                keep.append(i not in tables and self._advice["keep"][unit])
            numbers.append(None if unit is None else number_of[unit])
        return numbers, keep

    @property
    def least_room(self) -> int:
        """Bytes that units need which are leased while others are held."""
        streamed = sum(unit.nbytes for unit in self._choice.streamed())  # without trained ones that live on the device
        return min(self._advice["least_room"], streamed)

    @property
    def piece_bytes(self) -> int:
        """Most bytes of one copy of packed bytes, where a segment can be so small."""
        return self._advice["piece_bytes"]

    @property
    def stages(self) -> int:
        """Buffers on the device in which packed bytes arrive."""
        return self._advice["stages"]

    @property
    def stage_bytes(self) -> int:
        """Device memory in which packed bytes arrive, if all that may cross packed does."""
        return self._advice["stage_bytes"]

    def check(self) -> None:
        """StagehandOOMError with the smallest budget that works."""
        if self._advice["works"]:
            return
        budget = self._session.budget
        largest = max(self._tables.beside(self._choice.streamed()), key=lambda unit: unit.nbytes, default=None)
        what = f"unit '{largest.name}' needs {largest.nbytes} bytes there, and " if largest else ""
        raise StagehandOOMError(
            f"the budget of {_core.format_size(budget)} ({budget} bytes) on the device is too small: "
            f"{what}{self._advice['stays_bytes']} bytes stay there all the time; the smallest budget that can work is "
            f"{self._advice['smallest']} bytes", "BUDGET_TOO_SMALL", largest.name if largest else "budget")

    def room_for(self, units: list, budget: int, ample: bool) -> tuple[int, int]:
        """(bytes that trained weights, their gradients and states may take on the device; bytes of them that nobody
        else would use), of these units. ample: what streams has its comfort."""
        advice = _core.budget_advice(budget, **self._model)
        streamed = self._tables.beside(self._choice.streamed())
        all_bytes = sum({id(unit): unit.nbytes for unit in (*streamed, *units)}.values())
        return (max(0, budget - advice["comfortable" if ample else "smallest"]),
                max(0, budget - advice["stays_bytes"] - all_bytes))

    def budget_with(self, room: int) -> int:
        """A budget with which the model, wrapped again, has `room` bytes for places, beside what stays now."""
        came = self._session.stay.reserved - self._advice["stays_bytes"]
        came += self._session.trained.could_take()
        return self._ask(fixed=max(0, self._model["fixed"] + came), room=room)

    def _ask(self, **more):
        if not self._model:
            self._model = self._describe()
        return _core.budget_advice(self._session.budget, **{**self._model, **more})

    # ------------------------------------------------------------------ the model

    def _describe(self) -> dict:
        """The arguments of the core's budget_advice. Weights of tables have no places: the pool has room for the rows
        of a token at least."""
        tables, every = self._tables.weights, self._choice.owners()
        index = {i: n for n, i in enumerate(i for i in range(len(self._choice.weights)) if i not in tables)}
        owners = [(module, key, index[i]) for module, key, i in every if i in index]
        modules = {id(module): module for module, _, _ in owners}
        number = {ident: i for i, ident in enumerate(modules)}
        inside = [(number[ident], number[id(part)]) for ident, module in modules.items() for part in module.modules()
                  if part is not module and id(part) in number]
        owned_by: list[list] = [[] for _ in index]
        for module, key, weight in owners:
            owned_by[weight].append((module, key))
        return {"weights": [(weight.bytes, number[id(weight.module)], KINDS.index(weight.kind), self._flags(weight, by),
                             self._session.quantised.segment(self._session, weight, by))
                            for weight, by in zip((self._choice.weights[i] for i in index), owned_by)],
                "modules": [_core.MODULE_LIST * is_list(module)
                            + _core.MODULE_OUTER * (next(module.children(), None) is not None)
                            for module in modules.values()],
                "owners": list(dict.fromkeys((number[id(module)], weight) for module, _, weight in owners)),
                "inside": inside,
                "fixed": self._fixed_bytes({(id(module), key) for module, key, _ in every}) + self._tables.least_bytes,
                "one_extent": self._session.options.get("policy") == "static"}

    def _flags(self, weight, owners: list) -> int:
        param = weight.param
        trains = param.requires_grad and not self._session.inference_mode
        looked_up = not trains and not weight.kind and not wraps(param) and all(
            self._choice.looks_up(module) for module, _ in owners)
        return (_core.WEIGHT_SMALL * (param.dim() <= 1) + _core.WEIGHT_IN_PLACE * looked_up
                + _core.WEIGHT_TRAINS * trains + _core.WEIGHT_STORED * (weight.kind == "packed"))

    def _fixed_bytes(self, but: set) -> int:
        """Of what never streams, with the dtypes that it is going to have. but: places of what may."""
        items, cast, dtype = [], {}, self._session.dtype
        for item in self._session.takeover.unmanaged(but):
            param = getattr(item.put, "param", None)  # buffers keep their dtypes
            if param is not None and will_cast(param, dtype):
                key = param.data_ptr(), param.shape, param.stride(), param.dtype
                cast[key] = round_up(param.numel() * dtype.itemsize)
            else:
                items.append(item)
        return relocate.total_bytes(items) + sum(cast.values())
