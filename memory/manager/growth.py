"""Growth: whether a workflow needs more bytes than at its last run, of what, and since which change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..units import MIB, format_bytes
from .event_log import EventLog
from .member import Members

__all__ = ["Growth"]

# Less is no news.
NOTEWORTHY_BYTES = MIB // 4
MAX_WORKFLOWS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """What one component took in a run: its weights as they rest, and what its forwards needed beside them."""

    weight_bytes: int
    activation_bytes: int
    choices: Mapping[str, str]

    def changes(self, before: Needed) -> str:
        """Return which choices differ from those of a run before."""
        found = [f"{name} {value}, was {before.choices[name]}" for name, value in self.choices.items()
                 if before.choices.get(name, value) != value]  # fmt: skip
        return f" (since {', '.join(found)})" if found else ""


class Growth:
    """Compares each run with the last one of the same workflow."""

    def __init__(self, members: Members, event_log: EventLog) -> None:
        self.members = members
        self.event_log = event_log
        self.last: dict[str, dict[str, Needed]] = {}

    def end_run(self, workflow: str, used: Collection[str]) -> None:
        """Enter an event if the components that a run used need more than those of the last run of its workflow."""
        now = {name: self.needed(name) for name in used if name in self.members}
        before = self.last.pop(workflow, None)
        if now or before is None:
            self.last[workflow] = now
        else:
            self.last[workflow] = before  # all of it was cached
        if len(self.last) > MAX_WORKFLOWS:
            del self.last[next(iter(self.last))]
        if not before or not now:
            return
        grown: list[tuple[int, str]] = []
        for name, needed in now.items():
            earlier = before.get(name)
            if earlier is None:
                grown.append((needed.weight_bytes, f"{name} is new, {format_bytes(needed.weight_bytes)}"))
                continue
            for what in ("weight", "activation"):
                is_now, was = (getattr(each, f"{what}_bytes") for each in (needed, earlier))
                if is_now - was >= NOTEWORTHY_BYTES:
                    words = f"{what}s of {name} take {format_bytes(is_now)} instead of {format_bytes(was)}"
                    grown.append((is_now - was, words + needed.changes(earlier)))
        gone = sum(each.weight_bytes for name, each in before.items() if name not in now)
        more = sum(num_bytes for num_bytes, _ in grown) - gone
        if more >= NOTEWORTHY_BYTES:
            told = "; ".join(words for _, words in sorted(grown, reverse=True))
            reason = f"{workflow} needs {format_bytes(more)} more than at its last run: {told}"
            self.event_log.note("growth", "", more, "host", reason)

    def needed(self, name: str) -> Needed:
        member = self.members[name]
        plan = member.managed.plan
        return Needed(
            weight_bytes=plan.weight_bytes,
            activation_bytes=max(member.activation_bytes.values(), default=0),
            choices={
                "precision": plan.precision.name,
                "profile": str(member.profile),
                "placement": str(plan.placement),
            },
        )
