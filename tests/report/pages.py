"""A written page, taken apart."""

from __future__ import annotations

import re
from html.parser import HTMLParser

Attributes = list[tuple[str, str | None]]


class ParsedPage(HTMLParser):
    """What a page is made of: its tags and the names of their attributes, its links, and every
    number that says where something is drawn.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.links: list[str] = []
        self.places: list[float] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Attributes) -> None:
        self.tags.append(tag)
        is_clip = "clip-path" in dict(attributes)
        for name, value in attributes:
            is_within_page = (value or "").startswith("#")
            if not is_within_page:
                self.names.add(name)
            if name in ("src", "href") and not is_within_page:
                self.links.append(value or "")
            if name in ("x", "y") or (name == "d" and not is_clip):
                self.places += map(float, re.findall(r"-?[0-9.]+", value or ""))
