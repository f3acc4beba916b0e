"""Context managers that close themselves: a class gives `close`, and its block ends with it."""

from __future__ import annotations

from typing import Self


class Closing:
    """The end of a `with` block calls `close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what is held."""
        raise NotImplementedError


class AsyncClosing:
    """The end of an `async with` block calls `close`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release what is held."""
        raise NotImplementedError
