"""An OpenAI-compatible HTTP front end to plan servers."""
