"""Where ranks are that were let go by a step. Pure."""

from collections.abc import Callable, Sequence

from monarch_nb.debug.records import Stopped
from monarch_nb.debug.render.groups import FileName, grouped, named, short
from monarch_nb.debug.render.merge import who


def moves_text(
    before: Sequence[Stopped], now: Sequence[Stopped], why_over: Callable[[str], str], name: FileName = short
) -> str:
    """One line for each place that they have come to, for those whose endpoint has ended, and for those that still run.

    `now` is all that is stopped; `why_over(session)` says why one cannot stop any more, "" where it may.
    """
    by_session = {record.session: record for record in now}
    stopped = [by_session[record.session] for record in before if record.session in by_session]
    lines = []
    for group in grouped(stopped):
        first = group.first
        label = f"{who(group.records, before)}  " if len(stopped) < len(before) or len(before) > 1 else ""
        lines.append(
            f"{label}{name(first.frame.file)}:{first.frame.line} in {first.frame.function}  → {first.frame.text}"
        )
        if first.note:
            lines.append(f"    {first.note}")
    running = [record for record in before if record.session not in by_session]
    ended: dict[str, list[Stopped]] = {}
    for record in running:
        ended.setdefault(why_over(record.session), []).append(record)
    still = ended.pop("", [])
    lines += [f"{named(records)}: {why}" for why, records in ended.items()]
    if still:
        it = "it runs, and has" if len(still) == 1 else "they run, and have"
        lines.append(f"{named(still)}: {it} not stopped again yet")
    return "\n".join(lines)
