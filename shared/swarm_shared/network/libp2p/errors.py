"""Translation of py-libp2p's exceptions into this project's errors; the only place for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from swarm_shared.base.error_groups import leaves
from swarm_shared.base.errors import LinkClosed, LinkTimeout, NetworkError, SwarmError


@contextmanager
def stream_errors(doing: str) -> Iterator[None]:
    """Translate errors of reading and writing a stream: every failure means that the link is lost.

    py-libp2p has no common base for what its streams raise (RawConnError and KeyError have been
    seen among its own), so that any other exception counts as a lost link, too. Cancellation is no
    Exception and passes through.
    """
    try:
        yield
    except SwarmError:
        raise
    except trio.TooSlowError as error:
        raise LinkTimeout(f"{doing}: no progress in the time given") from error
    except MuxedStreamEOF as error:
        raise LinkClosed(f"{doing}: the other side ended the stream") from error
    except Exception as error:
        raise LinkClosed(f"{doing}: the link is lost ({summary(error)})") from error


@contextmanager
def dial_errors(doing: str) -> Iterator[None]:
    """Translate errors of connecting and opening streams: NetworkError with the reason."""
    try:
        yield
    except SwarmError:
        raise
    except trio.TooSlowError as error:
        raise LinkTimeout(f"{doing}: no answer in the time given") from error
    except Exception as error:
        raise NetworkError(f"{doing}: {summary(error)}") from error


def summary(error: BaseException) -> str:
    """Describe the innermost cause in one line: py-libp2p wraps errors in several layers."""
    innermost: BaseException | None = error
    while innermost is not None:
        error = next(leaves(innermost))
        innermost = error.__cause__
    # Errors of name resolution are OSErrors as well, with numbers of their own.
    if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
        return os.strerror(error.errno).lower()
    text = " ".join(str(error).split())[:200]
    return text or type(error).__name__
