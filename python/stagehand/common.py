"""What the runtimes of layer mode and block mode have in common for their users."""

from __future__ import annotations

from .errors import StagehandError
from .report import budget_bytes, runtime_stats
from .residency import Residency

RUNTIMES = ("_stagehand_layer_runtime", "_stagehand_runtime")  # where a model keeps its runtime


def refuse_second(model) -> None:
    """StagehandError when the model is under a runtime already."""
    if any(model.__dict__.get(name) is not None for name in RUNTIMES):
        raise StagehandError("this model is under stagehand already; call shutdown() on its runtime first")


def _no_runtime():
    """What a copied or unpickled model has in place of a runtime."""
    return None


class SessionRuntime(Residency):
    """A runtime over `self.session`. `_opened()` returns the session once the model is under management."""

    session = None
    _given_budget: int | None = None  # bytes that the user named; None: it is found

    def _opened(self):
        return self.session

    def _manage(self):
        return self._opened()

    @property
    def report(self) -> dict[str, str]:
        """Name -> why, of the parameters that stay on the device."""
        return dict(self._opened().kept)

    @property
    def quantised(self) -> dict:
        """What crosses the link in fewer bits: {"encoding": str or None, "error": tensor name -> relative error of its
        unit, "left": tensor name -> why it crosses in full}."""
        return self._opened().quantised.report()

    @property
    def stats(self) -> dict:
        """Bytes, copies, stalls and times since wrapping; "units" has one record for each unit, "files" one for
        each file that weights stream from: how it is read, and why."""
        session = self._opened()
        session.close_finished_step()
        return runtime_stats(session)

    @property
    def plan(self) -> dict:
        """The prediction for the plan in force: times in ns, sizes in bytes."""
        return self._opened().core.prediction()

    def set_vram_budget(self, budget) -> None:
        """A new budget, in bytes or as a size string; between steps. StagehandOOMError when it is too small:
        the old one stays. None: it is found from the next step on, whatever was seen before."""
        if budget is None:
            self._opened().find_budget()
            self._given_budget = None
            return
        self._set_budget(budget_bytes(budget, "budget"))

    def free(self, nbytes: int) -> None:
        """Gives back at least `nbytes` of device memory; between steps. A budget that was found stays at what is left."""
        self._set_budget(self._opened().budget - nbytes)

    def _set_budget(self, budget: int) -> None:
        self._opened().set_budget(budget)
        self._given_budget = budget

    def _pause(self) -> None:
        """Lets the model go; `_resume` follows."""
        raise NotImplementedError

    def _resume(self, dtype) -> None:
        """Takes the model over again as it is now, with the options that it had. dtype: as when wrapping. Counters
        begin again. On failure the model stays plain."""
        raise NotImplementedError

    def writing(self):
        """Context in which weights of an inference_mode=True model may be written."""
        return self._opened().writing()

    def synchronize(self) -> None:
        """Waits until every copy issued so far has read its master."""
        self._opened().synchronize()

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return _no_runtime, ()
