"""Pages of the latent cache: who holds which, counted.

The tensors are the model's (`hedgerow.model.cache`); this file only knows numbers. A page may have several holders, so
that a shared prefix is one set of pages; it is free when its last holder lets go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hedgerow.errors import InvariantViolation


class PagePool:
    """`pages` pages of `page_size` slots. Not safe for use by several threads at once.

    `reserve` hands out everything that a sequence can ever need when it is admitted, so that no running sequence waits
    for memory and none has to be evicted.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self._holders = [0] * pages
        self._held = bytearray(pages)  # 1 where somebody holds the page: searched as bytes are, since a cache fills up
        self._free = pages

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free

    def pages_for(self, slots: int) -> int:
        """Pages that `slots` slots need."""
        return -(-slots // self.page_size)

    def reserve(self, pages: int) -> tuple[int, ...] | None:
        """Takes `pages` free pages, each with one holder; None, and nothing taken, when fewer are free.

        Neighbours are preferred: attention reads a run of pages in place, scattered pages are gathered first.
        """
        if pages > self._free:
            return None
        taken = self._run(pages) or tuple(self._scattered(pages))
        for page in taken:
            self._holders[page] = self._held[page] = 1
        self._free -= pages
        return taken

    def holders(self, page: int) -> int:
        """How many hold the page."""
        return self._holders[page]

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page. A free page cannot be shared: InvariantViolation."""
        for page in pages:
            if self._holders[page] == 0:
                raise InvariantViolation(f"page {page} is shared but free", metadata={"page": page})
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes one holder from each page. Releasing a free page is a bug: InvariantViolation."""
        for page in pages:
            if self._holders[page] == 0:
                raise InvariantViolation(f"page {page} is released but free", metadata={"page": page})
            self._holders[page] -= 1
            if not self._holders[page]:
                self._held[page] = 0
                self._free += 1

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Compares the counts with `held`, the pages of every holder; InvariantViolation names the first difference."""
        expected = [0] * self.pages
        for pages in held:
            for page in pages:
                expected[page] += 1
        for page, (counted, real) in enumerate(zip(self._holders, expected, strict=True)):
            if counted != real:
                raise InvariantViolation(
                    f"page {page} counts {counted} holders and has {real}",
                    metadata={"page": page, "counted": counted, "holders": real},
                )
        if self._free != expected.count(0) or self._free != self._held.count(0):
            raise InvariantViolation(
                f"{self._free} pages count as free and {expected.count(0)} are",
                metadata={"counted": self._free, "free": expected.count(0)},
            )

    def _run(self, pages: int) -> tuple[int, ...] | None:
        """The first run of `pages` free neighbours."""
        first = self._held.find(bytes(pages))
        return tuple(range(first, first + pages)) if first >= 0 else None

    def _scattered(self, pages: int) -> Iterable[int]:
        page = -1
        for _ in range(pages):
            page = self._held.find(0, page + 1)
            yield page
