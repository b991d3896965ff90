"""Sessions: requests are admitted and answered; prefixes are stored and reused."""
