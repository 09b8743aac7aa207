"""Draws the values of facts: curated words, so that text reads well, and invented ones, so that only copying helps."""

from __future__ import annotations

import random

from pensieve.demo.talk import words

_ANY_KINDS = (
    "animal",
    "food",
    "item",
    "hobby",
    "colour",
    "job",
    "drink",
    "flower",
    "thing",
    "city",
    "instrument",
    "spot",
)
_NAMES = ("name", "city", "country", "language", "pet")
_PLACES = (
    "in the",
    "in the",
    "on the",
    "under the",
    "behind the",
    "next to the",
    "near the",
    "by the",
    "at the",
)
_GLUE = ("of the", "of", "and", "the", "in the", "with", "on", "at", "for", "a", "in", "to", "&", "my")


class Values:
    """Values from one side of the split. ``plain``: only what reads well, nothing scrambled or spliced."""

    def __init__(self, rng: random.Random, held_out: bool, plain: bool = False) -> None:
        self._rng = rng
        self._held_out = held_out
        self._plain = plain

    def draw(self, kind: str) -> str:
        """A value of this kind."""
        special = getattr(self, f"_draw_{kind}", None)
        if special is not None:
            text: str = special()
            return text
        if kind in words.UNSPLIT:
            return self._rng.choice(words.pool(kind, False))
        word = self.word(kind)
        if kind in _NAMES and word[0].islower() and (self._plain or self._rng.random() < 0.8):
            return word.title()
        return word

    def word(self, kind: str) -> str:
        """A curated word of the kind, or any other word; now and then a phrase."""
        rng, held_out = self._rng, self._held_out
        draw = rng.random()
        if draw < (0.75 if self._plain else 0.35) and kind != "any":
            return rng.choice(words.pool(kind, held_out))
        if self._plain:
            return words.invented_word(rng, held_out) if draw > 0.5 else self._curated()
        if draw < 0.47:
            return self._curated()
        if draw < 0.69:
            return words.invented_word(rng, held_out)
        if draw < 0.84:
            return words.spliced_word(rng, held_out)
        if draw < 0.90:
            return words.scrambled_word(rng, held_out)
        if draw < 0.95:
            return words.accented_word(rng, held_out)
        return self._phrase()

    def _curated(self) -> str:
        return self._rng.choice(words.pool(self._rng.choice(_ANY_KINDS), self._held_out))

    def _phrase(self) -> str:
        """Two to five words, some of them glue or numbers."""
        rng = self._rng
        parts = [self._simple()]
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.4:
                parts.append(rng.choice(_GLUE))
            parts.append(
                words.number(rng, rng.randint(2, 4), self._held_out)
                if rng.random() < 0.12
                else self._simple()
            )
        text = " ".join(parts)
        return text.title() if rng.random() < 0.2 else text

    def _simple(self) -> str:
        draw = self._rng.random()
        if draw < 0.4:
            return self._curated()
        maker = words.invented_word if draw < 0.8 else words.spliced_word
        return maker(self._rng, self._held_out)

    def _draw_name(self) -> str:
        rng = self._rng
        draw = rng.random()
        if draw < (0.7 if self._plain else 0.35):
            first = rng.choice(words.pool("name", self._held_out))
        elif draw < 0.75 or self._plain:
            first = words.invented_name(rng, self._held_out)
        else:
            first = self.word("name").capitalize()
        return (
            f"{first} {words.invented_name(rng, self._held_out)}"
            if not self._plain and rng.random() < 0.1
            else first
        )

    def _draw_pet(self) -> str:
        if self._rng.random() < (0.7 if self._plain else 0.35):
            return self._rng.choice(words.pool("pet", self._held_out))
        return self._draw_name()

    def _draw_names(self) -> str:
        return f"{self._draw_pet()} and {self._draw_pet()}"

    def _draw_thing(self) -> str:
        """Something that can lie around: an object, or, when not plain, anything with a name."""
        rng = self._rng
        if self._plain or rng.random() < 0.25:
            return rng.choice(words.pool("thing", self._held_out))
        word = self._simple() if rng.random() < 0.8 else f"{self._simple()} {self._simple()}"
        word = word.lower()
        return f"{word}s" if rng.random() < 0.2 else word

    def _draw_list(self) -> str:
        items = [self.word("item") for _ in range(self._rng.choice((2, 3, 3, 4)))]
        return ", ".join(items[:-1]) + self._rng.choice((" and ", " and ", ", and ", ", ")) + items[-1]

    def _draw_title(self) -> str:
        if self._plain:
            return self._simple().title()
        text = self._phrase() if self._rng.random() < 0.35 else self.word("any")
        text = " ".join(part if part in _GLUE else part.capitalize() for part in text.split(" "))
        return ("The " if self._rng.random() < 0.25 else "") + text

    def _draw_spot(self) -> str:
        rng = self._rng
        if not self._plain and rng.random() < 0.06:
            return (
                f"on level {words.number(rng, rng.randint(1, 2), False)}"
                if not self._held_out
                else self._draw_spot()
            )
        return f"{rng.choice(_PLACES)} {self.word('spot')}"

    def _draw_date(self) -> str:
        day, month = self._rng.randint(1, 31), self._rng.choice(words.pool("month", False))
        suffix = {1: "st", 2: "nd", 3: "rd"}.get(day % 10 if day // 10 != 1 else 0, "th")
        return self._rng.choice(
            (f"{day} {month}", f"{month} {day}", f"{month} {day}{suffix}", f"the {day}{suffix} of {month}")
        )

    def _draw_time(self) -> str:
        rng = self._rng
        hour = rng.choice((f"{rng.randint(1, 12)} {rng.choice(('am', 'pm'))}",
                           f"{rng.randint(1, 12)}{rng.choice(('am', 'pm'))}",
                           f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"))  # fmt: skip
        day = rng.choice(words.pool("day", False))
        return rng.choice(
            (
                f"at {hour}",
                f"at {hour}",
                f"on {day}",
                f"on {day} at {hour}",
                "tomorrow",
                f"tomorrow at {hour}",
            )
        )

    def _draw_code(self) -> str:
        return words.code(self._rng, self._held_out)

    def _draw_number(self) -> str:
        digits = words.number(self._rng, self._rng.randint(2 if self._held_out else 1, 6), self._held_out)
        if self._plain or self._rng.random() < 0.85:
            return digits
        return f"{self._rng.randint(0, 99)}.{digits}"

    def _draw_number2(self) -> str:
        return words.number(self._rng, 2, self._held_out)

    def _draw_number3(self) -> str:
        return words.number(self._rng, 3, self._held_out)

    def _draw_number4(self) -> str:
        return words.number(self._rng, 4, self._held_out)

    def _draw_phone(self) -> str:
        digits = words.number(self._rng, self._rng.randint(5, 9), self._held_out)
        if self._rng.random() < 0.6:
            return digits
        cut = self._rng.randint(2, 4)
        return digits[:cut] + self._rng.choice("- ") + digits[cut:]

    def _draw_email(self) -> str:
        return (
            f"{self._simple().replace(' ', '.').lower()}@{words.invented_word(self._rng, self._held_out)}.com"
        )
