"""Reports for people: a profile as text and as one HTML page."""
