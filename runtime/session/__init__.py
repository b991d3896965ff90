"""Sessions: requests are admitted and answered; prefixes are stored and reused."""

from thor_dflash.core.extras import extra

with extra("engine"):
    from thor_dflash.runtime.session.session import (
        Request,
        RequestReport,
        Session,
        TokenChunk,
        open_session,
    )

__all__ = ["Request", "RequestReport", "Session", "TokenChunk", "open_session"]
