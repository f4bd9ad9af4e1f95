"""The catalogue of error messages (tools/messages.py): each names an object and a remedy, or one of REASONS says why it
does not; and troubleshooting.md quotes messages as they are."""

import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]

VERBS = """add allow ask attach begin build call capture cast change choose clip close compile convert copy delete do
download drop end enter export free freeze give grow install keep lay leave let load look lower make mend move name open
pack pass pin pool put raise record reinstall release remove rename report return run save say seal set shut split start
store switch take tie turn use wait wrap write""".split()
# An imperative, at the start or behind a stop; or the condition that an argument must meet.
REMEDY = re.compile(
    r"(?:^|[;:,.(|] |\b(?:and|or|then|to|not) )(?i:{verbs})\b|[Ii]nstead|\bfirst\b"
    r"|\b(?:must|should|needs?|wants|has to|at least|at most|above 0|positive|multiple of|one of|power of two|evenly|"
    r"smallest|is expected|allows it|needed|known|between)\b|\bfrom \S+ to\b|, not (?:\{{\}}|as|to)|and not \{{\}}"
    r"|; (?:the|there)|there (?:is|are) \{{\}}|[Hh]as \{{\}}|knows \{{\}}|goes on with|are called \{{\}}"
    .format(verbs="|".join(VERBS)))

# Of messages without a remedy: which, by kind, by text or by file, and why that is right.
BY_KIND = {
    "STH_OUT_OF_HOST_MEMORY": "free memory: there is nothing else to do, and the message says what it was for",
    "STH_CORRUPT_DATA": "the file is damaged; the message names it and the byte, and another copy is the remedy",
    "STH_CHANGED_DATA": "as for damaged files",
    "STH_INTERNAL": "a fault of ours; the text of the status asks for a report",
    "AttributeError": "Python's own words for a name that is not there",
    "KeyError": "a dict's own words",
}
BY_TEXT = {
    r"cannot [\w ]+: \{\}$|failed after \{\}: |cannot be (?:read|written|opened at \{\}): |has ended\{\}: \{\}$":
        "the system's reason ends the message",
    r"the driver reports|cuBLAS reports|refuses the kernels|has no function":
        "the driver's words; what to do follows them",
    r"on purpose$": "a fault point of the tests",
    r"gives? no reason$": "a piece of another message",
    r": \{\}$|, \{\}$|^\S* ?\{\} \{\}$|; \{\}$|\{\}\{\}$|, and \{\}$|which \{\}|kernels\{\}$":
        "the end of the message, with the remedy, comes from elsewhere",
    r"a leaf Variable that requires grad": "PyTorch's own words for the same mistake",
    r"can be neither copied nor pickled": "the class says what to do, at the end",
    r"only C programs can use it|before_block and after_block|acquire\(\) so many":
        "the remedy is a name in C or Python",
}
C_ONLY = ("src/api/ src/conductor/ src/core/ src/device/sim/ src/device/decorate/ src/device/cuda/ src/device/check.c "
          "src/device/expand.c src/device/gpu/expand.c src/device/registry.c src/host/ src/quant/ src/rows/ "
          "src/runner/ src/runtime/ src/activation/ src/load/read/ src/optim/adamw.c src/store/store src/store/pool.c "
          "src/store/file.c src/store/checkpoint.c src/telemetry/").split()
"""Where a program in C breaks the rule of a header: the message says which, and the header is the remedy."""
CALLERS = {"STH_INVALID_ARGUMENT", "STH_INVALID_STATE", "STH_NOT_FOUND", "STH_STALE", "STH_UNSUPPORTED",
           "STH_DTYPE_MISMATCH", "STH_SHAPE_MISMATCH", "rc"}


def messages():
    spec = importlib.util.spec_from_file_location("messages", ROOT / "tools/messages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.of_c() + module.of_python()


def put_together_elsewhere(text: str) -> bool:
    return len(re.findall("[A-Za-z]", text.replace("{}", ""))) < 4


def without_remedy(message) -> bool:
    if put_together_elsewhere(message.text) or REMEDY.search(message.text) or message.kind in BY_KIND:
        return False
    if any(re.search(pattern, message.text) for pattern in BY_TEXT):
        return False
    return not (message.kind in CALLERS and message.place.startswith(tuple(C_ONLY)))


SUBJECTS = ("a model", "this model", "the model", "the source", "sparse gradients", "no step",
            *"""ActivationRuntime
GradScaler OffloadedAdamW budget configuration graph last_backward max_grad_norm pass registry runner runtime session
slabs_per_class source= stages state step step_end tool updates weights _max_d2h memory.stagehand PyTorch""".split())


def nameless(message) -> bool:
    """Neither a placeholder, nor an object beside the text. A text of constant words names its subject: in C a function
    or an argument of the header; in Python one of SUBJECTS, of which the caller has one."""
    if "{}" in message.text or message.object not in ("", "NULL") or message.kind in BY_KIND:
        return False
    if message.place.startswith("src/"):
        return not message.place.startswith(tuple(C_ONLY))
    return not any(re.search(rf"\b{re.escape(subject)}", message.text) for subject in SUBJECTS)


def test_each_message_names_a_remedy():
    assert not [f"{m.place}: {m.text}" for m in messages() if without_remedy(m)]


def test_each_message_names_an_object():
    assert not [f"{m.place}: {m.text}" for m in messages() if nameless(m)]


def test_the_rule_finds_messages_without_remedy_or_object():
    kind = type(messages()[0])
    assert without_remedy(kind("src/pack/x.c:1", "STH_IO", "path", "{}: it is broken"))
    assert not without_remedy(kind("src/pack/x.c:1", "STH_IO", "path", "{}: it is broken; name another"))
    assert without_remedy(kind("python/stagehand/x.py:1", "ValueError", "", "{} is wrong"))
    assert nameless(kind("python/stagehand/x.py:1", "ValueError", "", "that is wrong"))


def test_the_page_quotes_messages_as_they_are():
    """A quoted text of troubleshooting.md is a part of a message; "..." stands for anything."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    cells = re.findall(r'^\| (".*?") \|', page, re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall('"([^"]+)"', cell)]
    assert len(quoted) > 40
    known = [message.text for message in messages()]
    for text in quoted:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in text.split("...")), re.DOTALL)
        assert any(pattern.search(message) for message in known), text


def test_the_catalogue_is_whole():
    found = messages()
    assert sum(message.place.startswith("src/") for message in found) > 450
    assert sum(message.place.startswith("python/") for message in found) > 200
