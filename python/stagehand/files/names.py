"""Under which names a parameter of a model may be found in a checkpoint: stagehand/checkpoint.h has the rules."""

from __future__ import annotations

from .. import _core

ranks = _core.name_ranks  # name -> the candidates for one parameter, by rank
