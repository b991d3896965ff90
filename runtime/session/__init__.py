"""Sessions: requests are admitted and answered; prefixes are stored and reused."""

from thor_dflash.runtime.session.session import Chunk, Report, Request, Session, open_session

__all__ = ["Chunk", "Report", "Request", "Session", "open_session"]
