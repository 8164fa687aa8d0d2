"""Growth: whether a workflow needs more bytes than at its last run, of what, and since which change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..units import MIB, format_bytes
from .event_log import EventLog
from .member import Member
from .members import Members
from .runs_file import RunsFile, digest_name
from .steered import Steered, SteeredComponent

__all__ = ["Growth"]

# Less is no news.
NOTEWORTHY_BYTES = MIB // 4
MAX_WORKFLOWS = 1_000
# What a text begins with that only its digest is known of.
DIGEST = "digest "


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """What one component took in a run: its weights as they rest, and what its forwards needed beside them."""

    weight_bytes: int
    activation_bytes: int
    choices: Mapping[str, str]
    is_partly_known: bool = False
    """Whether no activations mean that they are not known."""

    def is_like(self, other: Needed) -> bool:
        """Whether the two differ by nothing but bytes that are no news."""
        sizes = (self.weight_bytes - other.weight_bytes, self.activation_bytes - other.activation_bytes)
        return (
            self.choices.keys() == other.choices.keys()
            and not self.changes(other)
            and all(abs(size) < NOTEWORTHY_BYTES for size in sizes)
        )

    def changes(self, before: Needed) -> str:
        """Return which choices differ from those of a run before."""
        found = []
        for name, value in self.choices.items():
            earlier = before.choices.get(name, value)
            if earlier == DIGEST + digest_name(value) or earlier == value:
                continue
            was = "another" if earlier.startswith(DIGEST) else earlier
            found.append(f"{name} {value}, was {was}")
        return f" (since {', '.join(found)})" if found else ""

    def to_json(self) -> dict[str, Any]:
        """Return it without names: a profile may have some."""
        choices = {
            name: DIGEST + digest_name(value) if name == "profile" and not value.startswith(DIGEST) else value
            for name, value in self.choices.items()
        }
        return {"weight_bytes": self.weight_bytes, "activation_bytes": self.activation_bytes, "choices": choices}


class Growth:
    """Compares each run with the last one of the same workflow, also with that of an earlier process.

    Args:
        file: where the last runs are stored; None: only here.
        versions: of the software that computes: a choice, too, which an update makes.
    """

    def __init__(
        self,
        members: Members,
        steered: Steered,
        event_log: EventLog,
        file: RunsFile | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.members = members
        self.steered = steered
        self.event_log = event_log
        self.file = file
        self.versions = dict(versions or {})
        self.last: dict[str, dict[str, Needed]] = {}
        """By the digests of workflows and of their components' ids."""
        self.is_read = file is None

    def read(self) -> None:
        """Read the stored runs at the first comparison."""
        if not self.is_read and self.file is not None:
            self.is_read = True
            for workflow, run in self.file.read().items():
                self.last[workflow] = {
                    key: Needed(
                        weight_bytes=needed["weight_bytes"],
                        activation_bytes=needed["activation_bytes"],
                        choices=needed["choices"],
                    )
                    for key, needed in run.items()
                }

    def end_run(self, workflow: str, used: Mapping[str, int | None]) -> None:
        """Enter an event if the components that a run used need more than those of the last run of its workflow.

        Args:
            used: what those that a host moves needed beside their weights; None: not known, so it counts as before.
        """
        self.read()
        key_of_run = digest_name(workflow)
        before = self.last.pop(key_of_run, None)
        found = self.needs_of(used, before or {})
        names = {digest_name(name): name for name in found}
        now = {key: found[name] for key, name in names.items()}
        self.last[key_of_run] = now if now or before is None else before  # else all of it was cached
        if len(self.last) > MAX_WORKFLOWS:
            del self.last[next(iter(self.last))]
        if now:
            self.store(key_of_run, now, before)
        if not before or not now:
            return
        grown: list[tuple[int, str]] = []
        for key, needed in now.items():
            name, earlier = names[key], before.get(key)
            if earlier is None:
                grown.append((needed.weight_bytes, f"{name} is new, {format_bytes(needed.weight_bytes)}"))
                continue
            for what in ("weight", "activation"):
                is_now, was = (getattr(each, f"{what}_bytes") for each in (needed, earlier))
                if needed.is_partly_known and not was:
                    continue
                if is_now - was >= NOTEWORTHY_BYTES:
                    words = f"{what}s of {name} take {format_bytes(is_now)} instead of {format_bytes(was)}"
                    grown.append((is_now - was, words + needed.changes(earlier)))
        gone = sum(each.weight_bytes for key, each in before.items() if key not in now)
        more = sum(num_bytes for num_bytes, _ in grown) - gone
        if more >= NOTEWORTHY_BYTES:
            told = "; ".join(words for _, words in sorted(grown, reverse=True))
            reason = f"{workflow} needs {format_bytes(more)} more than at its last run: {told}"
            self.event_log.note("growth", "", more, "host", reason)

    def store(self, workflow: str, now: Mapping[str, Needed], before: Mapping[str, Needed] | None) -> None:
        """Store a run unless an equal one is stored, but for bytes that are no news."""
        is_known = before is not None and now.keys() == before.keys()
        if self.file is not None and not (is_known and all(now[key].is_like(before[key]) for key in now)):  # type: ignore[index]
            self.file.write(workflow, {key: needed.to_json() for key, needed in now.items()})

    def needs_of(self, used: Mapping[str, int | None], before: Mapping[str, Needed]) -> dict[str, Needed]:
        """Return what the components that a run used need, as far as they still exist."""
        found = {name: self.needed(self.members[name]) for name in used if name in self.members}
        for other in self.steered.components():
            if other.id in used:
                earlier = before.get(digest_name(other.id))
                found[other.id] = self.needed_of(other, used[other.id], earlier.activation_bytes if earlier else 0)
        return found

    def needed(self, member: Member) -> Needed:
        plan = member.managed.plan
        return Needed(
            weight_bytes=plan.weight_bytes,
            activation_bytes=max(member.activation_bytes.values(), default=0),
            choices={
                "precision": plan.precision.name,
                "profile": str(member.profile),
                "placement": str(plan.placement).partition("=")[2],
                **self.versions,
            },
        )

    def needed_of(self, component: SteeredComponent, activation_bytes: int | None, before: int) -> Needed:
        """Return what a component needs that its host moves.

        Args:
            activation_bytes: None where this run does not tell; then it is what it was before.
        """
        return Needed(
            weight_bytes=int(component.describe().get("weight_bytes", 0)),
            activation_bytes=before if activation_bytes is None else activation_bytes,
            choices={**component.choices(), **self.versions},
            is_partly_known=True,
        )
