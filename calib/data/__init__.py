"""Text that ships with the project: `prose.txt`, the first chapter of "Alice's Adventures in
Wonderland" by Lewis Carroll (1865; he died in 1898, so it is in the public domain everywhere), word
for word as in Project Gutenberg's text 11, The Millennium Fulcrum Edition 3.0. A paragraph is one
line; quotation marks and dashes are ASCII, and emphasis is not marked.
"""
