"""Experts by rows: the pool of a session, its share of the budget, and whether calls go by rows or by layers
(docs/experts.md)."""

from __future__ import annotations

from collections import Counter

from .. import _core
from .._torch import apart_from_caller, torch
from ..errors import StagehandError, StagehandOOMError
from ..weights import relocate
from ..weights.experts import Table, table_of
from ..weights.units import Unit, as_text, round_up


class Tables:
    """The tables of a session, and the pool that their rows come to."""

    # Of its session.
    USES = """budget captures.capturing choice.looks_up choice.owners choice.storages choice.weights closed core
        images.renew inference_mode name needs.piece_bytes needs.stage_bytes options plans quantised simulated source
        stay.away stay.settle_pool steps.is_open steps.lock steps.passing streaming target trained.taken units"""

    def __init__(self, session) -> None:
        self._session = session
        self._all: list[Table] = self._find()
        self._by_unit: dict[int, Table] = {}  # id(unit) -> table
        self._rows: _core.Rows | None = None
        self._pool: list[torch.Tensor] = []  # [slots, ...] for each part; none while the pool is closed
        self._beside = (0, 0, 0)  # bytes of other units, that those need at least, that stay or are stages
        self._for_good = False  # calls go by layers for good
        self._counted = 0  # bytes of copies that the core's records have
        self.by_rows = bool(self._all)
        self.slots = 0  # of the pool, be it open or about to be

    def _find(self) -> list[Table]:
        """Those of the layout with the most bytes, before units are made."""
        session = self._session
        if session.options.get("policy") == "static" or session.quantised.rounds:
            return []
        by_layout: dict[tuple, list[Table]] = {}
        for module, weights in self._owned_once():
            table = table_of(module, weights)
            if table is not None:
                by_layout.setdefault(table.layout(), []).append(table)
        found = max(by_layout.values(), key=lambda tables: sum(t.nbytes for t in tables), default=[])
        return found if self._others_stream(found) else []  # the core has units of its own

    def _owned_once(self) -> list[tuple]:
        """(module, key -> (number, weight)) of weights that one module owns under one name."""
        choice = self._session.choice
        storages, owners = choice.storages(), choice.owners()
        times = Counter(number for _, _, number in owners)
        found: dict[int, tuple] = {}
        for module, key, number in owners:
            weight = choice.weights[number]
            if times[number] == 1 and weight.module is module and not storages.twins(weight.param):
                found.setdefault(id(module), (module, {}))[1][key] = number, weight
        return list(found.values())

    def _others_stream(self, found: list[Table]) -> bool:
        """Whether a weight that is in none of the tables streams with any budget."""
        choice = self._session.choice
        inside = {number for table in found for number in table.numbers}
        return any(number not in inside and weight.param.dim() > 1 and weight.bytes > _core.BUDGET_SMALL
                   and not choice.looks_up(weight.module) for number, weight in enumerate(choice.weights))

    def settle(self) -> None:
        """Units have been made."""
        for table in self._all:
            table.settle(self._session.plans[id(table.module)])
            self._by_unit[id(table.unit)] = table

    @property
    def weights(self) -> dict[int, Table]:
        """Number of a weight among what may stream -> the table that it is a part of."""
        return {number: table for table in self._all for number in table.numbers}

    # ------------------------------------------------------------------ the share of the budget

    def beside(self, units: list[Unit]) -> list[Unit]:
        """Of units, those that are no tables, while calls go by rows."""
        return [unit for unit in units if not self.has(unit)] if self.by_rows else units

    def of(self, plan) -> Table | None:
        """The table that the module's weights are."""
        return next((table for table in self._all if table.plan is plan), None)

    def has(self, unit: Unit) -> bool:
        """Whether the unit is a table."""
        return id(unit) in self._by_unit

    def is_aside(self, unit: Unit) -> bool:
        """Whether no plan counts the unit now."""
        return self.by_rows and self.has(unit)

    @property
    def nbytes(self) -> int:
        """What the pool takes of the budget now."""
        return self._bytes_of(self.slots) if self.by_rows else 0

    @property
    def least_bytes(self) -> int:
        """What the rows of one token take."""
        return self._bytes_of(self._pool_of()["rows_token"]) if self.by_rows else 0

    def layer_bytes(self) -> int:
        """What the rows of one layer take, with which any call runs."""
        return self._bytes_of(self._pool_of()["rows_largest"]) if self.by_rows else 0

    def _pool_of(self) -> dict:
        """As the core has the pool described, and all else on the device."""
        rows, (units_all, units_least, stays) = [table.rows for table in self._all], self._beside
        return {"part_bytes": self._all[0].part_bytes(), "rows": sum(rows), "rows_largest": max(rows),
                "rows_token": max(table.per_token for table in self._all), "units_all": units_all,
                "units_least": units_least, "stays_bytes": stays}

    def _bytes_of(self, slots: int) -> int:
        return _core.rows_bytes(slots, **self._pool_of())

    def take_share(self, units_all: int, units_least: int, stays: int) -> None:
        """The session is about to open, with so many bytes of other units, as few at least, and others on the device
        all the time."""
        self._beside = units_all, units_least, stays
        if self.by_rows:
            self.slots = self._share_of(self._session.budget)

    def _share_of(self, budget: int) -> int:
        """Trained weights that live on the device by now stay there, too."""
        return _core.rows_slots(max(0, budget - self._session.trained.taken()), **self._pool_of())

    def stays(self, nbytes: int) -> None:
        """Other weights take so many bytes of the device now, without trained ones, and the budget has no room for more
        of them: the pool is no larger than its share of what they leave. Between steps, or in one that is paused."""
        units_all, units_least, before = self._beside
        self._beside = units_all, units_least, max(before, nbytes + self._session.needs.stage_bytes)
        self.fit(self._session.budget)

    def _budget_for(self, slots: int) -> int:
        """With which the pool has so many slots, no more than a layer has rows."""
        return _core.rows_smallest(slots, **self._pool_of()) + self._session.trained.taken()

    @property
    def spare(self) -> int:
        """What the pool takes above the rows of a token."""
        return self.nbytes - self.least_bytes

    def fit(self, budget: int) -> None:
        """Before the core is given a budget: the pool is no larger than its share of that."""
        if self.by_rows and self._share_of(budget) < self.slots:
            self._resize(self._share_of(budget))

    def fill(self) -> None:
        """The core has another budget, or was refused it: the pool is as large as its share."""
        if self.by_rows and not self._session.closed:
            slots = self._share_of(self._session.budget)
            if slots < self.slots or slots - self.slots > self.slots // 16:
                self._resize(slots)

    def _resize(self, slots: int) -> None:
        before = self.slots
        self._close_pool()
        self.slots = slots
        try:
            self._session.stay.settle_pool()
        except StagehandOOMError:
            if slots <= before:
                raise
            self.slots = before
            self._session.stay.settle_pool()
        self.come()

    def ram_share(self) -> int:
        """Of the ram_budget, what rows of files get: all that is above the other units of files."""
        budget = self._session.options.get("ram_budget") or 0
        if not any(table.unit.in_file for table in self._all):
            return 0
        others = sum(unit.nbytes for unit in self._session.units if unit.in_file and not self.has(unit))
        return max(0, budget - others)

    # ------------------------------------------------------------------ life

    def begin(self) -> None:
        """The masters are in the arena, and the core is sealed."""
        if not self._all:
            return
        session = self._session
        self._rows = _core.Rows(session.target.core, self._all[0].part_bytes(), read_only=session.inference_mode,
                                name=as_text(session.name), ram_bytes=self.ram_share())
        for table in self._all:
            name, unit = as_text(table.plan.name), table.unit
            if unit.in_file:
                where = session.source.ranges(unit, session.needs.piece_bytes)
                table.index = self._rows.add_file_table(name, table.rows, where["checkpoint"], where["ranges"],
                                                        table.offsets())
            else:
                table.index = self._rows.add_table(name, table.rows, table.addresses())
        if not session.stay.away:
            self.come()

    def end(self) -> None:
        """The session closes, or could not open. May be called again."""
        if self._rows is not None:
            self._rows.close()
        self._pool.clear()
        self.by_rows = False

    def come(self) -> None:
        """The pool is on the device, where it is wanted; its bytes are reserved. Where memory cannot be had calls go by
        layers."""
        if not self.by_rows or self._pool or self._rows is None:
            return
        table, allocate = self._all[0], relocate.on_device(self._session.target)
        pool = []
        try:
            with torch.inference_mode(False), torch.no_grad():
                for entry, nbytes in zip(table.entries, table.part_bytes()):
                    base = allocate("the pool of experts", round_up(self.slots * nbytes))
                    part = base[:self.slots * nbytes].view(entry.dtype)
                    pool.append(part.view(self.slots, *entry.shape[1:]))
            self._rows.open(self.slots, [part.data_ptr() for part in pool], self._stream())
        except (StagehandOOMError, torch.OutOfMemoryError):
            pool.clear()
            self.leave_rows()
            return
        self._pool = pool

    def leave(self) -> None:
        """The pool leaves the device with all that stays there."""
        self._close_pool()

    def _close_pool(self) -> None:
        if self._rows is None or not self._pool:
            return
        self._rows.close_pool()
        self._pool.clear()

    def _stream(self) -> int:
        return 0 if self._session.simulated else self._session.target.stream()

    # ------------------------------------------------------------------ rows or layers

    @apart_from_caller
    def to_layers(self, for_good: bool = False) -> None:
        """Calls go by layers from now on, also in the middle of a pass. for_good: what was asked for never goes by
        rows."""
        with self._session.steps.lock:
            self._for_good = self._for_good or for_good
            if self.by_rows:
                self.leave_rows()

    def leave_rows(self) -> None:
        """As `to_layers`, under the step lock."""
        session = self._session
        self._count()
        self._close_pool()
        self.by_rows = False
        if session.streaming and session.steps.is_open:
            session.core.step_pause()
        session.stay.settle_pool()
        session.core.set_aside([table.unit.index for table in self._all], False)
        if session.steps.is_open:
            session.core.step_begin()

    def _go_by_rows(self) -> None:
        """Between steps."""
        session = self._session
        units = [table.unit.index for table in self._all]
        session.core.set_aside(units, True)
        self.by_rows = True
        self.slots = self._share_of(session.budget)
        try:
            session.stay.settle_pool()
        except StagehandError:  # places do not give way now: as before, until the next pass
            self.by_rows = False
            session.core.set_aside(units, False)
            return
        self.come()

    def pass_begins(self) -> None:
        """A pass, or a call of a part of the model, before its step begins or goes on. Under the step lock."""
        session = self._session
        if not self._all or self._rows is None:
            return
        if self.by_rows:
            self._rows.fence()
        elif not (self._for_good or session.steps.is_open or session.steps.passing > 1 or torch.is_grad_enabled()
                  or session.stay.away or session.captures.capturing):
            self._go_by_rows()

    def let_write(self) -> None:
        """Behind a pass: masters may be written."""
        if self._rows is not None and self.by_rows:
            self._rows.pass_end()
            self._count()

    def synchronize(self) -> None:
        """Until copies have read their masters."""
        if self._rows is not None:
            self._rows.synchronize()

    def _count(self) -> None:
        """The core's records have the bytes of the rows, too."""
        if self._rows is None:
            return
        nbytes = self._rows.stats()["h2d_bytes"]
        if nbytes > self._counted:
            self._session.core.count_mapped(nbytes - self._counted)
        self._counted = nbytes

    # ------------------------------------------------------------------ calls

    def acquire(self, table: Table, ids: torch.Tensor, slots: torch.Tensor) -> tuple:
        """A lease of the rows that ids, [tokens, top-k] on the host, name; their slots go to `slots`."""
        for entry in table.entries:
            if entry.changed():
                self._session.images.renew(table.unit, entry)
        try:
            return self._rows.acquire(table.index, ids.data_ptr(), ids.element_size(), ids.numel(), ids.shape[-1],
                                      self._stream(), slots.data_ptr())
        except StagehandOOMError as error:
            raise self._too_small(table, ids, error) from None

    def _too_small(self, table: Table, ids: torch.Tensor, error: StagehandOOMError) -> StagehandOOMError:
        asked, all_rows = ids.unique().numel(), max(table.rows for table in self._all)
        return StagehandOOMError(
            f"{error}: the tokens of this call ask for more experts at once than the budget of "
            f"{self._session.budget} bytes holds. Raise it to {self._budget_for(asked)} bytes, or pass fewer tokens at "
            f"once; with {self._budget_for(all_rows)} bytes any call runs",
            error.status, error.object, error.native_code)

    def release(self, lease: tuple) -> None:
        """Behind the work that the caller's stream has by now."""
        self._rows.release(lease, self._stream())

    def parts(self, lease: tuple) -> list[torch.Tensor]:
        """The slots that the lease's table sees: [slots, ...] for each key."""
        first, count = lease[3:]
        if count == self.slots:
            return self._pool
        return [part[first:first + count] for part in self._pool]

    def written(self, unit: Unit) -> None:
        """The unit's image has other bytes now."""
        table = self._by_unit.get(id(unit))
        if table is not None and table.index >= 0:
            self._rows.written(table.index)

    def moved(self, unit: Unit) -> None:
        """The unit's image is elsewhere now."""
        table = self._by_unit.get(id(unit))
        if table is not None and table.index >= 0:
            self._rows.set_host(table.index, table.addresses())

    # ------------------------------------------------------------------ figures

    def report(self) -> dict | None:
        """What docs/experts.md says of runtime.plan["experts"]; None: there are no tables."""
        if not self._all or self._rows is None or self._session.closed:
            return None
        stats = self._rows.stats()
        layers = [self._rows.table_stats(table.index) for table in self._all]
        return {
            "by_rows": self.by_rows, "slots": stats["slots"], "pool_bytes": self.nbytes,
            "row_bytes": stats["row_bytes"], "rows": sum(layer["rows"] for layer in layers),
            "asked": stats["asked"], "hits": stats["hits"], "brought": stats["brought"], "ahead": stats["ahead"],
            "bytes": stats["h2d_bytes"], "copies": stats["copies"], "ram_slots": stats["ram_slots"],
            "ram_bytes": stats["ram_bytes"], "ram_pinned_bytes": stats["ram_pinned_bytes"],
            "ram_hits": stats["ram_hits"], "file_bytes": stats["read_bytes"],
            "hit_rate": stats["hits"] / stats["asked"] if stats["asked"] else 0.0, "layers": layers,
        }
