"""Text that ships with the project: `prose.txt`, after the first chapter of "Alice's Adventures in
Wonderland" by Lewis Carroll (Macmillan, London 1865; the author died in 1898), abridged. Public
domain in every country. A paragraph is one line.
"""
