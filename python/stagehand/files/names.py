"""Under which names a parameter of a model may be found in a checkpoint.

A checkpoint may have been written by another code base: a wrapper's component may be missing, attention and
feed-forward parts may be called otherwise, and everything may lie under a root. Candidates come in ranks:
the name itself, then the name without wrappers under any root, then its aliases. A lower rank hides the
later ones; two hits in one rank are ambiguous, which is the caller's error to report.
"""

from __future__ import annotations

import re

ROOTS = ("", "model.diffusion_model.", "diffusion_model.", "model.")

# Components that wrappers and adapters put in between.
_WRAPPERS = [(re.compile(rf"(^|\.){name}\."), r"\1") for name in ("orig", "org_module", "base_layer")]

# Whole components, one direction: from what models are written with to what their first releases used.
_ALIASES = [
    (re.compile(rf"(^|\.){re.escape(ours)}(?=\.|$)"), rf"\g<1>{theirs}")
    for ours, theirs in (
        ("attn1", "self_attn"),
        ("attn2", "cross_attn"),
        ("to_q", "q"),
        ("to_k", "k"),
        ("to_v", "v"),
        ("to_out.0", "o"),
        ("ffn.net.0.proj", "ffn.0"),
        ("ffn.net.2", "ffn.2"),
        ("norm2", "norm3"),
        ("scale_shift_table", "modulation"),
        ("ff.net.0.proj", "ff.linear_in"),
        ("ff.net.2", "ff.linear_out"),
        ("ff_context.net.0.proj", "ff_context.linear_in"),
        ("ff_context.net.2", "ff_context.linear_out"),
        ("mlp", "block_sparse_moe"),
    )
]


def _closure(names: list[str], rules) -> list[str]:
    """All names that the rules make of `names`, in the order in which they are reached."""
    found = dict.fromkeys(names)
    queue = list(names)
    while queue:
        name = queue.pop(0)
        for pattern, replacement in rules:
            other = pattern.sub(replacement, name)
            if other not in found:
                found[other] = None
                queue.append(other)
    return list(found)


def ranks(name: str) -> list[list[str]]:
    """The candidates for one parameter, by rank."""
    plain = _closure([name], _WRAPPERS)
    aliased = [other for other in _closure(plain, _ALIASES) if other not in plain]
    return [[name]] + [[root + other for root in ROOTS for other in names] for names in (plain, aliased)]
