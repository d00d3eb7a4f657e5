"""What a page of HTML contains, as a browser reads it."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page whose elements are closed in order, have ids of their own, and react to nothing.

    Attributes:
        ids: of its elements.
        inner, outer: what it refers to in itself and elsewhere.
        headings: their levels, in order.
        scripts: their text.
        policy: what it may load.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.inner: set[str] = set()
        self.outer: set[str] = set()
        self.headings: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert not [name for name in given if name.startswith("on")]
        if tag not in _VOID:
            self._open.append(tag)
        if tag in {"h1", "h2", "h3"}:
            self.headings.append(tag)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if "id" in given:
            assert given["id"] not in self.ids
            self.ids.add(given["id"])
        assert tag != "svg" or given.get("role") == "img"
        for name in ("aria-labelledby", "aria-describedby"):
            self.inner.update(given.get(name, "").split())
        link = given.get("href") or given.get("src") or ""
        if link.startswith("#"):
            self.inner.add(link[1:])
        elif link and not link.startswith("data:"):
            self.outer.add(link)

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
