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
    USES = """budget choice.looks_up choice.owners choice.settle choice.streamed choice.weights dtype
        inference_mode options quantised stay.reserved takeover.unmanaged units"""

    def __init__(self, session) -> None:
        self._session = session
        self._choice = session.choice
        self._model: dict = {}  # as the core has it described
        self._advice: dict = {}
        self.keeps: frozenset = frozenset()  # ids of units that are kept on the device

    # ------------------------------------------------------------------ the core's answers

    def comfortable(self) -> int:
        """A budget that lets it work: with room for three of the largest unit at once."""
        return self._ask()["comfortable"]

    def settle(self) -> None:
        """Units are made, as the budget has room for them."""
        self._advice = self._ask()
        self._choice.settle(self._advice["unit"])
        self.keeps = frozenset(id(unit) for unit, keep in zip(self._session.units, self._advice["keep"]) if keep)

    @property
    def least_room(self) -> int:
        """Bytes that units need which are leased while others are held."""
        return self._advice["least_room"]

    @property
    def piece_bytes(self) -> int:
        """Most bytes of one copy of packed bytes, where a segment can be so small."""
        return self._advice["piece_bytes"]

    @property
    def stage_bytes(self) -> int:
        """Device memory in which packed bytes arrive, if all that may cross packed does."""
        return self._advice["stage_bytes"]

    def check(self) -> None:
        """StagehandOOMError with the smallest budget that works."""
        if self._advice["works"]:
            return
        budget = self._session.budget
        largest = max(self._choice.streamed(), key=lambda unit: unit.nbytes, default=None)
        what = f"unit '{largest.name}' needs {largest.nbytes} bytes there, and " if largest else ""
        raise StagehandOOMError(
            f"the budget of {_core.format_size(budget)} ({budget} bytes) on the device is too small: "
            f"{what}{self._advice['stays_bytes']} bytes stay there all the time; the smallest budget that can work is "
            f"{self._advice['smallest']} bytes", "BUDGET_TOO_SMALL", largest.name if largest else "budget")

    def budget_with(self, room: int) -> int:
        """A budget with which the model, wrapped anew, has `room` bytes for places, beside what stays now."""
        came = self._session.stay.reserved - self._advice["stays_bytes"]
        return self._ask(fixed=max(0, self._model["fixed"] + came), room=room)

    def _ask(self, **more):
        if not self._model:
            self._model = self._describe()
        return _core.budget_advice(self._session.budget, **{**self._model, **more})

    # ------------------------------------------------------------------ the model

    def _describe(self) -> dict:
        """The arguments of the core's budget_advice."""
        owners = self._choice.owners()
        modules = {id(module): module for module, _, _ in owners}
        number = {ident: i for i, ident in enumerate(modules)}
        inside = [(number[ident], number[id(part)]) for ident, module in modules.items() for part in module.modules()
                  if part is not module and id(part) in number]
        owned_by: list[list] = [[] for _ in self._choice.weights]
        for module, key, weight in owners:
            owned_by[weight].append((module, key))
        return {"weights": [(weight.bytes, number[id(weight.module)], KINDS.index(weight.kind), self._flags(weight, by),
                             self._session.quantised.segment(self._session, weight, by))
                            for weight, by in zip(self._choice.weights, owned_by)],
                "modules": [_core.MODULE_LIST * is_list(module)
                            + _core.MODULE_OUTER * (next(module.children(), None) is not None)
                            for module in modules.values()],
                "owners": list(dict.fromkeys((number[id(module)], weight) for module, _, weight in owners)),
                "inside": inside,
                "fixed": self._fixed_bytes({(id(module), key) for module, key, _ in owners}),
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
