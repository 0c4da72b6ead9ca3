"""Who goes on to the final seeds, and how a report says so."""

from midus.studies.choosing import Choice
from midus.studies.figures import Line
from midus.studies.options import StudyOptions

# Whether a method goes on to the final seeds.
BEST, KEPT, BEHIND, OPEN = "yes", "kept", "no", "not known yet"

Standings = list[tuple[Line, str]]


def standings(study: StudyOptions, found: list[tuple[Choice, Line, bool | None]]) -> Standings:
    """Methods by validation loss of the search, with a word each; none where all go on."""
    if study.finalists is None:
        return []
    ranked = sorted(found, key=lambda one: one[0].validation_loss)
    words = {True: BEST, False: BEHIND, None: OPEN}
    return [
        (line, KEPT if goes and rank >= study.finalists else words[goes])
        for rank, (_, line, goes) in enumerate(ranked)
    ]


def labels(found: Standings, word: str) -> list[str]:
    """Methods of which this is said."""
    return [line.label for line, own in found if own == word]


def said_of_standings(study: StudyOptions, found: Standings) -> list[str]:
    """Notes on methods that are not among the best."""
    num, notes = study.finalists, []
    if kept := labels(found, KEPT):
        notes.append(
            f"- Not among the {num} best of the search, and here since their models are kept: "
            f"{', '.join(kept)}."
        )
    if behind := labels(found, BEHIND):
        notes.append(
            f"- Not among the {num} best of the search, so without final seeds: "
            f"{', '.join(behind)}. What they reached is under Every method in the search."
        )
    return notes


def about_going(study: StudyOptions) -> str:
    """A sentence on who goes on, before a space; nothing where all do."""
    if study.finalists is None:
        return ""
    is_kept = any(method.keep for method in study.methods.values())
    return (
        f"Not every method went on: the {study.finalists} best of the search by validation loss"
        f"{', and those whose models are kept' if is_kept else ''}. "
    )
